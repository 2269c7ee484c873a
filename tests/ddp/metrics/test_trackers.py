"""Runs at W&B and MLflow: rank 0 alone, each step once after a resume, and what fails there is said once."""

from __future__ import annotations

import sys
import threading
import types
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import ddp
from ddp.errors import ArgumentError
from ddp.metrics import MLflow, WandB, trackers
from ddp.metrics.trackers import Tracker

BOTH = pytest.mark.parametrize(("tracker", "library"), [(WandB, "wandb"), (MLflow, "mlflow")])


class Kept(Tracker):
    """Keeps what it is given; `fail` may raise, or wait."""

    def __init__(self, fail: Callable[[object], object] = lambda step: None) -> None:
        self.got: list[Any] = []

        def write(step: int, values: dict[str, Any]) -> None:
            fail(step)
            self.got.append((step, values))

        def start() -> Any:
            fail("start")
            return write, lambda: (fail("finish"), self.got.append("finished"))

        super().__init__(start, 0, None)


@BOTH
def test_without_the_library_the_run_goes_on_and_it_is_said_once(
    tracker: Any, library: str, monkeypatch: Any, capsys: Any
) -> None:
    monkeypatch.setitem(sys.modules, library, None)
    with tracker("digits", comm=types.SimpleNamespace(rank=0)) as run:
        for step in range(3):
            run.log(step, loss=0.5)
    said = capsys.readouterr().err
    assert said.startswith(f"ddp: {tracker.__name__}: import of {library} halted")
    assert f"[{library}]" in said
    assert said.endswith("; the training goes on without it\n")
    assert said.count("\n") == 1
    with tracker("digits", rank=1) as run:  # nor does another rank look at a value
        run.log(0, loss=object())
    assert capsys.readouterr().err == ""
    with pytest.raises(ArgumentError, match=f"{tracker.__name__}: expected this process's rank"):
        tracker("digits")


def test_values_are_plain_and_a_run_ends_once() -> None:
    with Kept() as run:
        run.log(np.int64(3), loss=ddp.tensor(0.5), name="x")
        with pytest.raises(ArgumentError, match=r"Kept.log: expected a step that is a whole number, got 0.5"):
            run.log(0.5)  # type: ignore[arg-type]  # what is refused
    run.close()
    run.log(4)
    assert run.got == [(3, {"loss": 0.5, "name": "x"}), "finished"]


@pytest.mark.parametrize(
    ("where", "error", "got", "says"),
    [
        ("start", SystemExit("no key"), [], "SystemExit: no key"),
        (1, OSError("no network"), [(0, {})], "OSError: no network"),
        ("finish", OSError("no network"), [(0, {}), (1, {}), (2, {})], "OSError: no network"),
    ],
)
def test_what_fails_is_said_once(where: Any, error: BaseException, got: Any, says: str, capsys: Any) -> None:
    def fail(at: object) -> None:
        if at == where:
            raise error

    with Kept(fail) as run:
        for step in range(3):
            run.log(step)
    assert run.got == got
    assert capsys.readouterr().err == f"ddp: Kept: {says}; the training goes on without it\n"


def test_a_service_that_hangs_holds_nothing_up(monkeypatch: Any, capsys: Any) -> None:
    over = threading.Event()
    monkeypatch.setattr(trackers, "_CLOSE_LIMIT", 0.1)
    run = Kept(lambda at: over.wait(20))
    run.log(0)
    run.close()
    assert capsys.readouterr().err == "ddp: Kept: not all was logged in time; the training goes on without it\n"
    over.set()
    assert run._thread is not None
    run._thread.join(20)
    assert run.got == [(0, {}), "finished"]


def test_what_is_logged_is_there_though_nothing_closes_it(run_job: Any) -> None:
    script = """
import atexit, time
from ddp.metrics.trackers import Tracker
def start():
    atexit.register(print, "the client ends")  # as clients do
    time.sleep(0.2)
    return (lambda step, values: print(step)), (lambda: print("finished"))
tracker = Tracker(start, 0, None)
tracker.log(7)
"""
    done = run_job([sys.executable, "-c", script], timeout=60, code=0, err="")
    assert done.stdout.split("\n") == ["7", "finished", "the client ends", ""]


def fake_wandb(mode: str, starting_step: int) -> Any:
    """A `wandb` that keeps the arguments of its calls; the run is resumed if it has steps."""
    calls: list[Any] = []
    run = types.SimpleNamespace(
        resumed=starting_step > 0,
        starting_step=starting_step,
        log=lambda values, step: calls.append((step, values)),
        finish=lambda: calls.append("finished"),
    )
    setup = lambda: types.SimpleNamespace(settings=types.SimpleNamespace(mode=mode))  # noqa: E731
    return types.SimpleNamespace(calls=calls, setup=setup, init=lambda **options: (calls.append(options), run)[1])


@pytest.mark.parametrize(
    ("mode", "run", "starting_step", "options"),
    [
        ("online", "a", 0, {"id": "a", "resume": "allow"}),
        ("online", "a", 2, {"id": "a", "resume": "allow"}),
        ("online", None, 0, {}),
        ("offline", "a", 0, {"group": "a"}),
    ],
)
def test_a_run_of_wandb_that_is_gone_on_with(
    mode: str, run: str | None, starting_step: int, options: Any, monkeypatch: Any
) -> None:
    library = fake_wandb(mode, starting_step)
    monkeypatch.setitem(sys.modules, "wandb", library)
    with WandB("digits", run, rank=0, config={"lr": 0.1}) as tracker:
        for step in range(1, 4):
            tracker.log(step, loss=0.5)
    told, *rest = library.calls
    assert told == {"project": "digits", "name": run, "config": {"lr": 0.1}, **options}
    assert rest == [*((step, {"loss": 0.5}) for step in range(max(1, starting_step), 4)), "finished"]


def test_wandb_offline_takes_what_is_logged(tmp_path: Path, monkeypatch: Any, capfd: Any) -> None:
    pytest.importorskip("wandb")
    monkeypatch.setenv("WANDB_MODE", "offline")
    monkeypatch.setenv("WANDB_SILENT", "true")
    for _ in range(2):
        with WandB("digits", "a", rank=0, dir=str(tmp_path), settings={"console": "off"}) as run:
            for step in range(3):
                run.log(step, loss=ddp.tensor(0.5))
    assert "ddp: WandB" not in capfd.readouterr().err
    runs = [path.name.rpartition("-")[2] for path in (tmp_path / "wandb").glob("offline-run-*")]
    assert len(set(runs)) == 2, "a second run of the same id would replace the first when they are uploaded"
    assert "a" not in runs


def test_mlflow_has_each_step_once(tmp_path: Path, monkeypatch: Any, capfd: Any) -> None:
    mlflow = pytest.importorskip("mlflow")
    monkeypatch.setenv("MLFLOW_ALLOW_FILE_STORE", "true")
    monkeypatch.setenv("MLFLOW_TRACKING_URI", f"file://{tmp_path}")
    for steps, loss in ((range(4), 1.0), (range(2, 6), 2.0)):  # the second attempt resumes at step 2
        with MLflow("digits", "a", rank=0) as run:
            for step in steps:
                run.log(step, loss=ddp.tensor(loss), name="left out")
            run.log(5, **{"val/loss": float("nan")})
    with MLflow("digits", "a", rank=0) as run:
        run.log(6, loss=3.0, new=True)
    with MLflow("digits", "b", rank=0) as run:
        run.log(0, loss=9.0)
    assert "ddp: MLflow" not in capfd.readouterr().err
    client = mlflow.MlflowClient()
    other, first = client.search_runs([client.get_experiment_by_name("digits").experiment_id])
    assert (other.info.run_name, first.info.run_name, first.info.status) == ("b", "a", "FINISHED")

    def history(name: str) -> list[tuple[int, float]]:
        return [(each.step, each.value) for each in client.get_metric_history(first.info.run_id, name)]

    assert history("loss") == [(0, 1.0), (1, 1.0), (2, 1.0), (3, 1.0), (4, 2.0), (5, 2.0), (6, 3.0)]
    assert len(history("val/loss")) == 1
    assert history("new") == [(6, 1.0)]
