"""The process group: carries out PyTorch's calls by calls of a communicator.

A backend in Python is a `ProcessGroup`. Python code calls it directly, and C++ code (DDP, functional collectives) calls
it through pybind11. From PyTorch 2.14 on, a backend can also be a `Backend` for one type of device. It is then part of
a process group of PyTorch's own, which has other backends for GPUs. This costs some 16 us a call. And PyTorch's wrapper
of a `Backend` does not report the sender of a message received from any source, or whether a call is complete. So a
`Backend` is made only if other backends are asked for, too. Up to 2.13, the process group then holds a group of
PyTorch's own, which has the backends of other devices. Calls on tensors of these devices go to that group.
"""

from __future__ import annotations

import importlib
import sys
import threading
from collections.abc import Callable, Iterable, Sequence
from datetime import timedelta
from functools import partial
from types import SimpleNamespace
from typing import Any

import numpy as np
import torch
import torch.distributed as dist
from torch._C._distributed_c10d import Backend
from torch.autograd import Variable
from torch.distributed import ReduceOp

from collectives.communicator import Communicator
from collectives.engine.call import Work
from collectives.errors import (
    ArgumentError,
    BackendError,
    CollectivesError,
    CollectiveTimeout,
    CommunicatorClosed,
    name_ranks,
)
from collectives.start import init
from collectives.time_limit import Deadline
from collectives.torch import trace
from collectives.torch.store import join
from collectives.torch.tensors import (
    Tensors,
    as_data,
    as_numbers,
    flat_input,
    flat_output,
    joined,
    split_into,
)
from collectives.torch.work import ProfilerEvent, TorchWork, in_backward

# The hash of a ReduceOp is the number of the op, and so is the hash of a constant like ReduceOp.SUM.
_OPS = {hash(ReduceOp.SUM): "sum", hash(ReduceOp.AVG): "mean", hash(ReduceOp.PRODUCT): "prod"}
_OPS |= {hash(ReduceOp.MIN): "min", hash(ReduceOp.MAX): "max"}
_OPS_OF_BOOL = {"sum": "max", "prod": "min"}
_BITWISE = {hash(ReduceOp.BAND): np.bitwise_and, hash(ReduceOp.BOR): np.bitwise_or, hash(ReduceOp.BXOR): np.bitwise_xor}
_PREMUL_SUM = hash(ReduceOp.PREMUL_SUM)
# The options of a call that is made without options: PyTorch's defaults. A negative timeout means that none is set (in
# PyTorch -1 ms).
_DEFAULTS = SimpleNamespace(asyncOp=True, reduceOp=ReduceOp.SUM, rootRank=0, timeout=timedelta(seconds=-1))
_GRACE = 1.0  # s; time for calls to complete when a group is destroyed
_BARRIER_TAG = 2**31 - 1

_DONE = TorchWork((), ())


def create(options: Any, backend_options: Any = None) -> Any:
    """Makes the group that `init_process_group` and `new_group` ask for.

    Raises: BackendError if tensors of the CPU are given to another backend; what `join` and `create_group` raise.
    """
    # From PyTorch 2.14 on: the group that gets this backend. Its name is "custom", or that of its backend for a GPU.
    group = getattr(options, "process_group", None)
    # Up to 2.13 the group is a local variable of the caller. It has the backends of other devices. PyTorch will use
    # the group that this function returns instead.
    others = None if group is not None else sys._getframe(1).f_locals.get("pg")
    other_types = {device.type for device in others._device_types} if others is not None else set()
    if "cpu" in other_types:
        raise BackendError(
            'the backend "ddp" moves tensors of the CPU, and here another one does: use "cpu:ddp,cuda:nccl"'
        )
    seconds = options.timeout.total_seconds()
    members = list(options.global_ranks_in_group)
    if members:
        comm = init().create_group(members, timeout=seconds)
    else:
        comm = join(options.store, options.group_rank, options.group_size, seconds)
        trace.start(init())
    if group is not None and group.name() != "custom":
        return CollectivesBackend(comm)
    if other_types:
        return GroupBesideOthers(comm, others)
    return CollectivesGroup(comm)


def keep_other_backends() -> None:
    """Lets PyTorch up to 2.13 make and use other backends in addition to this one.

    PyTorch makes no more backends after one that is a process group, so "ddp" has to be the last. With NCCL, a batch of
    sends and receives could deadlock unless it is one call. PyTorch makes one call of them only in groups of its own.
    So each send and receive gets the group for its tensor's device.
    """
    config: Any = importlib.import_module("torch.distributed.distributed_c10d").BackendConfig
    operation: Any = dist.P2POp
    init = operation.__init__

    def this_last(self: Any) -> dict[str, Any]:
        return dict(sorted(self.device_backend_map.items(), key=lambda pair: pair[1] == "ddp"))

    def init_by_device(self: Any, *args: Any, **more: Any) -> None:
        init(self, *args, **more)
        if isinstance(self.group, GroupBesideOthers):
            self.group = self.group.group_of(self.tensor)

    config.get_device_backend_map = this_last
    operation.__init__ = init_by_device


class GroupCalls:
    """The calls of a group of ranks, with the names and arguments that PyTorch uses."""

    supports_coalescing = False
    supports_splitting = True
    # The number of stack frames from a method up to its caller.
    _caller = 1

    def __init__(self, comm: Communicator) -> None:
        super().__init__(comm.rank, comm.size)  # type: ignore[call-arg]  # of PyTorch's class
        self._comm = comm
        # The works that were started since `_start_coalescing`; None before it, and after `_end_coalescing`.
        self._coalesced: list[TorchWork] | None = None

    def getBackendName(self) -> str:
        return "ddp"

    name = getBackendName

    def set_timeout(self, timeout: timedelta) -> None:
        self._comm.timeout = timeout.total_seconds()

    _set_default_timeout = set_timeout

    def shutdown(self) -> None:
        self._close(_GRACE)

    def abort(self) -> None:
        self._close(0.0)

    def _close(self, grace: float) -> None:
        """Closes the group. Calls that are not complete after `grace` seconds raise CommunicatorClosed."""
        self._comm.close()
        queue = self._comm.queue
        if not queue.drain(Deadline(grace)):
            error = CommunicatorClosed(f"rank {self._comm.rank}: the process group was destroyed while this call ran")
            queue.abort(error)

    def _set_sequence_number_for_group(self) -> None:
        """Does nothing: the queue counts the calls."""

    def _get_sequence_number_for_group(self) -> int:
        return self._comm.queue.started

    # How calls run

    def _run(
        self,
        call: partial[Any],
        opts: Any,
        inputs: Tensors,
        result: Sequence[Any],
        after: Callable[..., object] | None = None,
    ) -> TorchWork:
        """Runs a collective. call: the collective with all arguments except async_op; after: called with its result"""
        recorder = trace.recorder
        if recorder is not None and torch._C._current_graph_task_id() < 0:  # not in a backward
            recorder = None
        profiled = torch.autograd._profiler_enabled()
        if not opts.asyncOp and self._coalesced is None and recorder is None and not profiled:
            value = call()
            if after is not None:
                after(value)
            return _DONE
        work = _start(call.func.__name__, inputs, lambda: [call(async_op=True)], result, after)
        if recorder is not None:
            recorder.add(work.calls[0], sum(getattr(x, "nbytes", 0) for x in call.args))
        if self._coalesced is not None:
            self._coalesced.append(work)
        elif not opts.asyncOp:
            work.wait()
        return work

    def _start_coalescing(self, device: Any = None) -> None:
        self._coalesced = []

    def _end_coalescing(self, device: Any = None) -> TorchWork:
        works = self._coalesced or []
        self._coalesced = None
        return TorchWork(_calls_of(works), [], partial(_wait_for, works))

    def _run_together(self, name: str, inputs: Tensors, works: Iterable[TorchWork], result: Sequence[Any]) -> TorchWork:
        """Runs several calls that PyTorch sees as one call. works: an iterator that starts a call for each item"""
        started: list[TorchWork] = []

        def start() -> list[Work[Any]]:
            _thread.in_event = True
            try:
                started.extend(works)
            finally:
                _thread.in_event = False
            return _calls_of(started)

        return _start(name, inputs, start, result, partial(_wait_for, started))

    # Reductions

    def _reduce(
        self,
        call: Callable[..., Any],
        x: Any,
        opts: Any,
        out: Any,
        inputs: Tensors,
        result: Sequence[Any],
        part: Any = ...,
        **more: Any,
    ) -> TorchWork:
        """Runs a reduction.

        call: the communicator's method; out: an array or None; part: an index; `out` gets that part of the total
        """
        number = hash(opts.reduceOp)
        name = _OPS.get(number, "sum")
        if x.dtype.kind == "b":
            name = _OPS_OF_BOOL.get(name, name)
        if number in _BITWISE:
            combine = _BITWISE[number]
            if x.dtype.kind not in "biu":
                raise ArgumentError(f"{combine.__name__} takes integers or bools, not {x.dtype}")

            def after(rows: Any) -> None:
                if out is not None:
                    out[...] = combine.reduce(rows, axis=0)[part]

            rows = partial(self._comm.all_gather, x[np.newaxis], lengths="equal")
            return self._run(rows, opts, inputs, result, after)
        if number == _PREMUL_SUM:
            _, factor = opts.reduceOp.__getstate__()
            x = x * x.dtype.type(factor)
        elif number not in _OPS:
            raise ArgumentError(f"no such reduction: {opts.reduceOp}")
        return self._run(partial(call, x, name, out=out, **more), opts, inputs, result)

    def allreduce(self, tensors: Tensors, opts: Any = _DEFAULTS) -> TorchWork:
        tensor = _one(tensors)
        if tensor.layout is not torch.strided:
            return self._allreduce_sparse(tensor, tensors, opts)
        x = as_numbers(tensor)
        if self._comm.transport.in_flight == 1 and in_backward(sys._getframe(self._caller)):
            # This thread waits for the calls when backward ends, before DistributedDataParallel waits for their
            # futures. Over a network it does not, because DistributedDataParallel there waits for one bucket after the
            # other, and copies each bucket while others are under way.
            Variable._execution_engine.queue_callback(self._comm.queue.expect_wait())
        return self._reduce(self._comm.all_reduce, x, opts, x, tensors, tensors)

    def _allreduce_sparse(self, tensor: torch.Tensor, tensors: Tensors, opts: Any) -> TorchWork:
        if opts.reduceOp != ReduceOp.SUM:
            raise ArgumentError("sparse tensors can be summed, and not reduced otherwise")
        tensor = tensor.coalesce()
        parts = (as_numbers(tensor.indices()).T, as_numbers(tensor.values()))

        def after(indices: Any, values: Any) -> None:
            places = torch.from_numpy(indices).T
            tensors[0].copy_(torch.sparse_coo_tensor(places, torch.from_numpy(values), tensor.shape).coalesce())

        gather = partial(self._comm.all_gather, async_op=True)
        work = _start("all_reduce", [tensor], lambda: [gather(part) for part in parts], tensors, after)
        if not opts.asyncOp:
            work.wait()
        return work

    def allreduce_coalesced(self, tensors: Tensors, opts: Any = _DEFAULTS) -> TorchWork:
        works = (self.allreduce([tensor], opts) for tensor in tensors)
        return self._run_together("all_reduce", tensors, works, tensors)

    def reduce(self, tensors: Tensors, opts: Any) -> TorchWork:
        x = as_numbers(_one(tensors))
        out = x if self._comm.rank == opts.rootRank else None
        return self._reduce(partial(self._comm.reduce, root=opts.rootRank), x, opts, out, tensors, tensors)

    def reduce_scatter(self, outputs: Tensors, inputs: Sequence[Tensors], opts: Any = _DEFAULTS) -> TorchWork:
        parts = _one(inputs)
        self._check_parts(parts, "inputs")
        lengths = [part.numel() for part in parts]
        return self._reduce_scatter(_one(outputs), joined(parts), lengths, parts, opts)

    def reduce_scatter_single(self, output: torch.Tensor, x: torch.Tensor, opts: Any = _DEFAULTS) -> TorchWork:
        return self._reduce_scatter(output, flat_input(x), [output.numel()] * self._comm.size, [x], opts)

    _reduce_scatter_base = reduce_scatter_single

    def _reduce_scatter(
        self, output: torch.Tensor, x: Any, lengths: Sequence[int], inputs: Tensors, opts: Any
    ) -> TorchWork:
        first = sum(lengths[: self._comm.rank])
        part = slice(first, first + lengths[self._comm.rank])
        out = flat_output(output)
        return self._reduce(self._comm.reduce_scatter, x, opts, out, inputs, [output], part, lengths=lengths)

    def reduce_scatter_single_coalesced(self, outputs: Tensors, inputs: Tensors, opts: Any = _DEFAULTS) -> TorchWork:
        pairs = zip(outputs, inputs, strict=True)
        works = (self.reduce_scatter_single(output, x, opts) for output, x in pairs)
        return self._run_together("reduce_scatter", inputs, works, outputs)

    reduce_scatter_tensor_coalesced = reduce_scatter_single_coalesced

    # Movements

    def broadcast(self, tensors: Tensors, opts: Any = _DEFAULTS) -> TorchWork:
        x = as_data(_one(tensors))
        return self._run(partial(self._comm.broadcast, x, opts.rootRank), opts, tensors, tensors)

    def allgather(self, outputs: Sequence[Tensors], inputs: Tensors, opts: Any = _DEFAULTS) -> TorchWork:
        parts = _one(outputs)
        self._check_parts(parts, "outputs")
        x = flat_input(_one(inputs))
        lengths = [as_data(part).size for part in parts]
        call = partial(self._comm.all_gather, x, lengths=lengths)
        return self._run(call, opts, inputs, outputs, partial(split_into, parts))

    def all_gather_single(self, output: torch.Tensor, x: torch.Tensor, opts: Any = _DEFAULTS) -> TorchWork:
        out = flat_output(output)
        part = flat_input(x)
        # FSDP2 gathers a part of `out`. Copying this part takes less time than gathering into another array.
        if np.may_share_memory(part, out):
            part = part.copy()
        call = partial(self._comm.all_gather, part, lengths="equal", out=out)
        return self._run(call, opts, [x], [output])

    _allgather_base = all_gather_single

    def all_gather_single_coalesced(self, outputs: Tensors, inputs: Tensors, opts: Any = _DEFAULTS) -> TorchWork:
        pairs = zip(outputs, inputs, strict=True)
        works = (self.all_gather_single(output, x, opts) for output, x in pairs)
        return self._run_together("all_gather", inputs, works, outputs)

    allgather_into_tensor_coalesced = all_gather_single_coalesced

    def allgather_coalesced(self, outputs: Sequence[Tensors], inputs: Tensors, opts: Any = _DEFAULTS) -> TorchWork:
        """Gathers each of several tensors. outputs: for each rank, a list of as many tensors as `inputs` has"""
        by_input = [[row[index] for row in outputs] for index in range(len(inputs))]
        pairs = zip(by_input, inputs, strict=True)
        works = (self.allgather([parts], [x], opts) for parts, x in pairs)
        return self._run_together("all_gather", inputs, works, outputs)

    def gather(self, outputs: Sequence[Tensors], inputs: Tensors, opts: Any) -> TorchWork:
        call = partial(self._comm.gather, flat_input(_one(inputs)), opts.rootRank, lengths="equal")
        if self._comm.rank != opts.rootRank:
            return self._run(call, opts, inputs, [])
        parts = _one(outputs)
        self._check_parts(parts, "outputs")
        return self._run(call, opts, inputs, outputs, partial(split_into, parts))

    def scatter(self, outputs: Tensors, inputs: Sequence[Tensors], opts: Any) -> TorchWork:
        out = flat_output(_one(outputs))
        if self._comm.rank != opts.rootRank:
            return self._run(partial(self._comm.scatter, None, opts.rootRank, out=out), opts, [], outputs)
        parts = _one(inputs)
        self._check_parts(parts, "inputs")
        lengths = [as_data(part).size for part in parts]
        call = partial(self._comm.scatter, joined(parts), opts.rootRank, lengths=lengths, out=out)
        return self._run(call, opts, parts, outputs)

    def alltoall(self, outputs: Tensors, inputs: Tensors, opts: Any = _DEFAULTS) -> TorchWork:
        self._check_parts(outputs, "outputs")
        self._check_parts(inputs, "inputs")
        sends = [as_data(x).size for x in inputs]
        expected = [as_data(x).size for x in outputs]
        call = partial(self._comm.all_to_all, joined(inputs), lengths=sends, out_lengths=expected)
        return self._run(call, opts, inputs, outputs, partial(split_into, outputs))

    def all_to_all_single(
        self,
        output: torch.Tensor,
        x: torch.Tensor,
        output_splits: Sequence[int],
        input_splits: Sequence[int],
        opts: Any = _DEFAULTS,
    ) -> TorchWork:
        size = self._comm.size
        sends = list(input_splits) or [x.shape[0] // size] * size
        expected = list(output_splits) or [output.shape[0] // size] * size
        flat = as_data(x)
        out = flat_output(output).reshape(output.shape)
        call = partial(self._comm.all_to_all, flat, lengths=sends, out_lengths=expected, out=out)
        return self._run(call, opts, [x], [output])

    alltoall_base = all_to_all_single

    def _check_parts(self, parts: Tensors, what: str) -> None:
        if len(parts) != self._comm.size:
            raise ArgumentError(f"{what} should be {self._comm.size} tensors, one a rank, are {len(parts)}")

    # Point to point

    def send(self, tensors: Tensors, dst: int, tag: int) -> TorchWork:
        x = flat_input(_one(tensors))
        send = partial(self._comm.send, x, dst, tag=tag, async_op=True)
        return _start("send", tensors, lambda: [send()], tensors, in_order=False)

    def recv(self, tensors: Tensors, src: int, tag: int) -> TorchWork:
        return self._recv("recv", tensors, src, tag)

    def recv_anysource(self, tensors: Tensors, tag: int) -> TorchWork:
        return self._recv("recvAnySource", tensors, None, tag)

    def _recv(self, name: str, tensors: Tensors, src: int | None, tag: int) -> TorchWork:
        """Receives a tensor. name: of the event in PyTorch's profiler"""
        out = flat_output(_one(tensors))
        recv = partial(self._comm.recv, src, tag=tag, out=out, async_op=True)
        return _start(name, tensors, lambda: [recv()], tensors, in_order=False)

    # Barriers

    def barrier(self, opts: Any = _DEFAULTS) -> TorchWork:
        """A barrier. If `opts.timeout` is set, it limits the wait for this barrier instead of the group's timeout.

        After a shorter timeout than the group's, the group is still usable.
        """
        if opts.timeout < timedelta(0):
            return self._run(partial(self._comm.barrier), opts, [], [])
        seconds = max(opts.timeout.total_seconds(), self._comm.timeout)
        work = _start("barrier", [], lambda: [self._comm.barrier(async_op=True, timeout=seconds)], [])
        work.default_timeout = opts.timeout
        if not opts.asyncOp:
            work.wait()
        return work

    @torch.profiler.record_function("ddp:monitored_barrier")  # type: ignore[untyped-decorator, unused-ignore]
    def monitored_barrier(self, timeout: Any = None, wait_all_ranks: bool = False) -> None:
        """A barrier whose error on rank 0 names missing ranks. Rank 0 waits for each other rank, and then lets all go.

        wait_all_ranks: the error names all missing ranks, not only the first of them
        Raises: CollectiveTimeout on every rank if one has not come in time, or has left.
        """
        timeout = getattr(timeout, "timeout", timeout)  # PyTorch passes options to a `Backend`
        comm = self._comm
        seconds = comm.timeout if timeout is None else timeout.total_seconds()
        deadline = Deadline(seconds)
        token = np.zeros(1, np.uint8)
        if comm.rank:
            comm.send(token, 0, tag=_BARRIER_TAG)
            try:
                comm.recv(0, tag=_BARRIER_TAG, async_op=True).wait(seconds)
            except CollectivesError as error:
                raise CollectiveTimeout(
                    f"rank {comm.rank} came to monitored_barrier, and rank 0 did not let it go: {error}"
                ) from error
            return
        missing: list[int] = []
        for rank in range(1, comm.size):
            try:
                comm.recv(rank, tag=_BARRIER_TAG, async_op=True).wait(max(1e-3, deadline.remaining()))
            except CollectivesError:
                missing.append(rank)
                if not wait_all_ranks:
                    break
        if missing:
            raise CollectiveTimeout(f"rank 0: {name_ranks(missing)} did not come to monitored_barrier in {seconds:g} s")
        for rank in range(1, comm.size):
            comm.send(token, rank, tag=_BARRIER_TAG)


class CollectivesGroup(GroupCalls, dist.ProcessGroup):  # type: ignore[misc]  # Any to mypy
    """A process group that stores its name and description.

    PyTorch's own groups store the name in their backends, and this group has none.
    """

    _name = _description = "undefined"

    def split_group(
        self,
        ranks: Sequence[int],
        timeout: timedelta | None = None,
        opts: Any = _DEFAULTS,
        group_name: str | None = None,
        group_desc: str | None = None,
        device_types: Any = None,
    ) -> CollectivesGroup | None:
        """Makes a group of these ranks. Only they take part; other ranks get None.

        ranks: ranks of this group, in their order in the new group; timeout: None: the timeout of this group
        Raises: ArgumentError if a rank comes twice or does not exist.
        """
        if self._comm.rank not in ranks:
            return None
        seconds = None if timeout is None else timeout.total_seconds()
        group = CollectivesGroup(self._comm.create_group(ranks, timeout=seconds))
        group._name = group_name or f"{self._name}:split:{list(ranks)}"
        group.setGroupDesc(group_desc or self._description)
        return group

    def setGroupName(self, name: str) -> None:
        self._name = name

    def getGroupName(self) -> str:
        return self._name

    def setGroupDesc(self, description: str) -> None:
        self._description = description
        if description != "undefined":  # PyTorch's default
            self._comm.transport.purpose = description  # reports show it

    def getGroupDesc(self) -> str:
        return self._description

    @property
    def _device_types(self) -> list[torch.device]:
        return [torch.device("cpu")]

    def _get_backend(self, device: torch.device) -> Any:
        return self if device.type == "cpu" else super()._get_backend(device)


class GroupBesideOthers(CollectivesGroup):
    """A process group, for PyTorch up to 2.13, that leaves tensors of other devices to other backends, such as NCCL's.

    others: a group of PyTorch's own with the same ranks, which has the further backends
    """

    _caller = 2

    def __init__(self, comm: Communicator, others: Any) -> None:
        super().__init__(comm)
        self._others = others
        self._other_types = {device.type for device in others._device_types}
        self.bound_device_id = others.bound_device_id
        # Without a default backend, PyTorch would follow a null pointer when it splits `others`.
        if others.name() == "undefined":
            name = others._get_backend(others._device_types[0]).name()
            others._set_default_backend(dist.Backend.backend_type_map.get(name, dist.ProcessGroup.BackendType.CUSTOM))

    def group_of(self, *args: Any) -> Any:
        """The group that runs a call with these arguments: this one, or `others` for tensors on one of its devices."""
        return self._others if _device_type(args) in self._other_types else self

    def set_timeout(self, timeout: timedelta) -> None:
        self._others.set_timeout(timeout)
        super().set_timeout(timeout)

    def _close(self, grace: float) -> None:
        try:
            if grace:
                self._others.shutdown()
            else:
                self._others.abort()
        finally:
            super()._close(grace)

    def split_group(
        self,
        ranks: Sequence[int],
        timeout: timedelta | None = None,
        opts: Any = None,
        group_name: str | None = None,
        group_desc: str | None = None,
        device_types: Any = None,
    ) -> Any:
        """Makes a group as in `CollectivesGroup`. But all ranks of this group call it, and it sorts `ranks`.

        PyTorch's own groups do both, too.
        device_types: the devices that the new group is for; None: all
        """
        of_others = device_types and [device for device in device_types if device.type in self._other_types]
        others = None
        if of_others != []:
            for device in self._others._device_types:
                parent = self._others._get_backend(device).options
                if parent is not None and not parent.global_ranks_in_group:
                    # In a default group this list is empty. If the group is not the process's first default group,
                    # PyTorch reads past the end of the list.
                    parent.global_ranks_in_group = list(range(self._comm.size))
            more = {} if of_others is None else {"device_types": of_others}  # PyTorch 2.12 has no such parameter
            others = self._others.split_group(ranks, timeout, opts, group_name, group_desc, **more)
        if device_types and of_others == device_types:
            return others
        group = super().split_group(sorted(ranks), timeout, opts, group_name, group_desc)
        if group is None or others is None:
            return group
        combined = GroupBesideOthers(group._comm, others)
        combined.setGroupName(group._name)
        combined.setGroupDesc(group._description)
        return combined

    def setGroupName(self, name: str) -> None:
        self._others._set_group_name(name)
        super().setGroupName(name)

    def setGroupDesc(self, description: str) -> None:
        self._others._set_group_desc(description)
        super().setGroupDesc(description)

    @property
    def _device_types(self) -> list[torch.device]:
        return [*super()._device_types, *self._others._device_types]


def _by_device(name: str, call: Callable[..., Any]) -> Callable[..., Any]:
    """Makes a method of `GroupBesideOthers`.

    The method calls `call` if this group handles the device of the arguments, else the method `name` of `others`.
    """

    def call_by_device(self: GroupBesideOthers, *args: Any, **more: Any) -> Any:
        group = self.group_of(*args, *more.values())
        return call(self, *args, **more) if group is self else getattr(group, name)(*args, **more)

    return call_by_device


def _device_type(args: Iterable[Any]) -> str:
    """The device type of the first argument that is or has a device, also inside lists; "" if there is none."""
    for arg in args:
        if isinstance(arg, list | tuple):
            device_type = _device_type(arg)
        else:
            device_type = getattr(getattr(arg, "device", arg), "type", "")
        if device_type:
            return device_type
    return ""


for _name, _call in (*vars(GroupCalls).items(), ("_get_backend", CollectivesGroup._get_backend)):
    if callable(_call) and _name not in vars(GroupBesideOthers) and hasattr(dist.ProcessGroup, _name):
        setattr(GroupBesideOthers, _name, _by_device(_name, _call))


class CollectivesBackend(GroupCalls, Backend):  # type: ignore[misc, unused-ignore]  # Any to mypy
    """The backend for tensors of the CPU in a process group of PyTorch."""

    @property
    def options(self) -> Any:
        return Backend.Options("ddp", timedelta(seconds=self._comm.timeout))

    def split(self, store: Any, ranks: Sequence[int], options: Any) -> CollectivesBackend:
        """The backend of these ranks for tensors of the CPU.

        Raises: ArgumentError if this rank is not among them: PyTorch would follow a null pointer if this returned None.
        """
        timeout = getattr(options, "_timeout")  # noqa: B009  # a name of PyTorch's, not of ours
        return CollectivesBackend(self._comm.create_group(ranks, timeout=timeout.total_seconds()))


def _one(tensors: Sequence[Any]) -> Any:
    if len(tensors) != 1:
        raise ArgumentError(f"each rank has one device, and one tensor here: got {len(tensors)}")
    return tensors[0]


class _Thread(threading.local):
    in_event = False  # True while `_run_together` starts calls: together they are one event of PyTorch's profiler


_thread = _Thread()


def _start(
    name: str,
    inputs: Tensors,
    start: Callable[[], list[Work[Any]]],
    result: Sequence[Any],
    after: Callable[..., object] | None = None,
    in_order: bool = True,
) -> TorchWork:
    """Starts calls. If PyTorch's profiler runs, it shows them as one event, or as part of the event that is open."""
    event = None
    if torch.autograd._profiler_enabled() and not _thread.in_event:
        event = ProfilerEvent(f"ddp:{name}", inputs)
    try:
        calls = start()
    except BaseException:
        if event is not None:
            event.end()
        raise
    return TorchWork(calls, result, after, in_order, event)


def _calls_of(works: Iterable[TorchWork]) -> list[Work[Any]]:
    return [call for work in works for call in work.calls]


def _wait_for(works: Iterable[TorchWork], *_: Any) -> None:
    for work in works:
        work.wait()
