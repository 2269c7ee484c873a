"""The exception tree, as its docstring draws it."""

from __future__ import annotations

import pytest

from ddp import errors


@pytest.mark.parametrize(
    ("name", "bases"),
    [
        ("DdpError", (RuntimeError,)),
        ("ArgumentError", (errors.DdpError, ValueError)),
        ("ShapeError", (errors.ArgumentError,)),
        ("DtypeError", (errors.DdpError, TypeError)),
        ("RangeError", (errors.DdpError, IndexError)),
        ("DeviceError", (errors.DdpError,)),
        ("CudaError", (errors.DdpError,)),
        ("CaptureError", (errors.DdpError,)),
        ("GraphError", (errors.DdpError,)),
        ("GraphFreedError", (errors.GraphError,)),
        ("VersionError", (errors.GraphError,)),
        ("InplaceError", (errors.GraphError,)),
        ("GradcheckError", (errors.DdpError, AssertionError)),
        ("CheckpointError", (errors.DdpError,)),
        ("SerializationError", (errors.DdpError, ValueError)),
        ("StateDictError", (errors.DdpError, ValueError)),
    ],
)
def test_tree(name: str, bases: tuple[type, ...]) -> None:
    kind = getattr(errors, name)
    assert kind.__bases__ == bases
    assert name in errors.__doc__
    assert kind.__doc__
