"""The figures of a running job: rates, what other processes read, what Prometheus scrapes, a port that is taken."""

from __future__ import annotations

import json
import os
import re
import signal
import socket
import subprocess
import sys
import urllib.request
from collections.abc import Iterator
from typing import Any

import pytest

from launcher.console.metrics_server import METRICS, MetricsServer
from launcher.console.status import Status, running_jobs
from launcher.errors import UsageError
from launcher.job import Job
from tests.conftest import ROOT, wait_until


@pytest.fixture
def status() -> Iterator[Status]:
    """Of two ranks that have just started, for the second time."""
    shown = Status(Job(module="train", args=("--lr", "1"), n=2))
    shown.attempt_started(1, 2)
    for rank in range(2):
        shown.rank_started(rank, {"rank": rank, "pid": 40 + rank, "agent": 30 + rank, "host": "a"})
    yield shown
    shown.close()


def beat(step: int | None, **figures: float) -> dict[str, Any]:
    """A heartbeat of a rank that has a flight record."""
    sums = dict.fromkeys(("samples", "exposed", "waited", "reduced_bytes"), 0.0)
    return {"state": "R", "rss": 4096, "step": step, "call": None, "where": "train.py:8 in step", **sums, **figures}


@pytest.mark.parametrize(
    ("beats", "rate"),
    [
        ([(0, None)], None),
        ([(0, 5)], None),
        ([(0, None), (1, 5), (2, 9)], 4.0),
        ([(0, 5), (1, 5), (2, 9)], 2.0),
        ([(second, 10 * second) for second in range(30)], 10.0),
        ([(second, second // 30) for second in range(120)], 3 / 119),  # a step in half a minute
        ([(0, 0), (1, 10), (5, 10)], 2.0),  # it hangs
        ([(0, 10), (1, 0)], 0.0),  # the program counts anew
    ],
)
def test_steps_a_second(beats: list[tuple[float, int | None]], rate: float | None, status: Status) -> None:
    for second, step in beats:
        status.heartbeat(0, beat(step), second)
    status.tick(200.0)
    assert status.ranks[0].get("step/s") == (None if rate is None else pytest.approx(rate))


@pytest.mark.parametrize(
    ("waited", "slowest"),
    [
        ((0.004, 0.0), [0, 0]),  # too little to notice
        ((0.3, 0.3), [0, 0]),  # now the one, now the other
        ((0.1, 0.4), [0, 1]),
    ],
)
def test_the_rank_for_which_others_wait(waited: tuple[float, float], slowest: list[int], status: Status) -> None:
    assert status.tick(0.0) == 1.0
    assert [rank["slowest"] for rank in status.ranks] == [0, 0]
    for second in range(2):
        for rank, share in enumerate(waited):
            status.heartbeat(rank, beat(second, waited=share * second), second)
    status.tick(0.5)
    assert [rank["slowest"] for rank in status.ranks] == [0, 0], "once a second"
    status.tick(1.0)
    assert [rank["slowest"] for rank in status.ranks] == slowest


def test_what_is_written_can_be_read_from_outside(status: Status) -> None:
    assert running_jobs(os.getpid()) == [], "nothing is known yet"
    status.heartbeat(0, beat(10, samples=100, loss=float("nan")), 1.0)
    status.heartbeat(0, beat(30, samples=300), 3.0)
    status.rank_ended(1, -9)
    status.tick(3.0)
    [result] = running_jobs(os.getpid())
    assert (result["pid"], result["target"]) == (os.getpid(), "-m train --lr 1")
    first, second = result["ranks"]
    figures = {"step/s": 10, "samples/s": 100, "restarts": 1, "where": "train.py:8 in step"}
    assert first.items() >= figures.items()
    assert first["loss"] != first["loss"]
    assert second == {"rank": 1, "where": "ended with -9", "slowest": 0}
    with subprocess.Popen(["sleep", "60"], pass_fds=[status._fd]) as child:  # as what ddp-launch has forked
        assert running_jobs(child.pid) == []
        child.kill()
    status.attempt_started(2, 1)
    status.tick(5.0)
    assert running_jobs(os.getpid())[0]["ranks"] == []


def scrape(port: int) -> dict[str, float]:
    with urllib.request.urlopen(f"http://127.0.0.1:{port}/metrics", timeout=20) as answer:
        lines = answer.read().decode().splitlines()
    pairs = (line.rsplit(" ", 1) for line in lines if not line.startswith("#"))
    return {name: float(number) for name, number in pairs}


@pytest.fixture
def port() -> int:
    """One that is free."""
    with socket.create_server(("127.0.0.1", 0)) as any_port:
        return int(any_port.getsockname()[1])


def test_prometheus_reads_every_figure_that_is_known(status: Status, port: int) -> None:
    pytest.importorskip("prometheus_client", reason="needs prometheus_client")
    server = MetricsServer(("127.0.0.1", port), status)
    assert scrape(port) == {}
    status.heartbeat(0, beat(10), 1.0)
    figures = beat(30, samples=300, waited=1.0, reduced_bytes=4, exposed=0.5, loss=float("inf"), device_bytes=8)
    status.heartbeat(0, figures, 3.0)
    status.rank_ended(1, 0)
    status.tick(3.0)
    result = scrape(port)
    assert result.pop('ddp_slowest_rank{rank="1"}') == 0
    assert {name.removesuffix('{rank="0"}'): value for name, value in result.items()} == {
        "ddp_step": 30,
        "ddp_steps_per_second": 10,
        "ddp_samples_total": 300,
        "ddp_samples_per_second": 150,
        "ddp_loss": float("inf"),
        "ddp_exposed_communication_seconds_total": 0.5,
        "ddp_waited_for_seconds_total": 1,
        "ddp_slowest_rank": 1,
        "ddp_reduced_bytes_total": 4,
        "ddp_restarts_total": 1,
        "ddp_resident_memory_bytes": 4096,
        "ddp_device_memory_bytes": 8,
    }
    for host, number, why in (("127.0.0.1", port, "Address already in use"), ("no.such.host.invalid", 1, "name|Name")):
        with pytest.raises(UsageError, match=f"metrics cannot be served at {host}:{number}: .*({why})"):
            MetricsServer((host, number), status)
    server.close()
    with pytest.raises(OSError, match="refused"):
        scrape(port)


def test_without_the_library_it_is_wrong_use(status: Status, monkeypatch: Any) -> None:
    monkeypatch.setitem(sys.modules, "prometheus_client", None)
    with pytest.raises(UsageError, match=r"--metrics-port needs prometheus_client: pip install .*\[prometheus\]"):
        MetricsServer(("127.0.0.1", 0), status)


def test_the_dashboard_and_the_docs_show_what_is_served() -> None:
    board = json.loads((ROOT / "configs" / "grafana.json").read_text())
    queries = [target["expr"] for panel in board["panels"] for target in panel["targets"]]
    queries += [variable["query"] for variable in board["templating"]["list"]]
    served = set(METRICS.values())
    assert set(re.findall(r"ddp_\w+", " ".join(queries))) <= served
    assert set(re.findall(r"`(ddp_\w+)`", (ROOT / "docs" / "launcher.md").read_text())) == served


TRAIN = """
import numpy as np
import collectives, ddp
model = ddp.DataParallel(ddp.nn.Linear(3, 2))
loader = ddp.data.DataLoader(np.ones((4, 3), np.float32), batch_size=4)
print("ready", flush=True)
while True:
    for x in loader:
        if rank == 1:
            time.sleep(0.05)
        loss = model(x).sum()
        loss.backward()
        collectives.mark_step(loss=loss)
"""


@pytest.mark.mpi
def test_a_training_is_seen_from_outside(start_launch: Any, port: int) -> None:
    pytest.importorskip("prometheus_client", reason="needs prometheus_client")
    job = start_launch(TRAIN, options=("--metrics-port", str(port)))

    def figures() -> list[dict[str, Any]]:
        return [rank for result in running_jobs(job.process.pid) for rank in result["ranks"]]

    wait_until(lambda: [rank.get("slowest") for rank in figures() if "step/s" in rank] == [0, 1], 60)
    ranks = figures()
    seen = scrape(port)
    for number, rank in enumerate(ranks):
        step = rank["step"]
        assert seen[f'ddp_step{{rank="{number}"}}'] >= step
        assert 4 * step <= rank["samples"] <= 4 * step + 8
        assert rank["reduced_bytes"] >= 4 * (2 * 3 + 2) * step
        assert rank["loss"] is not None
        assert rank["where"].startswith("job.py:")
        assert "device_bytes" not in rank
    assert ranks[0]["exposed/s"] > 0
    assert [rank["slowest"] for rank in ranks] == [0, 1]
    os.kill(ranks[1]["pid"], signal.SIGKILL)
    job.wait(60, code=137)
    assert running_jobs(job.process.pid) == []
