"""The backend "ddp" of torch.distributed: PyTorch's own training on these collectives.

    import collectives.torch
    torch.distributed.init_process_group("ddp")

It works under ddp-launch, mpiexec, srun and torchrun. From PyTorch 2.14 on the import is not needed. Tensors of the CPU
move through shared memory and MPI; GPUs keep NCCL: `init_process_group("cpu:ddp,cuda:nccl")`.
"""

from __future__ import annotations

import warnings

import torch
import torch.distributed as dist

from collectives.engine.call import skip_frames
from collectives.errors import BackendError
from collectives.torch.process_group import create, keep_other_backends
from collectives.torch.store import add_rendezvous, set_variables

_OLDEST = "2.12"
_TOO_NEW = "2.15"  # not tested


def check_version(version: str) -> None:
    """Warns if PyTorch is newer than the versions that are tested. Raises: BackendError if it is too old."""
    installed = torch.torch_version.TorchVersion(version)
    if installed < _OLDEST:
        raise BackendError(f'the backend "ddp" needs PyTorch {_OLDEST} or later, this one is {version}')
    if installed >= _TOO_NEW:
        warnings.warn(
            f'the backend "ddp" is tested with PyTorch before {_TOO_NEW}, this one is {version}', stacklevel=2
        )


def register() -> None:
    """Does nothing: importing this module registers the backend. PyTorch calls this in scripts without the import."""


check_version(torch.__version__)
skip_frames("torch")
set_variables()
add_rendezvous()
if torch.torch_version.TorchVersion(torch.__version__) < "2.14":
    keep_other_backends()
dist.Backend.register_backend("ddp", create, extended_api=True, devices=["cpu"])
