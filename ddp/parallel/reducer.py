"""The reducer: watches leaves become ready and reduces their buckets while backward is still running.

Strict order: ranks fill buckets in different orders, and collectives that meet in different orders deadlock. So a
bucket is launched when it is full and all before it in the plan have been launched, on every rank alike.
"""

from __future__ import annotations

import contextlib
import itertools
from collections.abc import Callable, Iterator, Mapping, Sequence
from time import monotonic_ns
from typing import Any

import numpy as np

from collectives import Communicator, ReduceOp
from collectives.flight.recorder import process_recorder
from ddp._device import capturing
from ddp._engine import Leaf
from ddp._tensor.core import Tensor
from ddp.errors import ParallelError
from ddp.parallel import accumulation
from ddp.parallel.checks.finite import FiniteCheck
from ddp.parallel.checks.tripwire import Tripwire
from ddp.parallel.control import NO_CHECKSUM, ControlMessage
from ddp.parallel.exchange import AllReduce, Alone, Buckets, Exchange
from ddp.parallel.holdings import Holdings
from ddp.parallel.naming import naming
from ddp.parallel.placement import Placement
from ddp.parallel.planning.plan import Plan
from ddp.parallel.planning.planner import Planner
from ddp.parallel.planning.watch import DeviceWatch, HostWatch
from ddp.parallel.replaying import Replayed
from ddp.parallel.timeline import Step, Timeline
from ddp.parallel.wishes import Wishes

# Ranks make their models in the same order, and where one backward passes through several of them, go by it: how the
# graph comes to them may differ from rank to rank, and what they do at the end of backward are calls that wait.
_turns = itertools.count()


class Reducer:
    """The watcher of a model's leaves: see `ddp._engine.GradReadyHook`.

    owner: the DataParallel whose reducer this is
    names, tensors: the parameters, in the model's order
    comm: a communicator on which nobody else calls
    plan: of the planner, to begin with
    finite: None: gradients are not looked at
    replaced: the released reducer of a wrapper that had the model before
    """

    def __init__(
        self,
        owner: Any,
        names: Sequence[str],
        tensors: Sequence[Tensor],
        comm: Communicator,
        planner: Planner,
        plan: Plan,
        timeline: Timeline,
        tripwire: Tripwire,
        finite: FiniteCheck | None,
        replaced: Reducer | None = None,
    ) -> None:
        self.owner = owner
        self.turn = next(_turns)
        self.sync = True
        self.steps = 0  # synchronized backwards that have ended
        self.names = names
        self.leaves = [tensor.leaf for tensor in tensors]
        self.comm = comm
        self.exchange: Exchange = Alone(comm) if comm.size == 1 else AllReduce(comm)
        self.before: list[Callable[[], None]] = []  # called before a synchronized backward launches anything
        self.timeline = timeline
        self.planner = planner
        self._tripwire = tripwire
        self._finite = finite
        self._xp = tensors[0].device.xp
        self._watch = (HostWatch if self._xp is np else DeviceWatch)(len(names), self._xp)
        self._index = {leaf: index for index, leaf in enumerate(self.leaves)}
        self._accumulation = accumulation.Accumulation()
        self._before: accumulation.Accumulation | None = None  # what it was before the backward that runs now
        self.running = False  # a backward of this model runs now
        self._taken = False  # the last backward reached a leaf
        self._under_way = False  # ranks are between launching something and having drawn all conclusions from it
        self._broken: BaseException | None = None
        self._used: Sequence[bool] = ()  # of the last synchronized backward
        self._replayed: Replayed | None = None  # the captured backward whose message was sent last
        self._holdings = Holdings(self.leaves, tensors)
        self._missing: list[int] = []  # for each bucket: how many of its gradients are not there yet
        self._launched = 0
        self._complete: list[int] = []  # when each bucket was complete, ns
        self._started = 0  # when backward began, ns
        self.wishes = Wishes()  # several models may share one
        self.forward: tuple[int, int] | None = None  # when the last forward began and ended, ns
        if replaced is not None:  # what was added up and not reduced, or reduced, goes on counting as that
            self._accumulation = replaced._accumulation
            reduced = dict(zip(replaced.leaves, replaced._holdings.reduced, strict=True))
            own = self._holdings.reduced
            self._holdings.reduced = [reduced.get(leaf, mine) for leaf, mine in zip(self.leaves, own, strict=True)]
        for leaf in self.leaves:
            leaf.ready_hook = self
            if leaf.grad_buffer.withheld is not None:  # a ZeroOptimizer of the wrapper before had it in parts
                leaf.grad_buffer.clear()
        self._move(plan)

    @property
    def buckets(self) -> Buckets:
        """What is reduced together, and where it lies."""
        return self._placement.buckets

    def set_exchange(self, exchange: Exchange) -> None:
        """Has buckets reduced by this exchange from now on. Collective."""
        self.exchange = exchange
        exchange.follow(self.buckets)

    def begin(self, leaves: Sequence[Leaf]) -> None:
        """A backward starts that will reach these leaves: the ranks are told, the others' slots are ready at once.

        Raises: ParallelError if an earlier one failed half-way or is still running, or its weight fits no other.
        """
        self._raise_if_broken()
        if self.running:
            raise ParallelError(
                "a backward of this model was started while another one runs, from a hook or a second thread: the "
                "buckets of the first are already under way"
            )
        self.running = self._taken = True
        if self._replayed is not None:
            self._replayed.hear()
        if capturing.now is not None:
            self._prepare(capturing.now)
        self._before = self._accumulation
        reached = {self._index[leaf] for leaf in leaves}
        self._holdings.begin(reached)
        self._accumulate(reaches=bool(reached))
        if self.sync:
            for each in self.before:
                each()
            used = [index in reached or self._holdings.has(index) for index in range(len(self.leaves))]
            self._used = used
            self._start(reached, used, self._accumulation.weight)

    def ready(self, leaf: Leaf) -> None:
        """The leaf's gradient is complete in its slot."""
        if not self.sync:
            return
        index = self._index[leaf]
        self._watch.ready(index)
        bucket = self._placement.bucket_of[index]
        if bucket is not None:
            self._missing[bucket] -= 1
            assert self._missing[bucket] >= 0
            if self._missing[bucket] == 0:
                self._complete[bucket] = monotonic_ns()
                self._launch()
        self.exchange.poll()

    def end(self) -> None:
        """Waits for the buckets; afterwards every slot holds the mean, or is empty where no rank used it."""
        if not self.sync:
            self.running = False
            if capturing.now is not None:
                self._keep_count(capturing.now)
            return
        computed = monotonic_ns()
        self._watch.end()
        assert self._launched == len(self.buckets.members)
        with naming(f"backward {self.steps}"):
            first = self.buckets.words(0) if self.buckets.members else "any bucket"
            with naming(f"the control message, before {first}"):
                self._control.wait()
            self.exchange.finish()
        self.running = False
        self.wishes.hear(self._control.wishes())
        self._note(computed)
        weight, given = self._accumulation.weight, self._control.given
        self._accumulation = self._before = accumulation.Accumulation()
        try:
            self._check(weight is not None, given)
        except ParallelError:  # every rank raises it: they still agree
            self._under_way = False
            raise
        used = self._control.used()
        for index in self._holdings.aside:
            if used[index]:
                self._placement.take_back(index)
        self._reduce_unplaced(used)
        for index, by_any in enumerate(used):
            self._holdings.end(index, by_any)
        if capturing.now is not None:
            self._captured(capturing.now, weight)
            return
        self.steps += 1
        process_recorder().count_backwards(self.steps)
        plan = self.planner.after(self._watch.seconds(), self._watch.backward(), used)
        if plan is not None:
            self._move(plan)
        self._under_way = False

    def abandon(self, error: BaseException) -> None:
        """Backward raised: if something was launched it cannot be taken back, and the rest will not come.

        Else, or with no other rank, it does not count, and the backwards before it still do.
        """
        # What is only captured has not begun.
        if self._under_way and self._broken is None and self.comm.size > 1 and capturing.now is None:
            self._broken = error
        self._under_way = False
        if self._before is not None:
            self._accumulation, self._before = self._before, None
        self.running = False

    def _prepare(self, graph: Any) -> None:
        """A backward begins that goes into a CUDA graph: what it begins with, and is to be again if nothing becomes."""
        accumulation, reduced = self._accumulation, self._holdings.reduced
        graph.fix(lambda: (self.sync, self._accumulation))
        graph.undo(lambda: self._put_back(accumulation, reduced))

    def _put_back(self, accumulation: accumulation.Accumulation, reduced: list[bool]) -> None:
        self._accumulation, self._holdings.reduced = accumulation, reduced
        self.running = self._under_way = False

    def _keep_count(self, graph: Any) -> None:
        """After each launch, what this backward has added up counts as it does now."""
        count = self._accumulation
        graph.after(lambda: setattr(self, "_accumulation", count))

    def _captured(self, graph: Any, weight: float | None) -> None:
        """This backward goes into a CUDA graph: what is left to do for every launch."""
        arguments = self._control, weight, self._used, self.names, self.wishes
        replayed = Replayed(self.comm, *arguments, self._count_replay)

        def before() -> None:
            self._raise_if_broken()
            if self._replayed is not None and self._replayed is not replayed:
                self._replayed.hear()
            self._replayed = replayed
            replayed.before()

        buckets = self.buckets
        graph.fix(lambda: self.buckets is buckets)
        graph.before(before)
        graph.after(replayed.after)
        graph.keep(buckets)
        self._keep_count(graph)
        self._under_way = False

    def _count_replay(self) -> int:
        self.steps += 1
        return self.steps

    @contextlib.contextmanager
    def taking_part(self) -> Iterator[None]:
        """Joins the other ranks' backward with zeros if the one that runs inside reaches no leaf on this rank."""
        self._taken = False
        yield
        if not self._taken:
            try:
                self.begin([])
                self.end()
            except BaseException as error:
                self.abandon(error)
                raise

    def shadow(self, weight: float) -> None:
        """Takes part in a backward of the others without a gradient of this rank's own. weight: how much that counts"""
        self._raise_if_broken()
        self._holdings.begin(set())
        for index, leaf in enumerate(self.leaves):
            if self._holdings.has(index):
                leaf.grad_buffer.clear()
        self._accumulation = accumulation.Accumulation()
        self._tripwire.forget()
        try:
            self._start(set(), [False] * len(self.leaves), weight, absent=True)
            self._tripwire.forget()
            self.end()
        except BaseException as error:
            self.abandon(error)
            raise

    @property
    def accumulating(self) -> bool:
        """Whether slots hold gradients that a later backward is to reduce."""
        return self._accumulation.reached and self._holdings.any()

    def put_plan(self, state: Mapping[str, Any]) -> None:
        """Goes on with the buckets, and the planning, that `planner.state` told. Collective."""
        before = self.planner.plan
        plan = self.planner.restore(state)
        if plan.buckets != before.buckets:
            self._move(plan)

    def release(self) -> None:
        """Lets go of the leaves: their gradients stay, in memory of their own, and are reduced no more."""
        for leaf in self.leaves:
            leaf.ready_hook = None
            leaf.grad_buffer.unbind()

    def _raise_if_broken(self) -> None:
        if self._broken is not None:
            raise ParallelError(
                f"an earlier backward failed half-way on this rank ({type(self._broken).__name__}: {self._broken}), so "
                "ranks no longer agree on what was reduced: start again from a checkpoint"
            )

    def _accumulate(self, reaches: bool) -> None:
        given = accumulation.given()
        self._accumulation = self._accumulation.add(given, reaches=reaches, empty=not self._holdings.any())
        mean = self._holdings.first_mean()
        if given is not None and mean is not None:
            raise ParallelError(
                f"backward with a weight would add to {self.names[mean]}.grad, which is already a mean over ranks: "
                "call zero_grad() before it, or accumulate inside no_sync()"
            )

    def _start(self, reached: set[int], used: Sequence[bool], weight: float | None, absent: bool = False) -> None:
        buckets = self.buckets
        self._started = monotonic_ns()
        self._watch.begin()
        self._placement.leave_out(self._holdings.aside)
        checksum = NO_CHECKSUM if capturing.now is not None else self._tripwire.checksum(self.steps)
        self._missing = self._placement.missing(reached)
        self._launched, self._complete = 0, [self._started] * len(buckets.members)
        if self._finite is not None:
            self._finite.begin()
        self._under_way = True
        self._control.send(weight, used, checksum, self.timeline.marks(), absent, self.wishes.mine)
        self.exchange.begin(self._control)
        self._launch()

    def _launch(self) -> None:
        buckets = self.buckets
        while self._launched < len(buckets.members) and self._missing[self._launched] == 0:
            bucket = self._launched
            for at in buckets.members[bucket]:
                if not self._holdings.has(self._placement.placed[at]):
                    buckets.memory.views[at][...] = 0  # nothing from this rank; others may have something
                elif self._finite is not None:
                    self._finite.look(self._placement.placed[at], buckets.memory.views[at], self._xp)
            self.exchange.launch(bucket)
            self._launched += 1

    def _note(self, computed: int) -> None:
        self.timeline.hear(self._control.marks())
        step = Step(
            number=self.steps,
            forward=self.forward,
            begun=self._started,
            computed=computed,
            ended=monotonic_ns(),
            control=self._control.times(),
            ready=self._complete,
            times=self.exchange.times(),
        )
        self.timeline.add(step)
        self.forward = None

    def _check(self, weighed: bool, given: bool) -> None:
        """What the ranks told each other. Raises: ParallelError, on every rank alike."""
        active = self.comm.size - self._control.absent_ranks()
        weighted = self._control.weighted_ranks()
        if weighted not in (0, active):
            call = "model.backward(loss, weight=...)" if weighed else "loss.backward()"
            mine = f"rank {self.comm.rank} called {call}, but " if given or weighed else ""
            raise ParallelError(f"{mine}{weighted} of {active} ranks gave a weight: all ranks must call the same one")
        self._tripwire.compare(self._control.checksums())
        if self._finite is not None:
            for index in self._placement.outside():
                if self._holdings.has(index):
                    self._finite.look(index, self.leaves[index].grad_buffer.array, self._xp)
            self._finite.finish(self.steps)

    def _reduce_unplaced(self, used: Sequence[bool]) -> None:
        """Reduces what some rank used and no bucket holds: it gets a place in the next plan."""
        for index in self._placement.outside():
            if used[index]:
                leaf = self.leaves[index]
                if not self._holdings.has(index):
                    leaf.grad_buffer.set(self._xp.zeros(leaf.shape, leaf.dtype))
                buffer = leaf.grad_buffer.array
                with naming(f"backward {self.steps}: {self.names[index]}, which was frozen before"):
                    self.comm.all_reduce(buffer, ReduceOp.SUM, scale=self._control.scale(), out=buffer)

    def _move(self, plan: Plan) -> None:
        """Lays out the plan's buckets, and moves gradients there. Collective."""
        self._placement = Placement(plan, self.names, self.leaves, self.comm)
        self.timeline.follow(self.buckets)
        self._control = ControlMessage(self.comm, len(self.leaves), self.timeline.width)
        self.exchange.follow(self.buckets)
