"""Attention on a GPU and on the stand-in for one, by cuDNN and by the array formulas, against the CPU."""

from __future__ import annotations

from typing import Any

import pytest
from numpy.testing import assert_array_equal

import ddp
from tests.ddp.cases.table import draw
from tests.ddp.on_devices import assert_agree
from tests.gpu import cudnn_fake

TOLERANCES: dict[Any, float] = {ddp.float32: 3e-5, ddp.float16: 2e-2, ddp.bfloat16: 8e-2}
LARGE = [(3, 64, 200), (2, 128, 65)]  # for a GPU
attend = ddp.nn.functional.scaled_dot_product_attention


def close(got: list[Any], expected: list[Any], dtype: Any) -> None:
    assert_agree(got, expected, TOLERANCES[dtype], TOLERANCES[dtype] / 3)


def projected(device: str, dtype: Any, heads: int = 4, depth: int = 8, length: int = 6, **how: Any) -> list[Any]:
    """Attention of a projection's three parts, which lie inside one another, and the gradient of the projection."""
    x = ddp.from_numpy(draw(2, length, 3 * heads * depth, seed=3)).to(dtype).to(device).requires_grad_()
    q, k, v = (part.transpose(1, 2) for part in x.reshape(2, length, 3, heads, depth).unbind(2))
    y = attend(q, k, v, **how)
    joined = y.transpose(1, 2)
    if device == "cuda":
        assert joined.is_contiguous()  # and so (B, T, H*D) is a view of it
    y = joined.reshape(2, length, heads * depth)
    (y * y).sum().backward()
    assert x.grad is not None
    return [each.detach().cpu().float().numpy() for each in (y, x.grad)]


@pytest.mark.parametrize("dtype", [ddp.float32, ddp.float16, ddp.bfloat16], ids=str)
@pytest.mark.parametrize("how", [{}, {"is_causal": True}, {"scale": 0.3}], ids=["plain", "causal", "scale"])
def test_the_parts_of_a_projection(dtype: Any, how: dict[str, Any], path: Any) -> None:
    for size in [(), *LARGE] if path == "real" else [()]:
        close(*(projected(device, dtype, *size, **how) for device in ("cuda", "cpu")), dtype)
    if isinstance(path, cudnn_fake.Fake):
        assert path.ran == ([] if dtype is ddp.float32 else ["sdpa", "sdpa_backward"])


@pytest.mark.parametrize("dtype", [ddp.float16, ddp.bfloat16], ids=str)
def test_grouped_heads(dtype: Any, path: Any) -> None:
    def run(device: str) -> list[Any]:
        q, k, v = (
            ddp.from_numpy(draw(2, heads, 5, 8, seed=heads + i)).to(dtype).to(device).requires_grad_()
            for i, heads in enumerate((6, 2, 2))
        )
        y = attend(q, k, v, is_causal=True, enable_gqa=True)
        (y * y).sum().backward()
        return [each.detach().cpu().float().numpy() for each in (y, *(x.grad for x in (q, k, v) if x.grad is not None))]

    got, expected = run("cuda"), run("cpu")
    assert len(got) == 4
    close(got, expected, dtype)
    assert not isinstance(path, cudnn_fake.Fake) or path.ran == ["sdpa", "sdpa_backward"]


@pytest.mark.parametrize("dtype", [ddp.float32, ddp.bfloat16], ids=str)
def test_what_is_dropped_is_dropped_in_backward_as_well(dtype: Any, path: Any) -> None:
    # With v the unit matrix the result is P with its dropped elements, and dv is its transpose times g.
    n = 16
    q, k = (ddp.from_numpy(draw(1, 2, n, n, seed=s)).to(dtype).to("cuda") for s in (1, 2))
    v = ddp.eye(n).to(dtype).to("cuda").expand(1, 2, n, n).contiguous().requires_grad_()
    ddp.manual_seed(5)
    y = attend(q, k, v, dropout_p=0.5)
    g = ddp.from_numpy(draw(1, 2, n, n, seed=4)).to(dtype).to("cuda")
    y.backward(g)
    probs = y.detach().cpu().float().numpy()
    slopes = g.cpu().float().numpy()
    assert 0.35 < (probs == 0).mean() < 0.65
    assert v.grad is not None
    close([v.grad.cpu().float().numpy()], [probs.swapaxes(2, 3) @ slopes], dtype)
    ddp.manual_seed(5)
    assert_array_equal(attend(q, k, v, dropout_p=0.5).detach().cpu().float().numpy(), probs)
    again = attend(q, k, v, dropout_p=0.5).detach().cpu().float().numpy()
    assert (again != probs).any()


def test_where_backward_cannot_be_planned_forward_is_not_taken(cudnn: Any) -> None:
    cudnn.lacks = lambda operation: operation == "sdpa_backward"
    close(projected("cuda", ddp.bfloat16), projected("cpu", ddp.bfloat16), ddp.bfloat16)
    assert cudnn.ran == []
    with ddp.no_grad():
        attend(*[ddp.ones(2, 4, 6, 8, dtype=ddp.bfloat16, device="cuda")] * 3)
    assert cudnn.ran == ["sdpa"], "no backward will follow"


def test_no_host_waits_and_nothing_is_upcast(cudnn: Any, gpu: Any) -> None:
    x = ddp.from_numpy(draw(2, 6, 3 * 32, seed=3)).bfloat16().to("cuda").requires_grad_()
    ddp.manual_seed(0)
    ddp.rand(1, device="cuda")  # the generator's state goes up once
    gpu.reset()
    q, k, v = (part.transpose(1, 2) for part in x.reshape(2, 6, 3, 4, 8).unbind(2))
    attend(q, k, v, is_causal=True, dropout_p=0.1).sum().backward()
    assert not gpu.synchronizations
    assert gpu.copies_up == 0
