"""Runs at Weights & Biases and at MLflow servers, by their own clients, on rank 0.

A server may be slow, unreachable or broken. The training must not wait for it, or end because of it: other ranks would
run into the time limit of their collectives. So a separate thread makes all calls of the client that may wait. The
first error that remains after the client's own retries is printed to stderr, and nothing more is logged.

A job that resumes from a checkpoint repeats steps. Neither service replaces a value: W&B ignores a step below the last,
and MLflow keeps both values. So a run that is continued keeps the values that it has, and gets only later steps.
"""

from __future__ import annotations

import atexit
import importlib
import queue
import sys
import threading
from collections.abc import Callable
from typing import Any

from ddp.errors import how_to_install
from ddp.metrics.json_lines import as_plain, check_step, is_writer

# Seconds. It has to be shorter than the timeout of `init` (default: 600 s): other ranks wait for rank 0 at exit.
_CLOSE_LIMIT = 30.0


class Tracker:
    """Sends the values that rank 0 logs to a service, in a separate thread.

    start: begins or continues a run; returns two functions: one logs (step, values), the other ends the run
    rank, comm: this process's rank, or its communicator; pass one of the two
    """

    def __init__(self, start: Callable[[], Any], rank: int | None, comm: Any) -> None:
        self._start = start
        self._entries: queue.SimpleQueue[Any] = queue.SimpleQueue()
        self._thread: threading.Thread | None = None
        if is_writer(type(self).__name__, rank, comm):
            self._thread = threading.Thread(target=self._run, daemon=True)
            self._thread.start()
            atexit.register(self.close)

    def log(self, step: int, **values: Any) -> None:
        """Logs values of one step. Pass a name with a slash as `log(step, **{"train/loss": loss})`.

        step: a whole number, not below the step of an earlier call. Raises: ArgumentError on rank 0 if it is not a
        whole number.
        """
        if self._thread is not None:
            entry = check_step(self, step), {name: as_plain(value) for name, value in values.items()}
            if self._thread.is_alive():
                self._entries.put(entry)

    def close(self) -> None:
        """Ends the run, after everything is logged. Waits for this at most 30 s, and then prints a message."""
        if self._thread is not None:
            atexit.unregister(self.close)
            self._entries.put(None)
            self._thread.join(_CLOSE_LIMIT)
            if self._thread.is_alive():
                self._say("not all was logged in time")

    def __enter__(self) -> Tracker:
        return self

    def __exit__(self, *error: object) -> None:
        self.close()

    def _run(self) -> None:
        try:
            write, finish = self._start()
            # Registered after the exit handlers of the client, and so called before them.
            atexit.unregister(self.close)
            atexit.register(self.close)
            while (entry := self._entries.get()) is not None:
                write(*entry)
            finish()
        except ImportError as error:
            self._say(f"{error}: {how_to_install(type(self).__name__.lower())}")
        except BaseException as error:  # clients exit the process if the user is not logged in
            self._say(f"{type(error).__name__}: {error}")

    def _say(self, why: str) -> None:
        print(f"ddp: {type(self).__name__}: {why}; the training goes on without it", file=sys.stderr)


class WandB(Tracker):
    """A run at Weights & Biases. The extra `wandb` installs its client.

    project: W&B's project; None: its default
    run: the run's name and id. A process with the same id continues the run, and W&B keeps the values of the steps that
    the run has. None: each process makes its own run
    rank, comm: this process's rank, or its communicator; pass one of the two; only rank 0 logs
    options: further arguments of `wandb.init`: entity, config, tags, dir, mode

    W&B cannot continue an offline run, and a second offline run of the same id would replace the first when both are
    uploaded. So if W&B is offline, each process makes its own run, in the group `run`.

    `log` never waits for W&B, and no error of W&B ends the training: the first is printed to stderr. Values are what
    `wandb.log` takes, and tensors of one element.
    """

    def __init__(
        self,
        project: str | None = None,
        run: str | None = None,
        *,
        rank: int | None = None,
        comm: Any = None,
        **options: Any,
    ) -> None:
        super().__init__(lambda: _start_wandb(run, {"project": project, "name": run, **options}), rank, comm)


def _start_wandb(name: str | None, options: dict[str, Any]) -> Any:
    wandb = importlib.import_module("wandb")
    if name is not None:
        offline = (options.get("mode") or wandb.setup().settings.mode) == "offline"
        options |= {"group": name} if offline else {"id": name, "resume": "allow"}
    run = wandb.init(**options)
    first = run.starting_step if run.resumed else 0

    def write(step: int, values: dict[str, Any]) -> None:
        if step >= first:
            run.log(values, step=step)

    return write, run.finish


class MLflow(Tracker):
    """A run at the MLflow server or store that MLFLOW_TRACKING_URI names. The extra `mlflow` installs its client.

    experiment: MLflow's experiment, made if it does not exist
    run: the run's name. A process with the same name continues the latest run of this name, which keeps the values of
    the steps that it has. None: each process makes its own run
    rank, comm: this process's rank, or its communicator; pass one of the two; only rank 0 logs

    `log` never waits for MLflow, and no error of MLflow ends the training: the first is printed to stderr. Values are
    numbers and tensors of one element. MLflow takes no other values: they are left out.
    """

    def __init__(
        self,
        experiment: str = "Default",
        run: str | None = None,
        *,
        rank: int | None = None,
        comm: Any = None,
    ) -> None:
        super().__init__(lambda: _start_mlflow(experiment, run), rank, comm)


def _start_mlflow(experiment: str, name: str | None) -> Any:
    mlflow = importlib.import_module("mlflow")
    client = mlflow.MlflowClient()
    place = mlflow.set_experiment(experiment).experiment_id
    runs = [] if name is None else client.search_runs([place], f"attributes.run_name = '{name}'", max_results=1)
    run = mlflow.start_run(run_id=runs[0].info.run_id if runs else None, run_name=name)

    last = {
        name: max(metric.step for metric in client.get_metric_history(run.info.run_id, name))
        for name in run.data.metrics
    }

    def write(step: int, values: dict[str, Any]) -> None:
        new = {key: x for key, x in values.items() if isinstance(x, int | float) and step > last.get(key, -1)}
        mlflow.log_metrics(new, step=step)

    return write, mlflow.end_run
