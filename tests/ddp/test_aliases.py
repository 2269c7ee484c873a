"""PyTorch's other paths to names, as ported scripts import them; einops on our tensors."""

from __future__ import annotations

import importlib
import pickle
import sys
from typing import Any

import numpy as np
import pytest
from numpy.testing import assert_allclose

import ddp
from ddp import _aliases

torch = pytest.importorskip("torch", reason="PyTorch is the oracle here")

einops = pytest.importorskip("einops")


# What scripts take from a module: by `from MODULE import NAME`, and as `MODULE.NAME` after importing no more than ddp.
TAKEN = [
    ("accelerator", "is_available"),
    ("autograd.function", "Function"),
    ("autograd.functional", "hessian"),
    ("backends.mps", "is_available"),
    ("cuda.amp", "GradScaler"),
    ("cuda.amp", "autocast"),
    ("distributed", "init_process_group"),
    ("distributions", "Categorical"),
    ("distributions.kl", "kl_divergence"),
    ("distributions.normal", "Normal"),
    ("distributions.transforms", "TanhTransform"),
    ("func", "grad"),
    ("nn", "SyncBatchNorm"),
    ("nn.attention", "sdpa_kernel"),
    ("nn.modules.batchnorm", "BatchNorm2d"),
    ("nn.parallel", "DataParallel"),
    ("nn.parallel", "DistributedDataParallel"),
    ("serialization", "safe_globals"),
    ("utils.checkpoint", "checkpoint"),
    ("utils.data", "TensorDataset"),
    ("utils.data.dataloader", "default_collate"),
    ("utils.data.distributed", "DistributedSampler"),
    ("utils.tensorboard", "SummaryWriter"),
]


@pytest.mark.parametrize(("path", "name"), TAKEN)
def test_a_name_is_where_pytorch_has_it(path: str, name: str) -> None:
    assert callable(getattr(importlib.import_module(f"torch.{path}"), name))
    result = getattr(importlib.import_module(f"ddp.{path}"), name)
    owner: Any = ddp
    for part in path.split("."):
        owner = getattr(owner, part)
    assert getattr(owner, name) is result
    assert callable(result)


def test_the_modules_of_the_table() -> None:
    for path, (home, renamed) in _aliases.MODULES.items():
        module = importlib.import_module(path)
        assert module.__doc__
        assert set(dir(module)) >= set(renamed)
        if home:
            assert set(module.__all__) == {*importlib.import_module(home).__all__, *renamed}
            for name in module.__all__:
                assert getattr(module, name) is not None


def test_what_is_not_there() -> None:
    with pytest.raises(ModuleNotFoundError, match=r"ddp\.utils\.cpp_extension"):
        importlib.import_module("ddp.utils.cpp_extension")
    with pytest.raises(AttributeError, match=r"module 'ddp\.utils\.data' has no attribute 'datapipes'"):
        ddp.utils.data.datapipes  # noqa: B018
    with pytest.raises(AttributeError, match=r"module 'ddp\.nn' has no attribute 'quantized'"):
        ddp.nn.quantized  # type: ignore[attr-defined]  # noqa: B018
    assert not hasattr(ddp.onnx, "export")


def test_importing_us_imports_nothing_of_it(run_job: Any) -> None:
    later = ("accelerator", "amp", "data", "distributed", "nn", "parallel", "utils")
    code = (
        f"import sys, ddp; print([name for name in sys.modules if name.startswith({tuple(f'ddp.{n}' for n in later)})])"
    )
    run_job([sys.executable, "-c", code], code=0, out="[]\n")


def rearranged(t: Any, x: Any) -> list[Any]:
    patches = einops.rearrange(x, "b c (h p) (w q) -> b (h w) (p q c)", p=2, q=2)
    packed, shapes = einops.pack([patches[:, 0], patches[:, 1:]], "b * d")
    return [
        patches,
        einops.rearrange([x, x], "n b c h w -> b n (c h w)"),
        einops.repeat(x, "b c h w -> b r c h w", r=2),
        *(einops.reduce(x, "b c h w -> b c", how) for how in ("sum", "mean", "max", "min", "prod")),
        einops.reduce(x > 0, "b c h w -> b c", "any"),
        einops.einsum(patches, patches, "b i d, b j d -> b i j"),
        *einops.unpack(packed, shapes, "b * d"),
        einops_layers(t)(x),
    ]


def einops_layers(t: Any) -> Any:
    """The modules of einops for this library, in a model that was pickled."""
    layers = importlib.import_module(f"einops.layers.{t.__name__}")
    net = t.nn.Sequential(layers.Rearrange("b c h w -> b h (w c)"), layers.Reduce("b (h p) d -> b d", "max", p=2))
    assert isinstance(net[0], t.nn.Module)
    return pickle.loads(pickle.dumps(net))


def test_einops_agrees_with_itself_on_pytorch() -> None:
    array = np.random.default_rng(0).standard_normal((2, 3, 4, 6))
    results = []
    for t in (ddp, torch):
        x = t.from_numpy(array.copy()).requires_grad_()
        values = rearranged(t, x)
        sum((value * value).sum() for value in values if value.requires_grad).backward()
        results.append([x.grad, *values])
    for ours, theirs in zip(*results, strict=True):
        assert_allclose(ours.detach().numpy(), theirs.detach().numpy(), 1e-12, 1e-12)
    assert einops.parse_shape(x, "b c _ _") == {"b": 2, "c": 3}


@pytest.mark.parametrize("order", ["einops, ddp", "ddp, importlib.util as u; u.find_spec('einops'); import einops"])
def test_einops_knows_our_tensors_whichever_is_imported_first(run_job: Any, order: str) -> None:
    code = f"import {order}; print(einops.rearrange(ddp.zeros(2, 3), 'a b -> b a').shape)"
    run_job([sys.executable, "-c", code], code=0, out="ddp.Size([3, 2])\n")
