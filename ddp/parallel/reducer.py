"""The reducer: counts gradients as backward completes them, and reduces full buckets while backward is still running.

The engine calls `begin` when a backward starts that reaches parameters of this model, `ready` for each gradient that is
complete, and at the end `end`, or `abandon` if backward raised. In these calls the reducer

    begin   sends the control message (`control`): weight, used parameters
    ready   launches every bucket (`buckets`) that is full, through the exchange (`exchange`)
    end     waits for all buckets, lets the checks compare what ranks sent, and asks the planner for the next plan

Strict order: ranks fill buckets in different orders, but all ranks must launch collectives in the same order. So a full
bucket is launched only after all buckets before it in the plan.
"""

from __future__ import annotations

import contextlib
import itertools
import secrets
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from functools import partial
from time import monotonic_ns
from typing import Any

import numpy as np

from collectives import Communicator, ReduceOp
from collectives.flight.recorder import process_recorder
from ddp._device import capturing
from ddp._engine import Leaf
from ddp._engine.grad_buffer import ZEROED
from ddp._tensor.base import restore_tensors
from ddp._tensor.core import Tensor
from ddp._tensor.functions import cat
from ddp._tensor.gradients import hold_grad
from ddp.errors import GraphError, ParallelError
from ddp.parallel.bucket_plan import Plan
from ddp.parallel.buckets import BucketAssignment, Buckets
from ddp.parallel.checks import ConsistencyCheck, FiniteCheck, SkippedBackwards
from ddp.parallel.collectives import CollectiveCall, all_reduce
from ddp.parallel.control import NO_CHECKSUM, ControlMessage, PendingRequests
from ddp.parallel.error_context import error_context
from ddp.parallel.exchange import AllReduce, Exchange, SingleRank
from ddp.parallel.gradient_state import GradientState, WeightSum
from ddp.parallel.graph_replay import GraphReplays
from ddp.parallel.micro_batches import MicroBatches, TreeExchange
from ddp.parallel.planner import ArrivalTimer, Planner
from ddp.parallel.stats import Timeline
from ddp.parallel.step_trace import Step

# Numbers reducers in the order in which they are made, which is the same on all ranks. A backward through several
# models begins and ends their reductions in this order. A reduction waits for the other ranks, whose graphs may reach
# the models in another order.
_reducer_numbers = itertools.count()


class Reducer:
    """Reduces the gradients of one model; see `ddp._engine.GradReadyHook` for what the engine calls.

    owner: the DataParallel; names, tensors: the floating-point parameters, in the model's order
    comm: the communicator that only this model uses; planner: makes the bucket plans, and has made the first
    check_every, check_finite: see DataParallel
    micro_batches: this rank's progress through the micro-batches of a step; None without micro_batches
    """

    def __init__(
        self,
        owner: Any,
        names: Sequence[str],
        tensors: Sequence[Tensor],
        comm: Communicator,
        planner: Planner,
        *,
        check_every: int,
        check_finite: bool,
        micro_batches: MicroBatches | None = None,
    ) -> None:
        self.owner = owner
        self.order = next(_reducer_numbers)
        self.sync = True  # False inside no_sync()
        self.steps = 0  # synchronized backwards that have ended
        self.names = names
        self.leaves = [tensor.leaf for tensor in tensors]
        self.comm = comm
        self.exchange: Exchange = SingleRank(comm) if comm.size == 1 else AllReduce(comm)
        self.micro_batches = micro_batches
        self.tree: TreeExchange | None = None
        if micro_batches is not None:
            self.tree = TreeExchange(comm, names, tensors[0].device, micro_batches.count)
            self.exchange = self.tree
        self.before: list[Callable[[], None]] = []  # called before a synchronized backward launches anything
        node_and_job = np.array([[comm.node, secrets.randbits(62)]])
        nodes, jobs = comm.all_gather(node_and_job, lengths="equal").T.tolist()
        self.timeline = Timeline(comm.rank, comm.size, nodes, jobs[0])
        self.planner = planner
        self.requests = PendingRequests()
        self.forward: tuple[int, int] | None = None  # when the last forward began and ended, ns
        self.running = False  # a backward of this model runs now
        self.in_flight = False  # this backward has launched collectives, and has not ended
        self.gradients = GradientState(self.leaves, tensors)
        count = 0 if micro_batches is None else micro_batches.count
        self.control = ControlMessage(comm, len(names), self.timeline.width, count)
        self.used: Sequence[bool] = ()  # whether this rank used each parameter in the last synchronized backward
        self._consistency = ConsistencyCheck(comm, names, tensors, check_every)
        self._finite = FiniteCheck(comm) if check_finite else None
        self.skipped = SkippedBackwards()
        self._xp = tensors[0].device.xp
        self._timer = ArrivalTimer(len(names), tensors[0].device)
        self._replays = GraphReplays(self)
        self._index = {leaf: index for index, leaf in enumerate(self.leaves)}
        # The state of `gradients` before the backward that runs now.
        self._snapshot: tuple[WeightSum, list[bool]] | None = None
        # With micro_batches: the parameters that had a gradient before the backward that runs now.
        self._full: set[int] = set()
        self._reached = False  # a backward has begun since `participating` was entered
        self._reducing = False  # this backward reduces: False in no_sync(), and before the last micro-batch
        self._broken: BaseException | None = None
        self._missing: list[int] = []  # for each bucket: how many of its gradients are not complete yet
        self._launched = 0
        self._full_at: list[int] = []  # when each bucket was full, ns
        self._started = 0  # when backward began, ns
        for leaf in self.leaves:
            leaf.ready_hook = self
        self._set_plan(planner.plan)

    @property
    def buckets(self) -> Buckets:
        """The buckets of the present plan, whose memory holds the gradients."""
        return self._assignment.buckets

    def set_exchange(self, exchange: Exchange) -> None:
        """Reduces buckets through this exchange from now on. Collective."""
        self.exchange = exchange
        exchange.set_buckets(self.buckets)

    def begin(self, leaves: Sequence[Leaf]) -> None:
        """Called when a backward starts that will reach these leaves.

        If the backward reduces, sends the control message, and launches the buckets of the plan before the first one
        with a parameter that the backward reaches.

        Raises: ParallelError if an earlier backward failed half-way or still runs; also what is raised by
        `GradientState.add_weight`, `GraphReplays.begin`, `_begin_micro_batch` and the functions in `before`.
        """
        self.check_usable()
        self.running = self._reached = True
        self._replays.begin()
        self._begin_capture()
        self.skipped.begin_backward()
        self._snapshot = self.gradients.snapshot()
        if self.micro_batches is not None:
            self._full = {index for index, leaf in enumerate(self.leaves) if leaf.grad_buffer.full}
        reached = {self._index[leaf] for leaf in leaves}
        self.gradients.begin(reached)
        self.gradients.add_weight(bool(reached), self.names)
        self._reducing = self.sync
        used = {index for index in range(len(self.leaves)) if index in reached or self.gradients.has(index)}
        if self.micro_batches is not None:
            used = self._begin_micro_batch(self.micro_batches, used)
        if self._reducing:
            for function in self.before:
                function()
            self._start(reached, [index in used for index in range(len(self.leaves))], self.gradients.weights.weight)

    def ready(self, leaf: Leaf) -> None:
        """Called when a leaf's gradient is complete in its grad_buffer. Launches full buckets, in the plan's order."""
        if not self._reducing:
            return
        index = self._index[leaf]
        self._timer.ready(index)
        bucket = self._assignment.bucket_of[index]
        if bucket is not None:
            self._missing[bucket] -= 1
            assert self._missing[bucket] >= 0
            if self._missing[bucket] == 0:
                self._full_at[bucket] = monotonic_ns()
                self._launch_full()
        self.exchange.poll()

    def end(self) -> None:
        """Called after the last node. If the backward reduces, waits for the buckets, and completes the step.

        Then each grad_buffer holds the mean, or is empty if no rank used the parameter. Under a ZeroOptimizer without
        micro_batches it holds this rank's sum instead.
        """
        if self.micro_batches is not None:
            self.micro_batches.end_backward()
        if not self._reducing:
            if self.sync:
                self._keep_micro_batch()
            self.running = False
            self._end_capture(None)
            return
        computed = monotonic_ns()
        self._timer.end()
        self._wait()
        self.running = False
        self.requests.receive(self.control.requests())
        self._record_step(computed)
        weight = self.gradients.weights.weight
        self.gradients.weights = WeightSum()
        self._snapshot = None
        try:
            self._check()
        except ParallelError:  # every rank raises it, so the ranks still agree
            self.in_flight = False
            raise
        used = self.control.used()
        self._finish_gradients(used)
        if self.micro_batches is not None:
            self.micro_batches.complete()
        if not self._end_capture(weight):
            self.count_step()
            plan = self.planner.after_backward(self._timer, used)
            if plan is not None:
                self._set_plan(plan)
        self.in_flight = False

    def _begin_capture(self) -> None:
        """In a capture, guards what its graph depends on, and registers how to restore the state if it fails."""
        if (graph := capturing.now) is None:
            return
        snapshot = self.gradients.snapshot()

        def undo() -> None:
            self.gradients.restore(snapshot)
            self.running = self.in_flight = False

        graph.guard_value(lambda: (self.sync, self.gradients.weights))
        graph.undo(undo)

    def _end_capture(self, weight: float | None) -> bool:
        """In a capture, registers what every launch of its graph does. Returns: whether there is a capture.

        weight: of a synchronized backward, on this rank
        """
        if (graph := capturing.now) is None:
            return False
        if self.sync:
            self._replays.register(graph, weight)
        weights = self.gradients.weights  # the state after each launch
        graph.after(lambda: setattr(self.gradients, "weights", weights))
        return True

    def abandon(self, error: BaseException) -> None:
        """Called when backward raised.

        Unless all buckets were reduced already, restores the weights and flags in `gradients`, not the grad_buffers.
        With micro_batches, clears the grad_buffers that were empty before, so that the backward can be repeated.

        If collectives were launched, the ranks no longer agree, and the model is marked as broken. It is not marked in
        a capture, on a single rank without micro_batches, or after an error of `_check`, which every rank raises.
        """
        # With micro_batches not even a single rank can repeat the backward: sums of earlier micro-batches have been
        # added to the buckets. In a capture nothing has been launched yet.
        alone = self.comm.size == 1 and self.tree is None
        if self.in_flight and self._broken is None and not alone and capturing.now is None:
            self._broken = error
        self.in_flight = False
        if self.micro_batches is not None:
            self.micro_batches.begin_again()
            if self.running:
                self._clear_gradients(keep=self._full)
        if self._snapshot is not None:
            self.gradients.restore(self._snapshot)
            self._snapshot = None
        self.running = False

    @contextlib.contextmanager
    def recording(self, leaves: Sequence[Leaf]) -> Iterator[None]:
        """A context for a backward under create_graph. At its end gradients become means over ranks, with a graph.

        Inside `no_sync()` they stay this rank's own.
        Raises: GraphError with a communication hook, a ZeroOptimizer, micro_batches, or inside `join`; ParallelError as
        `begin`.
        """
        self.check_usable()
        if self.owner.joining or not isinstance(self.exchange, AllReduce | SingleRank):
            raise GraphError(
                "backward(create_graph=True) under DataParallel: what a communication hook, a ZeroOptimizer or join() "
                "makes of gradients has no derivative: use autograd.grad(create_graph=True), ddp.parallel.all_reduce"
            )
        # If earlier gradients were discarded, their weights do not count. `begin` cannot see this: it runs at the end,
        # when there are gradients again.
        if not self.gradients.any():
            self.gradients.weights = WeightSum()
        self.running = True
        try:
            yield
        finally:
            self.running = False
        edges = [getattr(x.grad, "edge", None) for x in self.gradients.tensors]  # before they move into their buckets
        reached = [leaf for leaf in leaves if leaf.ready_hook is self]
        with self._abandoning():
            self.begin(reached)
            for leaf in reached:
                self.ready(leaf)
            self.end()
        if self.sync:
            # The buckets hold the means. Here the means get a graph, which has one all-reduce of all gradients. So a
            # backward that reaches any mean runs the same collective on every rank.
            used = [*itertools.compress(self.gradients.tensors, self.control.used())]
            means: Any = restore_tensors(
                [x.leaf.grad_buffer.array for x in used], [*itertools.compress(edges, self.control.used())], ()
            )
            flat = cat([mean.reshape(-1) for mean in means])
            call = CollectiveCall("all_reduce", flat, self.comm)
            call.agree()
            whole = call.result(flat.array, partial(all_reduce, op="mean", comm=self.comm))
            for x, part in zip(used, whole.split([x.numel() for x in used]), strict=True):
                hold_grad(x, part.view_as(x).to(x.dtype))

    @contextlib.contextmanager
    def participating(self) -> Iterator[None]:
        """Contributes zeros to the other ranks' backward if the backward inside reaches no parameter on this rank."""
        self._reached = False
        yield
        if not self._reached:
            with self._abandoning():
                self.begin([])
                self.end()

    def join_no_op(self, weight: float) -> None:
        """Takes part in a backward of the other ranks, with gradients of zero. weight: of this rank"""
        self.check_usable()
        self.gradients.begin(set())
        for index, leaf in enumerate(self.leaves):
            if self.gradients.has(index):
                leaf.grad_buffer.clear()
        self.gradients.weights = WeightSum()
        self._consistency.forget()
        self.skipped.begin_backward()
        with self._abandoning():
            self._start(set(), [False] * len(self.leaves), weight, joined=True)
            self._consistency.forget()
            self.end()

    def load_plan_state(self, state: Mapping[str, Any]) -> None:
        """Restores a result of `planner.state()`. Collective. Raises: ParallelError if the plan does not fit."""
        before = self.planner.plan
        plan = self.planner.restore(state)
        if self.tree is not None:
            self.tree.discard()
        if plan.buckets != before.buckets:
            self._set_plan(plan)

    def release(self) -> None:
        """Detaches this reducer from the leaves: their gradients get memory of their own, and are no longer reduced."""
        for leaf in self.leaves:
            leaf.ready_hook = None
            if leaf.grad_buffer.read_error is not None:  # by a ZeroOptimizer: the rank may have only a part of the mean
                leaf.grad_buffer.clear()
            leaf.grad_buffer.unbind()

    def count_step(self) -> int:
        """Counts a synchronized backward that has ended. Returns how many have ended."""
        self.steps += 1
        process_recorder().count_backwards(self.steps)
        return self.steps

    def check_usable(self) -> None:
        """Checks that a backward may begin. Raises: ParallelError if an earlier one failed half-way or still runs."""
        if self._broken is not None:
            raise ParallelError(
                f"an earlier backward failed half-way on this rank ({type(self._broken).__name__}: {self._broken}), so "
                "ranks no longer agree on what was reduced: start again from a checkpoint"
            )
        if self.running:
            raise ParallelError(
                "a backward of this model was started while another one runs, from a hook or a second thread: the "
                "buckets of the first are already under way"
            )

    def _set_plan(self, plan: Plan) -> None:
        """Lays out the plan's buckets, and moves gradients there. Collective."""
        before: BucketAssignment | None = getattr(self, "_assignment", None)
        self._assignment = BucketAssignment(plan, self.names, self.leaves, self.comm)
        if before is not None:  # keeps the old buckets alive until the device has copied the gradients out of them
            self.comm.watch_device("moved gradients", keep=before.buckets)
        self.timeline.set_buckets(self.buckets)
        self.exchange.set_buckets(self.buckets)

    def _start(self, reached: set[int], used: Sequence[bool], weight: float | None, joined: bool = False) -> None:
        """Sends the control message. Launches the buckets before the first that gets a gradient in this backward."""
        self.used = used
        self._reducing = True
        self._started = monotonic_ns()
        self._timer.begin()
        self._assignment.exclude(self.gradients.excluded)
        checksum = NO_CHECKSUM if capturing.now is not None else self._consistency.checksum(self.steps)
        self._missing = self._assignment.missing(reached)
        self._launched = 0
        self._full_at = [self._started] * len(self._missing)
        if self._finite is not None and self.tree is None:
            self._finite.bad = None
        self.in_flight = True
        timestamps = self.timeline.timestamps()
        micro = None if self.micro_batches is None else (self.micro_batches.own, self.micro_batches.weights)
        self.control.send(
            weight, used, checksum, timestamps, joined, self.requests.requested, self.skipped.count, micro
        )
        self.exchange.begin(self.control)
        self._launch_full()

    def _launch_full(self) -> None:
        """Launches the next buckets in the plan's order, up to the first one that is not full."""
        while self._launched < len(self._missing) and self._missing[self._launched] == 0:
            self._fill(self._launched)
            self.exchange.launch(self._launched)
            self._launched += 1

    def _fill(self, bucket: int) -> None:
        """Writes zeros where a bucket got no gradient on this rank: other ranks may have one.

        With check_finite, also looks for infinity and NaN in the gradients.
        """
        buckets = self.buckets
        for gradient in buckets.members[bucket]:
            index = self._assignment.parameters[gradient]
            if not self.gradients.has(index):
                buckets.memory.views[gradient][...] = 0
            elif self._finite is not None:
                self._finite.check(self.names[index], buckets.memory.views[gradient])

    def _begin_micro_batch(self, micro_batches: MicroBatches, used: set[int]) -> set[int]:
        """Begins a backward that may complete a micro-batch.

        Returns: the parameters that this rank's micro-batches of this step have used so far
        Raises: ParallelError if a parameter holds a gradient of the step before or has no bucket, if only some
        micro-batches have a weight, or in a CUDA graph.
        """
        if capturing.now is not None:
            raise ParallelError("micro_batches: a CUDA graph would replay one micro-batch's draws: run without a graph")
        mean = self.gradients.first_mean()
        loose = used.intersection(self._assignment.unassigned())
        for index in [*([] if mean is None else [mean]), *loose]:
            why = (
                "has no place in the tree, as it was frozen when the model was wrapped: wrap the model again"
                if index in loose
                else "holds the last step's gradient: call zero_grad() after each optimizer.step(). To accumulate "
                "more, give more micro_batches, or split one inside no_sync()"
            )
            raise ParallelError(f"micro_batches: {self.names[index]} {why}")
        for leaf in self.leaves:
            # A gradient of -0 that is added to zeros becomes 0, but in an empty buffer it stays -0.
            if leaf.grad_buffer.state is ZEROED:
                leaf.grad_buffer.clear()
        self._assignment.exclude(self.gradients.excluded)
        micro_batches.begin_backward()
        if self._finite is not None and not micro_batches.pending:
            self._finite.bad = None
        if self.sync:
            micro_batches.advance(used, self.gradients.weights.weight)
            self._reducing = micro_batches.last
        return micro_batches.used

    def _keep_micro_batch(self) -> None:
        """Adds the gradients of a complete micro-batch, which is not this rank's last one, to the tree's sums."""
        assert self.tree is not None
        assert self.micro_batches is not None
        for bucket in range(len(self.buckets.members)):
            self._fill(bucket)
        self.tree.keep(self.micro_batches.number)
        self._clear_gradients()
        self.gradients.weights = WeightSum()
        self._snapshot = None
        self.micro_batches.complete()

    def _clear_gradients(self, keep: Collection[int] = ()) -> None:
        for index, leaf in enumerate(self.leaves):
            if self.gradients.has(index) and index not in keep:
                leaf.grad_buffer.clear()

    def _wait(self) -> None:
        """Waits for the control message and all buckets. Raises: the error of the first that failed, with its name."""
        assert self._launched == len(self._missing)
        with error_context(f"backward {self.steps}"):
            first = self.buckets.describe(0) if self._missing else "any bucket"
            with error_context(f"the control message, before {first}"):
                self.control.wait()
            self.exchange.finish()

    def _record_step(self, computed: int) -> None:
        self.timeline.receive(self.control.timestamps())
        self.timeline.add(
            Step(
                number=self.steps,
                forward=self.forward,
                begun=self._started,
                computed=computed,
                ended=monotonic_ns(),
                control=self.control.times(),
                ready=self._full_at,
                times=self.exchange.times(),
            )
        )
        self.forward = None

    def _check(self) -> None:
        """Compares what the ranks sent. Raises: ParallelError, on every rank alike."""
        self.control.check_weights()
        self.skipped.compare(self.steps, self.control.skipped())
        self._consistency.compare(self.control.checksums())
        if self._finite is not None:
            for index in self._assignment.unassigned():
                if self.gradients.has(index):
                    self._finite.check(self.names[index], self.leaves[index].grad_buffer.array)
            self._finite.compare(self.steps)

    def _finish_gradients(self, used: Sequence[bool]) -> None:
        """Leaves the mean in each grad_buffer. Reduces gradients without a bucket one by one.

        used: whether any rank used each parameter
        """
        for index in self.gradients.excluded:
            if used[index]:
                self._assignment.include(index)
        for index in self._assignment.unassigned():
            if used[index]:
                leaf = self.leaves[index]
                if not self.gradients.has(index):
                    leaf.grad_buffer.set(self._xp.zeros(leaf.shape, leaf.dtype))
                buffer = leaf.grad_buffer.array
                with error_context(f"backward {self.steps}: {self.names[index]}, which was frozen before"):
                    # Not in place: a graph may read the gradient.
                    leaf.grad_buffer.set(self.comm.all_reduce(buffer, ReduceOp.SUM, scale=self.control.scale()))
        for index, by_any in enumerate(used):
            self.gradients.end(index, by_any)

    @contextlib.contextmanager
    def _abandoning(self) -> Iterator[None]:
        try:
            yield
        except BaseException as error:
            self.abandon(error)
            raise
