"""Python stacks of ranks that cannot write them: stopped, gone, replaced. Of others: diagnosis/test_hang_detector."""

from __future__ import annotations

import os
import signal
import time
from typing import Any

import pytest

from launcher.agent.rank import STACKS
from launcher.agent.stacks import catches

READY = "print('ready', flush=True)\n"


@pytest.mark.mpi
@pytest.mark.timeout(60)
class TestOfARank:
    def test_a_stopped_rank_shows_its_last_sample(self, keep: Any, becomes: Any) -> None:
        body = """
        from collectives.flight.recorder import process_recorder
        from collectives.flight.recorder import start_sampler
        def load():
            start_sampler(process_recorder(), period=0.05)
            time.sleep(0.3)
            print("ready", flush=True)
            time.sleep(60)
        load()
        """
        kept = keep(body)
        kept.says("ready")
        kept.next("heartbeat", where=lambda beat: beat["where"])
        os.kill(kept.pid, signal.SIGSTOP)
        becomes(kept.pid, "T")
        time.sleep(0.3)
        since = time.monotonic()
        kept.send(stacks=True)
        text = kept.next("stacks")
        assert time.monotonic() - since < 0.5  # at once
        begin, _, age = text.partition(" in load ")
        assert begin.startswith("it is stopped and cannot write its stacks; its Python stood at kept.py:")
        assert 0.2 < float(age.split()[0]) < 10
        beat = kept.next("heartbeat", where=lambda beat: beat["state"] == "T")
        assert beat["where"].endswith(" in load")
        kept.send(kill=True)
        kept.end()

    def test_a_program_that_has_taken_the_place_of_python(self, keep: Any) -> None:
        kept = keep(READY + "os.execvp('sleep', ['sleep', '60'])\n")
        kept.says("ready")
        kept.next("heartbeat")
        time.sleep(0.5)
        kept.send(stacks=True)  # the signal would end it
        assert kept.next("stacks").startswith("it has closed the file for its stacks")
        kept.send(signal=int(signal.SIGTERM))
        assert kept.end()["end"] == -signal.SIGTERM

    def test_a_second_request_gets_the_stacks_alone(self, keep: Any) -> None:
        kept = keep(READY + "time.sleep(60)\n")
        kept.says("ready")
        for _ in range(2):
            kept.send(stacks=True)
            text = kept.next("stacks")
            assert "kept.py" in text
            assert "\0" not in text
        kept.send(kill=True)
        kept.end()

    def test_a_rank_that_has_ended(self, keep: Any) -> None:
        kept = keep("")
        kept.until(lambda: [message for message in kept.heard if "end" in message])
        kept.send(stacks=True)
        assert kept.next("stacks") == "it has ended\n"
        kept.end()


def test_what_a_process_catches() -> None:
    status = f"SigIgn:\tffffffffffffffff\nSigCgt:\t{1 << STACKS - 1 | 2:016x}\nCapInh:\t0\n"
    assert catches(status, STACKS)
    assert not catches(status, STACKS - 1)
    assert not catches("", STACKS)
