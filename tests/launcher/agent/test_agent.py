"""One agent and its rank: who they are, what passes between them, and that both end together."""

from __future__ import annotations

import os
import signal
import socket
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import pytest

from tests.conftest import ROOT
from tests.launcher.agent.conftest import AGENT

pytestmark = [pytest.mark.mpi, pytest.mark.timeout(60)]

SLEEP = "print('ready', flush=True)\ntime.sleep(60)\n"
# Says every signal of the user and every request to end, and goes on.
LISTEN = """
def say(number, frame):
    print("got", number, flush=True)
for number in (signal.SIGUSR1, signal.SIGUSR2, signal.SIGTERM):
    signal.signal(number, say)
"""


def test_who_it_is(keep: Any) -> None:
    kept = keep("print(os.environ['RANK'], os.environ['LOCAL_RANK'], os.getppid())", PMI_RANK="3", PMI_SIZE="4")
    hello = kept.hello
    assert (hello["rank"], hello["size"], hello["host"]) == (3, 4, socket.gethostname())
    assert hello["agent"] == kept.job.process.pid
    assert hello["engine"] == os.getpid()
    assert hello["gpus"] == []
    assert kept.end() == {"end": 0, "deserted": False, "memory": None}
    assert kept.out.split() == [b"3", b"%d" % hello["local_rank"], b"%d" % hello["agent"]]


def test_what_is_no_report_is_left_out(keep: Any) -> None:
    body = """
    from collectives import world
    pipe = int(os.environ[world.REPORT])
    for odd in (b"hello", b"\\xff\\x00", b"[1]", b"7", b"[" * 10_000, b'{"raised": 5}', b'{"end": 0}'):
        os.write(pipe, odd + b"\\n")
    os.write(pipe, b'{"leaving": "x"}\\n{"flight": null}\\n')
    os.write(pipe, b'{"raised": {}}\\n{"raised": {"type": "X", "message": 5, "traceback": ""}}\\n')
    for _ in range(40):
        os.write(pipe, bytes(1 << 16))  # and no end of a line
    world.report(leaving=3)
    sys.exit(3)
    """
    kept = keep(body)
    assert kept.end()["end"] == 3
    reports = [message for message in kept.heard if message and message.keys().isdisjoint(("heartbeat", "end"))]
    assert reports == [{"leaving": 3}] * 2


@pytest.mark.parametrize("number", [signal.SIGUSR1, signal.SIGTERM])
def test_what_an_engine_sends_to_all_reaches_the_rank_once(keep: Any, number: int) -> None:
    kept = keep(LISTEN + SLEEP)
    kept.says("ready")
    os.killpg(kept.hello["agent"], number)  # as engines do
    kept.says(f"got {number}")
    if number == signal.SIGTERM:
        assert kept.next("signalled") == number
    time.sleep(0.1)
    kept.send(signal=signal.SIGUSR2)
    kept.says(f"got {int(signal.SIGUSR2)}")
    assert b"got" not in kept.out
    # Who wants something else does not ask to end.
    assert not [message for message in kept.heard if "signalled" in message]
    kept.send(kill=True)
    kept.end()


@pytest.mark.parametrize("stopped", [False, True])
def test_a_launcher_that_goes_takes_all_with_it(keep: Any, stopped: bool) -> None:
    kept = keep("signal.signal(signal.SIGTERM, signal.SIG_IGN)\nsubprocess.Popen(['sleep', '60'])\n" + SLEEP)
    kept.says("ready")
    if stopped:
        kept.send(suspend=True)
    kept.channel.close()
    kept.job.assert_gone(3)


def test_freezing_and_thawing_all_but_what_was_stopped_before(keep: Any, becomes: Any) -> None:
    body = """
    plain = subprocess.Popen(["sleep", "60"], start_new_session=True)
    still = subprocess.Popen(["sleep", "60"])
    still.send_signal(signal.SIGSTOP)
    print(plain.pid, still.pid, "ready", flush=True)
    while True:
        time.sleep(0.01)
    """
    kept = keep(body)
    kept.until(lambda: b"ready" in kept.out)
    plain, still = map(int, kept.out.split()[:2])
    becomes(still, "T")
    kept.send(suspend=True)
    for pid in (kept.pid, plain, still):
        becomes(pid, "T")
    assert kept.next("heartbeat", where=lambda beat: beat["state"] == "T")  # it is described all the same
    kept.send(suspend=False)
    for pid in (kept.pid, plain):
        becomes(pid, "SR")
    becomes(still, "T")
    kept.send(kill=True)
    kept.end()


# The launcher of an agent, in a network of their own, whose only interface it switches off.
CUT_OFF = """
import os, select, subprocess, sys
from launcher.supervisor.listener import Listener
from launcher.protocol import ADDRESS, SECRET

ip, agent, job = sys.argv[1:]
subprocess.run([ip, "link", "set", "lo", "up"], check=True)
listener = Listener()
environ = {**os.environ, ADDRESS: listener.address, SECRET: listener.secret}
process = subprocess.Popen([sys.executable, agent, job], env=environ)
news = None
while news is None:
    for fileno in select.select(list(listener.filenos()), [], [], 20)[0]:
        news = listener.serve(fileno)
channel, hello = news
channel.send({"heartbeat_timeout": 1.0})
select.select([channel], [], [], 20)
channel.receive()
subprocess.run([ip, "link", "set", "lo", "down"], check=True)
assert process.wait(20) == 1
assert not os.path.exists(f"/proc/{hello['pid']}")
"""


def test_who_is_cut_off_from_the_launchers_machine_ends(run_in_own_network: Any, tmp_path: Path) -> None:
    (tmp_path / "job.py").write_text("import time\ntime.sleep(60)\n")
    run_in_own_network(CUT_OFF, AGENT, tmp_path / "job.py")


def test_beats_and_the_memory_of_a_rank_that_was_killed(keep: Any) -> None:
    body = """
    import numpy as np
    import collectives
    comm = collectives.init()
    def step(x):
        comm.all_reduce(x)
        collectives.mark_step()
    for _ in range(3):
        step(np.ones(4, np.float32))
    print("ready", flush=True)
    end = time.monotonic() + 60
    while time.monotonic() < end:
        pass
    """
    kept = keep(body)
    kept.says("ready")
    beat = kept.next("heartbeat", where=lambda beat: beat["calls"])
    since = time.monotonic()
    assert beat["state"] in "RS"
    assert beat["rss"] > 5 << 20
    assert (beat["step"], beat["calls"], beat["call_state"]) == (3, 3, "done")
    assert beat["call"].startswith("all_reduce #2 (kept.py:7) sum float32 (4,)")
    assert beat["call_age"] < 10
    kept.heard.clear()
    later = [kept.next("heartbeat") for _ in range(2)]
    assert later[-1]["cpu"] > beat["cpu"]
    assert time.monotonic() - since > 1.5  # once a second
    os.kill(kept.pid, signal.SIGKILL)
    begin, _, size = kept.end()["memory"].partition("it had ")
    assert (begin, size.split()[1:]) == ("", ["MiB", "at", "most"])
    assert 10 <= int(size.split()[0]) < 300


def test_a_agent_stays_tiny() -> None:
    code = (
        "import sys\n"
        "import launcher.agent.main\n"
        "rank = set(sys.modules)\n"
        "import launcher.agent.loop, collectives.flight.reader\n"
        "for name in ('typing', 'dataclasses', 'logging', 'inspect', 'threading', 'subprocess', 'numpy', 'tempfile'):\n"
        "    assert name not in sys.modules, name\n"
        "for name in ('json', 're', 'socket', 'select', 'hashlib', 'launcher.agent.loop', 'collectives.flight'):\n"
        "    assert name not in rank, name\n"
    )
    environ = {**os.environ, "PYTHONPATH": str(ROOT)}
    subprocess.run([sys.executable, "-S", "-c", code], check=True, timeout=60, env=environ)
