"""What `import ddp` offers, and what it costs."""

from __future__ import annotations

import types
from pathlib import Path
from typing import TYPE_CHECKING

import pytest

import ddp
from ddp.autograd import jacobians
from ddp.nn import parameter

if TYPE_CHECKING:  # a checker sees the types of the names, not Any
    from typing_extensions import assert_type

    assert_type(ddp.ones(1), ddp.Tensor)
    assert_type(ddp.cat([ddp.ones(1)]), ddp.Tensor)
    assert_type(ddp.nn.functional.relu(ddp.ones(1)), ddp.Tensor)
    assert_type(ddp.nn.ReLU(), ddp.nn.ReLU)

PUBLIC = (
    ddp,
    ddp.accelerator,
    ddp.amp,
    ddp.autograd,
    jacobians,
    ddp.backends,
    ddp.backends.cuda,
    ddp.backends.cudnn,
    ddp.backends.mps,
    ddp.checkpoint,
    ddp.cuda,
    ddp.cuda.amp,
    ddp.cuda.memory,
    ddp.data,
    ddp.distributed,
    ddp.distributions,
    ddp.distributions.constraints,
    ddp.distributions.transforms,
    ddp.fft,
    ddp.func,
    ddp.hub,
    ddp.jit,
    ddp.linalg,
    ddp.metrics,
    ddp.multiprocessing,
    ddp.nn,
    ddp.nn.functional,
    ddp.nn.init,
    parameter,
    ddp.nn.utils,
    ddp.nn.utils.parametrizations,
    ddp.nn.utils.parametrize,
    ddp.nn.utils.rnn,
    ddp.optim,
    ddp.optim.lr_scheduler,
    ddp.optim.swa_utils,
    ddp.parallel,
    ddp.parallel.comm_hooks,
    ddp.return_types,
    ddp.serialization,
    ddp.special,
    ddp.testing,
    ddp.tracing,
)


def test_public_names_are_pinned() -> None:
    """A new name has its line in public_names.txt, which is sorted."""
    pinned = (Path(__file__).parent / "public_names.txt").read_text().split()
    offered = [f"{module.__name__}.{name}" for module in PUBLIC for name in module.__all__]
    assert {"new": set(offered) - set(pinned), "gone": set(pinned) - set(offered)} == {"new": set(), "gone": set()}
    assert pinned == sorted(offered)


@pytest.mark.parametrize("module", PUBLIC, ids=lambda module: module.__name__)
def test_every_public_name_has_a_docstring(module: types.ModuleType) -> None:
    for name in module.__all__:
        value = getattr(module, name)
        if callable(value) or isinstance(value, types.ModuleType):
            assert value.__doc__, name
