"""What we call of nvidia-cudnn-frontend is there under those names, where it is installed; no GPU is needed for it."""

from __future__ import annotations

from typing import Any

import pytest

from tests.gpu import dnn_fake

cudnn = pytest.importorskip("cudnn", reason="nvidia-cudnn-frontend is not installed")

CALLS = {
    "conv_fprop": ("image", "weight", "padding", "stride", "dilation"),
    "conv_dgrad": ("loss", "filter", "padding", "stride", "dilation"),
    "conv_wgrad": ("image", "loss", "padding", "stride", "dilation"),
    "bias": ("input", "bias"),
    "sdpa": (
        *("q", "k", "v", "attn_scale", "generate_stats", "dropout"),
        *("diagonal_alignment", "diagonal_band_right_bound"),
    ),
    "sdpa_backward": (
        *("q", "k", "v", "o", "dO", "stats", "attn_scale", "use_deterministic_algorithm", "dropout"),
        *("diagonal_alignment", "diagonal_band_right_bound"),
    ),
}
STEPS = (
    *("validate", "build_operation_graph", "create_execution_plans", "check_support", "build_plans", "execute"),
    *("deselect_numeric_notes", "get_workspace_size", "get_execution_plan_count", "build_plan_at_index"),
    *("get_workspace_size_plan_at_index", "execute_plan_at_index"),
)


@pytest.mark.parametrize("name", CALLS)
def test_arguments(name: str) -> None:
    text = getattr(cudnn.pygraph, name).__doc__
    if f"{name}(self" not in text:
        pytest.skip("this version does not name its arguments")
    for argument in CALLS[name]:
        assert f"{argument}: " in text, argument


@pytest.mark.parametrize("step", STEPS)
def test_steps(step: str) -> None:
    assert callable(getattr(cudnn.pygraph, step))


@pytest.mark.parametrize(
    "kind", ["data_type", "heur_mode", "build_plan_policy", "numerical_note", "diagonal_alignment"]
)
def test_names_of_kinds(kind: str) -> None:
    mine: Any = getattr(dnn_fake, kind)
    for each in mine:
        assert hasattr(getattr(cudnn, kind), each.name), each
