"""`Parameter` and `Buffer`: tensors that a module registers when they are assigned to it."""

from __future__ import annotations

from typing import Any

from ddp._tensor.base import share_storage
from ddp._tensor.core import Tensor

__all__ = ["Buffer", "Parameter"]


class Parameter(Tensor):
    """A tensor that a module trains: assigned as an attribute, it is found by `parameters()`.

    data: the tensor whose memory the parameter shares. Attributes that a user adds, as `p.no_decay = True` does, stay
    when the module is moved or converted. Pickles and copy.copy keep them, but copy.deepcopy does not, as in PyTorch.

    Raises: DtypeError if `requires_grad` is True and `data` is not floating.
    """

    __slots__ = ()
    _attributes_are_copied = False

    def __new__(cls, data: Tensor, requires_grad: bool = True) -> Parameter:
        return share_storage(super().__new__(cls), data).requires_grad_(requires_grad)

    def __init__(self, *_: Any, **__: Any) -> None:
        pass  # `__new__` has set the memory; Tensor.__init__ would allocate new memory

    def __repr__(self) -> str:
        return f"Parameter containing:\n{super().__repr__()}"


class Buffer(Tensor):
    """A tensor that is state but not trained: assigned as an attribute, it is found by `buffers()`.

    data: the tensor whose memory the buffer shares. persistent: whether the state dict holds the buffer.
    """

    __slots__ = ("_persistent",)
    _persistent: bool

    def __new__(cls, data: Tensor, *, persistent: bool = True) -> Buffer:
        self = share_storage(super().__new__(cls), data)
        self._persistent = persistent
        return self

    def __init__(self, *_: Any, **__: Any) -> None:
        pass  # as in Parameter

    @property
    def persistent(self) -> bool:
        """Whether a module to which this buffer is assigned puts it into the state dict; True for a copy."""
        return getattr(self, "_persistent", True)  # a copy lacks the attribute; the module keeps a record of its own
