"""DataParallel: one model on every rank, its gradients averaged while backward is still running.

Here is what a user calls. The work is done by the `Reducer` (backward), the `BufferSync` (forward) and, where ranks
make different numbers of steps, the `JoinContext`.
"""

from __future__ import annotations

import contextlib
import copy
from collections.abc import Iterable, Iterator, Mapping
from time import monotonic_ns
from typing import Any

import collectives
from ddp._device import capturing
from ddp._engine import modes
from ddp._tensor.core import Tensor
from ddp.errors import DdpError, DtypeError, ParallelError
from ddp.nn import Module
from ddp.parallel import arguments, join
from ddp.parallel.bucket_plan import Plan
from ddp.parallel.buffers import BufferSync
from ddp.parallel.checks import ParameterCheck, broadcast_values, check_same, describe
from ddp.parallel.comm_hooks.grad_bucket import Hook
from ddp.parallel.comm_hooks.hook_exchange import HookExchange, hook_settings
from ddp.parallel.control import PendingRequests
from ddp.parallel.error_context import error_context
from ddp.parallel.gradient_state import backward_weight
from ddp.parallel.micro_batches import MicroBatches, machine
from ddp.parallel.planner import Planner
from ddp.parallel.reducer import Reducer
from ddp.parallel.stats import Stats


class DataParallel(Module):
    """Wraps a module so that every backward leaves the mean gradient over all ranks in `param.grad`.

    module: the same on every rank: rank 0's parameters and buffers are broadcast to all
    comm: the ranks; None: `collectives.init()`. Reductions go over a duplicate of it.
    bucket_cap_mb: MiB of gradients that are reduced together; "auto": chosen from when gradients come and what the
    wire costs. first_bucket_mb: MiB of the first bucket, small so that communication starts early
    broadcast_buffers: before the first forward after a synchronized backward, buffers become rank 0's; False: each rank
    keeps its own
    comm_hook: how a bucket is reduced, see `ddp.parallel.comm_hooks`
    plan: buckets to keep, `model.plan` of an earlier run, or its state(). On 3 ranks or more it decides the last bits
    check_every: after so many steps ranks compare their parameters, 0: never; check_finite: infinity and NaN in a
    gradient are an error that names the rank; it costs a pass over the gradients and a small call
    micro_batches: how many micro-batches a step has, on all ranks together, so that the number of ranks changes no bit;
    None: one a rank. See below
    ignored: PyTorch's device_ids, find_unused_parameters and static_graph, which change nothing

    Call it like the module. `loss.backward()` averages over ranks; `model.backward(loss_sum, weight=n)` divides the sum
    of all ranks' gradients by the sum of their weights, which is exact for batches of different sizes. After
    `loss.backward(create_graph=True)` these means have a graph, on the CPU and without a communication hook. Parameters
    that a backward does not reach need no flag: their grad is None where no rank used them. Parameters may be frozen
    and unfrozen at any time. Paths in `state_dict()` and `named_parameters()` begin with "module.", as in PyTorch;
    state dicts load with or without it, here and in the bare module. `copy.deepcopy(model)` copies the module, without
    its wrapper. `close()` gives the module back. Wrapping a module again, or its wrapper, as when a notebook's cell
    runs twice, replaces the first wrapper: gradients are cleared, and using the first raises.

    With `micro_batches=V` each forward and backward is of one micro-batch of a `DistributedSampler(dataset,
    micro_batches=V)`, and this rank's last one in a step leaves the mean over all V; before it `accumulating` is True:

        for x, t in loader:
            F.cross_entropy(model(x), t).backward()
            if not model.accumulating:
                optimizer.step()
                optimizer.zero_grad()

    On any number of ranks from 1 to V, with as many BLAS threads and the same kind of CPU, the weights are the same to
    the last bit. This thread's random numbers are seeded anew for each micro-batch, from rank 0's seed. The order of
    sums is in `ddp.parallel.micro_batches`. A communication hook, SyncBatchNorm, parameters of 16 bits, `join` and a
    CUDA graph raise ParallelError, and so does a forward that changes a buffer other than BatchNorm's.

    Raises: ArgumentError for buckets of no size, and for fewer micro-batches than ranks; ParallelError if the ranks'
    modules differ, there is no parameter that requires grad, or a parameter belongs to a wrapper of another module.
    Source: Li et al. 2020, arXiv:2006.15704.
    """

    module: Module
    reducer: Reducer
    comm_hook: Hook | None
    _hooked: HookExchange | None

    def __init__(
        self,
        module: Module,
        comm: collectives.Communicator | None = None,
        *,
        bucket_cap_mb: float | str = "auto",
        first_bucket_mb: float = 1.0,
        broadcast_buffers: bool = True,
        comm_hook: Hook | None = None,
        plan: Plan | Mapping[str, Any] | None = None,
        check_every: int = 100,
        check_finite: bool = False,
        micro_batches: int | None = None,
        **ignored: Any,
    ) -> None:
        super().__init__()
        arguments.check_kinds(module, comm)
        cap, first = arguments.caps(bucket_cap_mb, first_bucket_mb)
        buffers = arguments.switch("broadcast_buffers", broadcast_buffers)
        every = arguments.whole("check_every", check_every)
        finite = arguments.switch("check_finite", check_finite)
        pinned = plan if plan is None or isinstance(plan, Plan) else Plan.from_state(plan)
        settings = hook_settings(comm_hook)
        if micro_batches is not None:
            micro_batches = arguments.whole("micro_batches", micro_batches)
            settings |= {"micro_batches": micro_batches, **machine()}
            if comm_hook is not None:
                raise ParallelError(
                    "micro_batches: what a communication hook rounds or keeps depends on the number of ranks: leave "
                    "out comm_hook, gradients are added in one order without it"
                )
        arguments.warn_of(ignored, stacklevel=3)
        if isinstance(module, DataParallel):
            module = module.module
        self.module = module
        comm = collectives.init() if comm is None else comm
        tensors = [*module.named_parameters(), *module.named_buffers()]
        replaced = self._wrapper_of(tensors)
        check_same(
            comm,
            {
                **describe(tensors),
                "bucket_cap_mb": bucket_cap_mb,
                "first_bucket_mb": first_bucket_mb,
                "broadcast_buffers": broadcast_buffers,
                "plan": None if pinned is None else pinned.buckets,
                "check_every": check_every,
                "check_finite": finite,
                **settings,
            },
        )
        trainable = [(name, p) for name, p in module.named_parameters() if p.is_floating_point()]
        if not any(p.requires_grad for _, p in trainable):
            raise ParallelError("no parameter of this module requires grad: there is nothing to reduce")
        if len({p.device for _, p in trainable}) > 1:
            raise ParallelError("the parameters of this module are on several devices: a rank has one")
        self.comm = comm.duplicate(f"DataParallel of {type(module).__name__}")
        broadcast_values(self.comm, [tensor for _, tensor in tensors])
        micro = None if micro_batches is None else self._micro_batches(micro_batches)
        names, params = [name for name, _ in trainable], [p for _, p in trainable]
        kinds, nbytes, xp = [p.dtype for p in params], [p.array.nbytes for p in params], params[0].device.xp
        trained = [p.requires_grad for p in params]
        self.__dict__["comm_hook"] = comm_hook  # one that is a Module is not part of the model
        self._hooked = None
        try:
            planner = Planner(self.comm, names, nbytes, kinds, trained, cap=cap, first=first, pinned=pinned, xp=xp)
            if comm_hook is not None:
                before = None if replaced is None else replaced._hooked
                self._hooked = HookExchange(comm_hook, self.comm, names, params[0].device, before)
        except DdpError:  # a plan or a hook that does not fit
            self.comm.close()
            raise
        if replaced is not None:
            replaced.close()
            replaced._closed = (
                "was replaced: its module was wrapped again. Use the newer DataParallel, also for ZeroOptimizer"
            )
            module.zero_grad()
        self.micro_batches = micro
        self.reducer = Reducer(
            self, names, params, self.comm, planner, check_every=every, check_finite=finite, micro_batches=micro
        )
        if self._hooked is not None:
            self.reducer.set_exchange(self._hooked)
        self._parameters_check = ParameterCheck(module)
        self.buffer_sync = BufferSync(self.comm, module) if buffers and micro is None else None
        self.buffers_at = 0  # how many synchronized backwards had ended when ranks last had the same buffers
        self.reducer.before.append(self._before_backward)
        self.joining: join.JoinContext | None = None  # inside `join`
        self._closed: str | None = None  # why it cannot be used any more

    @property
    def plan(self) -> Plan:
        """Which gradients are reduced together, in which order; prints as a table."""
        return self.reducer.planner.plan

    def plan_state(self) -> dict[str, Any]:
        """What `load_plan_state` takes: the plan, how far planning has come, and whether buffers are due. JSON values.

        `plan.state()` alone pins a plan for a new run; this is for going on with one.
        """
        self.check_open()
        state = {**self.reducer.planner.state(), "buffers_due": self._buffers_due()}
        return state if self.micro_batches is None else {**state, "micro_batches": self.micro_batches.state()}

    def load_plan_state(self, state: Mapping[str, Any]) -> None:
        """Reduces as the model that this state is of would have gone on to: the same sums, to the last bit. Collective.

        Between steps: gradients that are there move along, as with every plan.

        Raises: ParallelError, on every rank that was given it, if the plan is none of these parameters, or the state is
        of another number of micro-batches.
        """
        self.check_open()
        if self.micro_batches is not None:
            self.micro_batches.load_state(state.get("micro_batches"))
        try:
            self.reducer.load_plan_state(state)
        except (KeyError, TypeError, ValueError, AttributeError):
            raise ParallelError("load_plan_state: expected what `model.plan_state()` gave") from None
        self.buffers_at = -1 if state.get("buffers_due") else self.reducer.steps

    def close(self) -> None:
        """Gives the module back: its backward is its own again, and it may be wrapped anew. Gradients stay."""
        self._closed = self._closed or "was closed: call its module, model.module, or wrap that anew"
        self.reducer.release()
        if self._hooked is not None:
            self._hooked.release()
        self.comm.close()

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        """What the module returns. In training it is preceded by the buffers' call, where they are due.

        Raises: ParallelError if the module has other parameters than when it was wrapped, or was given back.
        """
        self.check_open()
        self._parameters_check.check()
        begun = monotonic_ns()
        # A checkpointed region runs again inside backward: there the buffers are what they were.
        if self.buffer_sync is not None and not self.reducer.running:
            if capturing.now is not None:
                at = self.buffers_at
                capturing.now.guard_value(self._buffers_due)  # whether the graph has the buffers' call
                capturing.now.undo(lambda: setattr(self, "buffers_at", at))
            if self._buffers_due() and self.training and modes.state.enabled:
                self._sync_buffers(self._announce(join.FORWARD))
            self.buffer_sync.take()
        if self.micro_batches is not None and self.training and modes.state.enabled and not self.reducer.running:
            result = self.micro_batches.forward(lambda: self.module(*args, **kwargs))
        else:
            result = self.module(*args, **kwargs)
        self.reducer.forward = (begun, monotonic_ns())
        if self.training and self.reducer.sync and not self.reducer.running and self.comm.size > 1:
            self.reducer.skipped.add_forward(result)
        return result

    def backward(self, loss_sum: Tensor, weight: float) -> None:
        """Backward of a sum over `weight` samples (or tokens); gradients become sum of gradients / sum of weights.

        loss_sum: (), the sum of the losses on this rank, not their mean
        weight: how many they are, 0 for an empty batch; weights add up over `no_sync()`

        Raises: ParallelError if gradients of an earlier synchronized backward are still there, if other ranks call
        `loss.backward()` instead, or if the weight is negative. A loss that reaches no parameter takes part with zeros.
        """
        self.check_open()
        if not isinstance(loss_sum, Tensor):
            raise DtypeError(f"model.backward: expected a loss, a Tensor, got {type(loss_sum).__name__}")
        with backward_weight(arguments.weight_of(weight)), self.reducer.participating():
            if loss_sum.requires_grad:
                loss_sum.backward()

    @contextlib.contextmanager
    def no_sync(self) -> Iterator[None]:
        """Inside, gradients add up on this rank alone; the next backward outside reduces them with its own.

        What counts is where `backward` is called; forward may be inside or outside.
        """
        before, self.require_backward_grad_sync = self.require_backward_grad_sync, False
        try:
            yield
        finally:
            self.reducer.sync = before

    @property
    def require_backward_grad_sync(self) -> bool:
        """Whether a backward reduces gradients: False has the effect of `no_sync()`, until it is True again."""
        return self.reducer.sync

    @require_backward_grad_sync.setter
    def require_backward_grad_sync(self, value: bool) -> None:
        self.check_open()
        self.reducer.sync = arguments.switch("require_backward_grad_sync", value)

    @contextlib.contextmanager
    def join(
        self,
        divide_by_initial_world_size: bool = True,
        enable: bool = True,
        throw_on_early_termination: bool = False,
        *,
        optimizers: Iterable[Any] = (),
    ) -> Iterator[None]:
        """Inside, ranks may make different numbers of steps: those out of data take part in the others' with zeros.

        All ranks enter and leave together; afterwards all have the model of the rank that made most steps.
        divide_by_initial_world_size: a rank out of data counts as one with gradient zero in the mean of
        `loss.backward()`; off: it does not count. With `model.backward(loss, weight=n)` its weight is 0 either way.
        enable: off: nothing happens here. throw_on_early_termination: raise on all ranks when the first is out of data
        optimizers: whose state shall be that rank's too: momenta and step counts have missed updates like the model

        Raises: ParallelError for a model with a ZeroOptimizer; EarlyStop, one of them, if that was asked for.
        """
        self.check_open()
        given = join.checked(optimizers)
        if not enable or self.comm.size == 1:
            yield
            return
        if self.micro_batches is not None:
            raise ParallelError(
                "join: a step has the same micro-batches whatever the number of ranks: give DistributedSampler "
                'tail="exact", and the last ones are shorter'
            )
        if not self.reducer.exchange.joinable:
            raise ParallelError("join: a ZeroOptimizer's steps are collective: give all ranks equal numbers of batches")
        weight = 1.0 if divide_by_initial_world_size else 0.0
        joining = join.JoinContext(self.comm, throw_on_early_termination)
        with join.single_join():
            self.joining = joining
            try:
                yield
                while (kind := joining.announce(None)) is not None:
                    if kind == join.FORWARD:
                        self._sync_buffers(joining.source)
                    else:
                        self.reducer.join_no_op(weight)
            finally:
                self.joining = None
        if self.buffer_sync is not None:
            self.buffer_sync.take()
        tensors = [*self.module.parameters(), *self.module.buffers()]
        join.take_over(self.comm, joining.source, tensors, given)
        self.buffers_at = self.reducer.steps

    @property
    def accumulating(self) -> bool:
        """Whether a later backward is to reduce gradients of `no_sync()`, or of this step's earlier micro-batches."""
        pending = self.micro_batches is not None and self.micro_batches.pending
        return pending or self.reducer.gradients.accumulating

    def share_requests(self, requests: PendingRequests) -> None:
        """Has the control messages carry these requests to stop or save; several models may share one object."""
        self.reducer.requests = requests

    def stats(self) -> Stats:
        """What the steps since the last `summary` did: compute, communication, which of it was hidden, who was late."""
        return self.reducer.timeline.stats()

    def summary(self) -> str:
        """One line about the steps since the last summary, for the end of an epoch."""
        return self.reducer.timeline.summary()

    def __deepcopy__(self, memo: dict[int, Any]) -> Module:
        """A copy of the module, which is not wrapped: other ranks need not make one."""
        return copy.deepcopy(self.module, memo)

    def __getstate__(self) -> object:
        raise ParallelError(
            "a DataParallel cannot be pickled, nor copied by copy.copy: pickle its module, model.module; "
            "copy.deepcopy(model) returns a copy of the module"
        )

    def check_open(self) -> None:
        if self._closed is not None:
            raise ParallelError(f"this DataParallel {self._closed}")

    def _wrapper_of(self, tensors: Iterable[tuple[str, Tensor]]) -> DataParallel | None:
        """The wrapper of this module that is to be replaced, None if there is none.

        Raises: ParallelError if a tensor belongs to a wrapper of another module, or that wrapper is in use.
        """
        found: DataParallel | None = None
        for name, tensor in tensors:
            owner = getattr(tensor.leaf.ready_hook, "owner", None)
            if owner is None or owner is found:
                continue
            if owner.module is not self.module:
                raise ParallelError(
                    f"{name} is already part of a DataParallel of another module, which goes on reducing its gradients "
                    "also where no variable holds it: use that one, or call its close() first; where it is lost, wrap "
                    "a copy, copy.deepcopy(module)"
                )
            if owner.reducer.running or owner.joining is not None:
                raise ParallelError("a module cannot be wrapped again inside its backward or its wrapper's join()")
            found = owner
        return found

    def _micro_batches(self, count: int) -> MicroBatches:
        try:
            return MicroBatches(self.comm, self.module, count)
        except DdpError:  # on every rank alike
            self.comm.close()
            raise

    def _before_backward(self) -> None:
        """Before a synchronized backward launches anything."""
        if self._buffers_due():  # this rank made no forward, as with an empty batch; the others wait for it
            self._sync_buffers(self._announce(join.FORWARD))
        self._announce(join.BACKWARD)

    def _announce(self, kind: str) -> int:
        """Inside `join`, tells ranks without data what follows. Returns the lowest rank that still has data."""
        if self.joining is None:
            return 0
        self.joining.announce(kind)
        return self.joining.source

    def _buffers_due(self) -> bool:
        return self.buffer_sync is not None and self.buffers_at != self.reducer.steps

    def _sync_buffers(self, source: int) -> None:
        """Has the ranks exchange buffers. source: the rank whose buffers count. Collective."""
        self.buffers_at = self.reducer.steps
        if self.buffer_sync is not None:
            with error_context("the buffers, before forward"):
                self.buffer_sync.run(source)
