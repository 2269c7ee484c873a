"""DataParallel: one model on every rank, whose gradients are averaged while backward is still running.

This is the user's interface. The `Reducer` does the work of backward, the `BufferSync` that of forward, and the
`JoinContext` lets ranks make different numbers of steps.
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
    """Wraps a module so that each synchronized backward leaves the mean gradient over all ranks in `param.grad`.

    module: of the same structure on every rank; parameters and buffers are broadcast from rank 0
    comm: the ranks' communicator; None: `collectives.init()`. Reductions go over a duplicate of it
    bucket_cap_mb: maximum MiB of a bucket (gradients that are reduced together); "auto": chosen from measurements of
    backward and of the network. first_bucket_mb: maximum MiB of the first bucket, small so that communication starts
    early. A gradient above the limit has a bucket of its own
    broadcast_buffers: broadcast the buffers of rank 0 (inside `join`: of the lowest rank that has data) before the
    first training forward after each synchronized backward; False: each rank keeps its own. Without effect with
    micro_batches
    comm_hook: how a bucket is reduced, see `ddp.parallel.comm_hooks`
    plan: fixed buckets: `model.plan` of an earlier run, or its state(). On 3 or more ranks the last bits of the
    gradients may depend on the plan
    check_every: compare the ranks' parameters every so many steps; 0: never; check_finite: infinity and NaN in a
    gradient raise an error that names the rank, at the cost of a pass over the gradients and a small call
    micro_batches: the number of micro-batches in a step, on all ranks together. The results are then the same, bit for
    bit, on any number of ranks; see below. None: each rank computes one batch
    ignored: arguments of PyTorch's DistributedDataParallel that have no effect here, such as device_ids

    Call it like the module. `loss.backward()` averages over ranks; `model.backward(loss_sum, weight=n)` divides the sum
    of all ranks' gradients by the sum of their weights, which is exact for batches of different sizes. After
    `loss.backward(create_graph=True)` these means have a graph; with a communication hook, a ZeroOptimizer or
    micro_batches, and inside `join`, this call raises GraphError. Unused parameters need no flag: the grad of a
    parameter that no rank has used is None. Parameters may be frozen and unfrozen at any time. Paths in `state_dict()`
    and `named_parameters()` begin with "module.", as in PyTorch; state dicts load with or without this prefix, here and
    in the bare module. `copy.deepcopy(model)` copies the module, without its wrapper. `close()` detaches the wrapper
    from the module. Wrapping a module or its wrapper again, as when a notebook's cell runs twice, replaces the first
    wrapper: gradients are cleared, and using the first wrapper raises.

    With `micro_batches=V` each forward and backward computes one micro-batch of a `DistributedSampler(dataset,
    micro_batches=V)`. The backward of this rank's last micro-batch in a step leaves the mean over all V. After the
    backwards of its earlier micro-batches, `accumulating` is True:

        for x, t in loader:
            F.cross_entropy(model(x), t).backward()
            if not model.accumulating:
                optimizer.step()
                optimizer.zero_grad()

    On any number of ranks from 1 to V, with the same number of BLAS threads and the same kind of CPU, the weights are
    the same to the last bit. This thread's random numbers are seeded anew for each micro-batch, from rank 0's seed. The
    order of sums is described in `ddp.parallel.micro_batches`. A communication hook, SyncBatchNorm, parameters of 16
    bits, `join` and a CUDA graph raise ParallelError. So do a forward that changes a buffer other than BatchNorm's, and
    a backward that reaches a parameter that was frozen when the model was wrapped.

    Raises: DtypeError if `module` is not a Module, or `comm` not a communicator; ArgumentError for other invalid
    arguments, such as a bucket size that is not above 0 or fewer micro-batches than ranks; TypeError for an unknown
    argument; ParallelError if the ranks' modules or settings differ, no parameter requires grad, parameters are on
    several devices, `plan` does not fit the parameters, a parameter belongs to a wrapper of another module, the hook
    has state and serves another model, or the module is wrapped again inside its own backward or `join`.
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
        arguments.check_types(module, comm)
        cap, first = arguments.caps(bucket_cap_mb, first_bucket_mb)
        buffers = arguments.check_bool("broadcast_buffers", broadcast_buffers)
        every = arguments.check_count("check_every", check_every)
        finite = arguments.check_bool("check_finite", check_finite)
        pinned = plan if plan is None or isinstance(plan, Plan) else Plan.from_state(plan)
        settings = hook_settings(comm_hook)
        if micro_batches is not None:
            micro_batches = arguments.check_count("micro_batches", micro_batches)
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
        named = {name: p for name, p in module.named_parameters() if p.is_floating_point()}
        names = list(named)
        params = list(named.values())
        if not any(p.requires_grad for p in params):
            raise ParallelError("no parameter of this module requires grad: there is nothing to reduce")
        if len({p.device for p in params}) > 1:
            raise ParallelError("the parameters of this module are on several devices: a rank has one")
        self.comm = comm.duplicate(f"DataParallel of {type(module).__name__}")
        broadcast_values(self.comm, [tensor for _, tensor in tensors])
        # Not by Module.__setattr__: a hook that is a Module would become a submodule.
        self.__dict__["comm_hook"] = comm_hook
        self._hooked = None
        try:
            micro = None if micro_batches is None else MicroBatches(self.comm, module, micro_batches)
            planner = Planner(
                self.comm,
                names,
                [p.array.nbytes for p in params],
                [p.dtype for p in params],
                [p.requires_grad for p in params],
                cap=cap,
                first=first,
                pinned=pinned,
                xp=params[0].device.xp,
            )
            if comm_hook is not None:
                before = None if replaced is None else replaced._hooked
                self._hooked = HookExchange(comm_hook, self.comm, names, params[0].device, before)
        except DdpError:  # every rank raises it: micro_batches, the plan or the hook does not fit
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
        self.buffers_at = 0  # `reducer.steps` when the buffers were last broadcast; if it differs now, they are due
        self.reducer.before.append(self._before_backward)
        self.joining: join.JoinContext | None = None  # inside `join`
        self._closed: str | None = None  # why it cannot be used any more

    @property
    def plan(self) -> Plan:
        """Which gradients are reduced together, and in which order. `print` shows it as a table."""
        return self.reducer.planner.plan

    def plan_state(self) -> dict[str, Any]:
        """JSON values for `load_plan_state`: the plan, the progress of planning, and whether buffers are due.

        With micro_batches they include the seed and the step, on which random numbers depend. Use it to continue a
        run. For a new run with a fixed plan, `plan.state()` is enough. Raises: ParallelError after `close`.
        """
        self.check_open()
        state = {**self.reducer.planner.state(), "buffers_due": self._buffers_due()}
        return state if self.micro_batches is None else {**state, "micro_batches": self.micro_batches.state()}

    def load_plan_state(self, state: Mapping[str, Any]) -> None:
        """Continues with the plan in this state. Collective.

        With as many ranks as in the saved run, sums then equal those of that run, to the last bit. Call it between
        steps. Gradients are kept, as with every change of plan.

        Raises: ParallelError if the state is not a `plan_state()`, its plan does not fit the parameters, or it has
        another number of micro-batches; then nothing has changed. Also after `close`.
        """
        self.check_open()
        try:
            self.reducer.planner.read(state)  # raises before anything has changed
            if self.micro_batches is not None:
                self.micro_batches.load_state(state.get("micro_batches"))
            self.reducer.load_plan_state(state)
        except (KeyError, TypeError, ValueError, AttributeError, OverflowError):
            raise ParallelError("load_plan_state: expected what `model.plan_state()` gave") from None
        self.buffers_at = -1 if state.get("buffers_due") else self.reducer.steps

    def close(self) -> None:
        """Detaches the wrapper: the module's backward is local again, and it may be wrapped again.

        Gradients stay, except means under a ZeroOptimizer, of which a rank may have only a part.
        """
        self._closed = self._closed or "was closed: call its module, model.module, or wrap that anew"
        self.reducer.release()
        if self._hooked is not None:
            self._hooked.release()
        self.comm.close()

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        """Runs the module. In training, except under `no_grad`, first broadcasts the buffers, if they are due.

        Raises: ParallelError after `close`, if a parameter was added to the module after it was wrapped, or, with
        micro_batches, if the module changes a buffer other than BatchNorm's.
        """
        self.check_open()
        self._parameters_check.check()
        begun = monotonic_ns()
        recomputing = self.reducer.running  # a checkpointed region runs again inside backward, with the same buffers
        recording = self.training and modes.state.enabled
        if self.buffer_sync is not None and not recomputing:
            if capturing.now is not None:
                buffers_at = self.buffers_at
                capturing.now.guard_value(self._buffers_due)  # whether the graph contains the broadcast
                capturing.now.undo(lambda: setattr(self, "buffers_at", buffers_at))
            if recording and self._buffers_due():
                self._sync_buffers(self._announce(join.FORWARD))
            self.buffer_sync.take()
        if self.micro_batches is not None and recording and not recomputing:
            result = self.micro_batches.forward(lambda: self.module(*args, **kwargs))
        else:
            result = self.module(*args, **kwargs)
        self.reducer.forward = (begun, monotonic_ns())
        if self.training and self.reducer.sync and not recomputing and self.comm.size > 1:
            self.reducer.skipped.add_forward(result)
        return result

    def backward(self, loss_sum: Tensor, weight: float) -> None:
        """Runs backward from a sum over `weight` samples. Gradients become sum of gradients / sum of weights.

        loss_sum: (), the sum of the losses on this rank, not their mean. If no parameter was used for it, this rank
        contributes zeros
        weight: the number of samples (or tokens), 0 for an empty batch; weights add up over `no_sync()`

        Raises: DtypeError if loss_sum is not a Tensor; ParallelError if there still are gradients of an earlier
        synchronized backward, if accumulated backwards or other ranks used `loss.backward()` instead, if the weight is
        not a finite number of at least 0, or after `close`.
        """
        self.check_open()
        if not isinstance(loss_sum, Tensor):
            raise DtypeError(f"model.backward: expected a loss, a Tensor, got {type(loss_sum).__name__}")
        with backward_weight(arguments.weight_of(weight)), self.reducer.participating():
            if loss_sum.requires_grad:
                loss_sum.backward()

    @contextlib.contextmanager
    def no_sync(self) -> Iterator[None]:
        """A context in which gradients add up on this rank only. The next backward outside of it reduces them as well.

        It applies to calls of `backward` inside; their forward may be inside or outside.
        """
        previous = self.require_backward_grad_sync
        self.require_backward_grad_sync = False
        try:
            yield
        finally:
            self.reducer.sync = previous

    @property
    def require_backward_grad_sync(self) -> bool:
        """Whether a backward reduces gradients. False has the effect of `no_sync()`."""
        return self.reducer.sync

    @require_backward_grad_sync.setter
    def require_backward_grad_sync(self, value: bool) -> None:
        self.check_open()
        self.reducer.sync = arguments.check_bool("require_backward_grad_sync", value)

    @contextlib.contextmanager
    def join(
        self,
        divide_by_initial_world_size: bool = True,
        enable: bool = True,
        throw_on_early_termination: bool = False,
        *,
        optimizers: Iterable[Any] = (),
    ) -> Iterator[None]:
        """A context in which ranks may make different numbers of steps. Ranks out of data contribute zero gradients.

        All ranks enter and leave together. At the end, the model of a rank with the most steps is broadcast.
        divide_by_initial_world_size: True: in the mean of `loss.backward()` a rank out of data counts, with gradient
        zero; False: it does not count. With `model.backward(loss, weight=n)` its weight is 0 in both cases
        enable: False: the context has no effect; it also has none on one rank
        throw_on_early_termination: raise on all ranks when the first one is out of data
        optimizers: their state is broadcast at the end, too, because a rank out of data makes no optimizer steps

        Raises: ParallelError for a model with micro_batches or a ZeroOptimizer, inside another `join`, and after
        `close`; EarlyStop, a ParallelError, with throw_on_early_termination; DtypeError if `optimizers` is not an
        iterable of optimizers.
        """
        self.check_open()
        checked_optimizers = join.checked(optimizers)
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
                while (call := joining.announce(None)) is not None:
                    if call == join.FORWARD:
                        self._sync_buffers(joining.source)
                    else:
                        self.reducer.join_no_op(weight)
            finally:
                self.joining = None
        if self.buffer_sync is not None:
            self.buffer_sync.take()
        tensors = [*self.module.parameters(), *self.module.buffers()]
        join.take_over(self.comm, joining.source, tensors, checked_optimizers)
        self.buffers_at = self.reducer.steps

    @property
    def accumulating(self) -> bool:
        """Whether there are gradients of `no_sync()`, or of earlier micro-batches, that a later backward reduces."""
        pending = self.micro_batches is not None and self.micro_batches.pending
        return pending or self.reducer.gradients.accumulating

    def share_requests(self, requests: PendingRequests) -> None:
        """Makes this model's control messages exchange these requests. Several models may share one object."""
        self.reducer.requests = requests

    def stats(self) -> Stats:
        """Compute, communication and late ranks over the steps since the last `summary`, at most the latest 1,000."""
        return self.reducer.timeline.stats()

    def summary(self) -> str:
        """The statistics of `stats` in one line, for the end of an epoch. Then a new period of statistics begins."""
        return self.reducer.timeline.summary()

    def __deepcopy__(self, memo: dict[int, Any]) -> Module:
        """Copies the module without its wrapper. To copy the wrapper would be collective."""
        return copy.deepcopy(self.module, memo)

    def __getstate__(self) -> object:
        raise ParallelError(
            "a DataParallel cannot be pickled, nor copied by copy.copy: pickle its module, model.module; "
            "copy.deepcopy(model) returns a copy of the module"
        )

    def check_open(self) -> None:
        """Checks that this wrapper may be used. Raises: ParallelError if it was closed, or replaced by a newer one."""
        if self._closed is not None:
            raise ParallelError(f"this DataParallel {self._closed}")

    def _wrapper_of(self, tensors: Iterable[tuple[str, Tensor]]) -> DataParallel | None:
        """The existing wrapper of this module, None if there is none.

        Raises: ParallelError if a tensor belongs to a wrapper of another module, or if the existing wrapper is in a
        backward or in `join`.
        """
        wrapper: DataParallel | None = None
        for name, tensor in tensors:
            owner = getattr(tensor.leaf.ready_hook, "owner", None)
            if owner is None or owner is wrapper:
                continue
            if owner.module is not self.module:
                raise ParallelError(
                    f"{name} is already part of a DataParallel of another module, which goes on reducing its gradients "
                    "also where no variable holds it: use that one, or call its close() first; where it is lost, wrap "
                    "a copy, copy.deepcopy(module)"
                )
            if owner.reducer.running or owner.joining is not None:
                raise ParallelError("a module cannot be wrapped again inside its backward or its wrapper's join()")
            wrapper = owner
        return wrapper

    def _before_backward(self) -> None:
        """Broadcasts the buffers if they are due, and announces the backward. Runs before anything is launched."""
        # Other ranks have begun the broadcast in their forward. This rank had no forward, as for an empty batch.
        if self._buffers_due():
            self._sync_buffers(self._announce(join.FORWARD))
        self._announce(join.BACKWARD)

    def _announce(self, call: str) -> int:
        """Announces the next call to the ranks in `join`. Returns the lowest rank with data; 0 outside `join`."""
        if self.joining is None:
            return 0
        self.joining.announce(call)
        return self.joining.source

    def _buffers_due(self) -> bool:
        return self.buffer_sync is not None and self.buffers_at != self.reducer.steps

    def _sync_buffers(self, source: int) -> None:
        """Broadcasts the buffers of rank `source`. Collective."""
        self.buffers_at = self.reducer.steps
        if self.buffer_sync is not None:
            with error_context("the buffers, before forward"):
                self.buffer_sync.run(source)
