"""cuDNN's graphs: which plans are taken, what happens without one, and the names that the frontend must have."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any
from unittest import mock

import pytest

import ddp
from ddp._cuda import cudnn_graph
from ddp.errors import warn_once
from tests.gpu import cudnn_fake
from tests.gpu.installing import Real
from tests.gpu.test_attention import projected
from tests.gpu.test_convolution import close, run

STEPS = (
    "validate",
    "build_operation_graph",
    "create_execution_plans",
    "check_support",
    "build_plans",
    "execute",
    "deselect_numeric_notes",
    "get_workspace_size",
    "get_execution_plan_count",
    "build_plan_at_index",
    "get_workspace_size_plan_at_index",
    "execute_plan_at_index",
)
WARN = cudnn_graph._warn_without_cudnn  # which a GPU that is simulated without cuDNN replaces
KINDS = "data_type", "heur_mode", "build_plan_policy", "numerical_note", "diagonal_alignment"


def test_the_frontend_has_what_is_called() -> None:
    """Where it is installed; no GPU is needed for it."""
    frontend = pytest.importorskip("cudnn", reason="nvidia-cudnn-frontend is not installed")
    for name, (read, _, parameters) in cudnn_fake.OPERATIONS.items():
        text = getattr(frontend.pygraph, name).__doc__
        if f"{name}(self" in text:  # else this version does not name its arguments
            assert [each for each in (*read, *parameters) if f"{each}: " not in text] == [], name
    assert [each for each in STEPS if not callable(getattr(frontend.pygraph, each, None))] == []
    for kind in KINDS:
        mine: Any = getattr(cudnn_fake, kind)
        assert [each.name for each in mine if not hasattr(getattr(frontend, kind), each.name)] == [], kind


def test_what_cudnn_lacks_is_remembered_and_falls_back(cudnn: Any, caplog: pytest.LogCaptureFixture) -> None:
    cudnn.lacks = lambda operation: operation.startswith("conv")
    with caplog.at_level("INFO", logger="ddp.backends.cudnn"):
        first = run("cuda", ddp.float32, True)
        built = len(cudnn.graphs)
        run("cuda", ddp.float32, True)
    assert len(cudnn.graphs) == built
    assert cudnn.ran == []
    assert sum("no conv_dgrad" in record.message for record in caplog.records) == 1
    close(first, run("cpu", ddp.float32, False), ddp.float32)


def test_a_gpu_without_cudnn_is_warned_of_once(gpu: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(cudnn_graph, "_loaded", [])
    monkeypatch.setattr(cudnn_graph, "_warn_without_cudnn", WARN)
    warn_once.cache_clear()
    monkeypatch.setitem(sys.modules, "cudnn", None)  # import cudnn: ImportError
    assert not ddp.backends.cudnn.is_available()  # a question, and no reason to warn
    with pytest.warns(RuntimeWarning, match=r"cuDNN is not used: .* pip install .*\[cuda12\]'") as caught:
        run("cuda", ddp.float32, True)
    run("cuda", ddp.float16, True)  # another warning would be an error
    assert len(caught) == 1


def test_the_fastest_plan_is_kept_where_that_is_asked_for(cudnn: Any) -> None:
    ddp.backends.cudnn.benchmark = True
    run("cuda", ddp.float16, True)
    assert set(cudnn.indices) <= {0, 2}  # plan 1 cannot be built
    done = len(cudnn.indices)
    close(run("cuda", ddp.float16, True), run("cpu", ddp.float16, False), ddp.float16)
    assert len(cudnn.indices) == done + 3


def test_ten_plans_are_timed_of_those_that_can_be_built(cudnn: Any) -> None:
    ddp.backends.cudnn.benchmark = True
    cudnn.plans = 40
    run("cuda", ddp.float16, True)
    assert set(cudnn.indices) == {0, *range(2, 11)}


def test_a_plan_whose_workspace_does_not_fit_is_passed_over(cudnn: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    ddp.backends.cudnn.benchmark = True
    monkeypatch.setattr(
        cudnn_fake.Graph, "get_workspace_size_plan_at_index", lambda graph, index: 0 if index else 1 << 60
    )
    monkeypatch.setattr(cudnn_fake, "WORKSPACE", 0)
    run("cuda", ddp.float16, True)
    assert set(cudnn.indices) == {2}


def test_switches_are_put_back_by_those_who_patch_them(cudnn: Any) -> None:
    switches = ddp.backends.cudnn
    settings = cudnn_graph.settings
    with pytest.MonkeyPatch.context() as patch, mock.patch.object(switches, "allow_tf32", False):
        patch.setattr(switches, "benchmark", True)
        assert (settings.benchmark, settings.allow_tf32) == (True, False)
    assert (settings.benchmark, settings.allow_tf32) == (False, True)


FRONTEND = """
from threading import Thread
try:
    import torch
except ImportError:
    torch = None
def look():
    import torch
other = Thread(target=look)
other.start()
other.join()
def backend_version():
    return 92800
"""


def test_the_frontend_finds_no_torch_and_other_threads_do(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for name, text in (("cudnn", FRONTEND), ("torch", "")):
        (tmp_path / f"{name}.py").write_text(text)
        monkeypatch.setitem(sys.modules, name, None)
        del sys.modules[name]
    monkeypatch.syspath_prepend(tmp_path)
    monkeypatch.setattr(cudnn_graph, "_loaded", [])
    finders = [*sys.meta_path]
    assert cudnn_graph.module().torch is None
    assert "torch" in sys.modules
    assert sys.meta_path == finders


def test_settings_choose_plans(cudnn: Any) -> None:
    notes = cudnn_fake.numerical_note
    run("cuda", ddp.float32, True)
    assert cudnn.graphs[-1].unwanted == {notes.DOWN_CONVERT_INPUTS}
    ddp.backends.cudnn.allow_tf32 = False
    run("cuda", ddp.float32, True)
    assert cudnn.graphs[-1].unwanted == {notes.DOWN_CONVERT_INPUTS, notes.TENSOR_CORE}
    ddp.backends.cudnn.deterministic = True
    run("cuda", ddp.float16, True)
    assert cudnn.graphs[-1].unwanted == {notes.DOWN_CONVERT_INPUTS, notes.NONDETERMINISTIC}
    ddp.backends.cudnn.enabled = False
    before = len(cudnn.ran)
    run("cuda", ddp.float16, True)
    assert len(cudnn.ran) == before
    assert not ddp.backends.cudnn.enabled


@pytest.mark.gpu
@pytest.mark.parametrize("dtype", [ddp.float16, ddp.bfloat16], ids=str)
def test_cudnn_takes_what_the_benchmarks_train(dtype: Any, caplog: pytest.LogCaptureFixture) -> None:
    """Else they are slow, and only the log says why."""
    Real()
    if not ddp.backends.cudnn.is_available():
        pytest.skip("cuDNN is not installed")
    cudnn_graph.log_once.cache_clear()
    with caplog.at_level("INFO", logger="ddp.backends.cudnn"):
        for p in (0.0, 0.1):
            projected("cuda", dtype, 12, 64, 128, is_causal=True, dropout_p=p)
        run("cuda", dtype, True)
    assert [record.message for record in caplog.records] == []
