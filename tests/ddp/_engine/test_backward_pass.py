"""The engine: order, ownership, freeing, versions, modes. Leaves are followed by a watcher that records."""

from __future__ import annotations

import gc
import threading
import weakref
from collections.abc import Sequence
from typing import Any

import numpy as np
import pytest

import ddp
from ddp._engine import GradBuffer, Leaf
from ddp.errors import DtypeError, GraphError, GraphFreedError, ShapeError, VersionError


def leaf(*values: float, dtype: Any = ddp.float64) -> ddp.Tensor:
    return ddp.tensor(values, dtype=dtype, requires_grad=True)


class Recorder:
    """A watcher that writes down what it is told, with leaves by name."""

    order = 0

    def __init__(self, **leaves: ddp.Tensor) -> None:
        self.names = {x.leaf: name for name, x in leaves.items()}
        self.calls: list[Any] = []
        for x in leaves.values():
            x.leaf.ready_hook = self

    def begin(self, leaves: Sequence[Leaf]) -> None:
        self.calls.append(("begin", sorted(self.names[end] for end in leaves)))

    def ready(self, leaf: Leaf) -> None:
        self.calls.append(
            ("ready", self.names[leaf], leaf.grad_buffer.array.tolist() if leaf.grad_buffer.full else None)
        )

    def end(self) -> None:
        self.calls.append("end")

    def abandon(self, error: BaseException) -> None:
        self.calls.append(("abandon", str(error)))


class TestOrder:
    def test_last_layers_become_ready_first(self) -> None:
        w = {f"w{i}": leaf(2.0) for i in range(4)}
        recorder = Recorder(**w)
        y = ddp.ones(1, dtype=ddp.float64)
        for each in w.values():
            y = y * each
        y.backward()
        ready = [("ready", f"w{i}", [8.0]) for i in (3, 2, 1, 0)]
        assert recorder.calls == [("begin", ["w0", "w1", "w2", "w3"]), *ready, "end"]

    def test_a_shared_leaf_is_ready_once_at_its_last_use(self) -> None:
        tied, other = leaf(3.0), leaf(5.0)
        recorder = Recorder(tied=tied, other=other)
        (tied * other * tied).backward()
        assert recorder.calls == [
            ("begin", ["other", "tied"]),
            ("ready", "tied", [30.0]),
            ("ready", "other", [9.0]),
            "end",
        ]

    def test_an_error_abandons(self) -> None:
        x = leaf(2.0)
        y = ddp.tensor([3.0], dtype=ddp.float64)
        recorder = Recorder(x=x)
        z = x * y
        y.add_(1)
        with pytest.raises(VersionError):
            z.backward()
        kind, message = recorder.calls[-1]
        assert kind == "abandon"
        assert "version" in message

    def test_a_watcher_that_raises_in_begin_is_abandoned_and_the_later_ones_are_left_alone(self) -> None:
        a, b = leaf(2.0), leaf(3.0)
        first = Recorder(a=a)
        second = Recorder(b=b)

        def fail(leaves: Sequence[Leaf]) -> None:
            raise ConnectionError("no peer")

        for recorder in (first, second):
            recorder.begin = fail
        with pytest.raises(ConnectionError):
            (a * b).backward()
        assert sorted([first.calls, second.calls]) == [[], [("abandon", "no peer")]]

    def test_a_use_that_gives_no_gradient_still_counts(self) -> None:
        from ddp._tensor.base import apply
        from ddp.ops import OPS, Op

        silent = Op("silent", lambda xp, x: (x.copy(), None), lambda *args: (None,), inputs=("x",))
        try:
            a, b = leaf(2.0), leaf(2.0)
            recorder = Recorder(a=a, b=b)
            (a * 3 + apply(silent, (apply(silent, (a * b,)),))).backward()
        finally:
            del OPS["silent"]
        assert recorder.calls[0] == ("begin", ["a", "b"])
        assert sorted(recorder.calls[1:3]) == [("ready", "a", [3.0]), ("ready", "b", None)]


class TestAccumulation:
    def test_a_shared_gradient_array_is_not_written_to(self) -> None:
        # add hands one array to both inputs; h's second gradient must not be added into x's first.
        x, h = leaf(1.0, 1.0), leaf(1.0, 1.0)
        y = h * 1
        (x + y + (y * 3)).sum().backward()
        assert x.grad.tolist() == [1.0, 1.0]
        assert h.grad.tolist() == [4.0, 4.0]

    def test_the_callers_gradient_is_copied(self) -> None:
        x = leaf(1.0, 2.0)
        seed = ddp.tensor([1.0, 1.0], dtype=ddp.float64)
        x.backward(seed)
        x.backward(seed)
        assert seed.tolist() == [1.0, 1.0]
        assert x.grad.tolist() == [2.0, 2.0]

    def test_a_frozen_input_costs_no_memory(self) -> None:
        x = leaf(1.0, 2.0)
        frozen = ddp.tensor([3.0, 4.0], dtype=ddp.float64)
        node = (x * frozen).edge
        saved = dict(zip(node.op.saves, node.saved, strict=True))
        assert saved["x"] is None
        assert saved["y"] is frozen.array


class TestSlot:
    def slot(self) -> GradBuffer:
        return GradBuffer((2,), np.dtype("float32"), np)

    def test_bind_moves_a_live_gradient(self) -> None:
        slot = self.slot()
        memory = np.zeros(4, np.float32)
        slot.accumulate(np.ones(2, np.float32))
        slot.bind(memory[1:3])
        assert memory.tolist() == [0.0, 1.0, 1.0, 0.0]
        slot.accumulate(np.ones(2, np.float32))
        assert memory.tolist() == [0.0, 2.0, 2.0, 0.0]

    def test_grad_of_a_bound_leaf_is_the_memory(self) -> None:
        x = ddp.ones(2, requires_grad=True)
        memory = np.zeros(5, np.float32)
        x.leaf.grad_buffer.bind(memory[3:])
        (x * 3).sum().backward()
        assert memory.tolist() == [0.0, 0.0, 0.0, 3.0, 3.0]
        assert np.shares_memory(x.grad.array, memory)
        assert x.grad is x.grad


def chain(length: int) -> tuple[ddp.Tensor, ddp.Tensor]:
    x = y = leaf(1.0)
    for _ in range(length):
        y = y * 1.0
    return x, y


class TestFreeing:
    def test_a_long_chain_runs_and_is_freed(self) -> None:
        x, y = chain(50_000)
        y.backward(retain_graph=True)
        assert x.grad.tolist() == [1.0]
        first = weakref.ref(y.edge)
        del y
        assert first() is None

    def test_memory_falls_while_backward_runs(self) -> None:
        x = leaf(1.0, 2.0)
        alive: list[bool] = []
        first = x.exp()
        saved = weakref.ref(first.array)

        class Watching(Recorder):
            def ready(self, leaf: Leaf) -> None:
                alive.append(saved() is not None)

        Watching(x=x)
        y = first.exp().sum()
        del first
        y.backward()
        assert alive == [False]

    def test_no_cycles(self) -> None:
        gc.collect()
        gc.disable()
        try:
            x = leaf(1.0, 2.0)
            y = (x * 2).exp().relu()
            z = y.reshape(2, 1).sum()
            watched = [weakref.ref(o) for o in (x, y, z, y.edge, z.edge, x.leaf, y.array)]
            z.backward()
            g = weakref.ref(x.grad)
            del x, y, z
            assert [ref() for ref in (*watched, g)] == [None] * 8
            model = ddp.nn.Sequential(ddp.nn.Linear(3, 4), ddp.nn.ReLU(), ddp.nn.Linear(4, 2))
            optimizer = ddp.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
            model(ddp.randn(5, 3)).sum().backward()
            optimizer.step()
            watched = [weakref.ref(p) for p in model.parameters()]
            del model, optimizer
            assert [ref() for ref in watched] == [None] * 4
            assert gc.collect() == 0
        finally:
            gc.enable()

    def test_a_second_backward_says_what_to_do(self) -> None:
        x = leaf(1.0)
        y = (x * x).exp()
        y.backward()
        with pytest.raises(GraphFreedError, match=r"exp: .*retain_graph=True"):
            y.backward()


class TestWrongUse:
    def test_nothing_requires_grad(self) -> None:
        with pytest.raises(GraphError, match="does not require grad"):
            ddp.ones(1).backward()

    def test_a_seed_is_needed_or_does_not_fit(self) -> None:
        x = leaf(1.0, 2.0)
        with pytest.raises(ShapeError, match=r"shape \(2,\) needs a gradient"):
            (x * 2).backward()
        with pytest.raises(ShapeError, match=r"\(3,\)"):
            (x * 2).backward(ddp.ones(3))
        with pytest.raises(DtypeError, match="expected a tensor or None as the gradient, got ndarray"):
            (x * 2).backward(np.ones(2))


class TestVersions:
    def test_views_share_the_counter(self) -> None:
        x = leaf(1.0, 2.0)
        w = ddp.zeros((2, 2), dtype=ddp.float64)
        y = x * w[0]
        w.reshape(4)[0:1].fill_(1)
        with pytest.raises(VersionError):
            y.sum().backward()

    def test_an_optimizer_step_between_forward_and_backward(self) -> None:
        p, x = leaf(2.0), leaf(1.0)
        y = p * x
        p.grad = ddp.ones(1, dtype=ddp.float64)
        ddp.optim.SGD([p], lr=0.1).step()
        with pytest.raises(VersionError):
            y.backward()


class TestModes:
    def test_scopes_nest_and_are_restored_after_an_error(self) -> None:
        scopes: list[tuple[Any, bool]] = [(ddp.no_grad, False), (ddp.enable_grad, True)]
        scopes += [(lambda: ddp.set_grad_enabled(False), False), (lambda: ddp.set_grad_enabled(True), True)]
        for scope, inside in scopes:
            seen = []

            def fail(scope: Any = scope, seen: list[bool] = seen) -> None:
                with ddp.no_grad(), scope():
                    seen.append(ddp.is_grad_enabled())
                    raise KeyError

            with pytest.raises(KeyError):
                fail()
            assert seen == [inside]
            assert ddp.is_grad_enabled()

    @pytest.mark.parametrize("decorate", [ddp.no_grad, lambda: ddp.set_grad_enabled(False)])
    def test_decorators(self, decorate: Any) -> None:
        @decorate()
        def run(fail: bool) -> bool:
            """What it does."""
            if fail:
                raise KeyError
            return ddp.is_grad_enabled()

        assert run.__doc__ == "What it does."
        assert run(False) is False
        with pytest.raises(KeyError):
            run(True)
        assert ddp.is_grad_enabled()

    def test_modes_are_per_thread(self) -> None:
        seen: list[bool] = []
        with ddp.no_grad():
            thread = threading.Thread(target=lambda: seen.append(ddp.is_grad_enabled()))
            thread.start()
            thread.join(timeout=10)
        assert seen == [True]

    def test_threads_run_backward_at_once(self) -> None:
        results: dict[int, list[float]] = {}

        def work(i: int) -> None:
            x = leaf(float(i))
            for _ in range(15):
                x.grad = None
                y = x
                for _ in range(20):
                    y = y * 1.0 + x
                y.sum().backward()
            results[i] = x.grad.tolist()

        threads = [threading.Thread(target=work, args=(i,)) for i in range(3)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join(timeout=30)
        assert results == {i: [21.0] for i in range(3)}


def test_a_gradient_that_somebody_holds_is_not_overwritten() -> None:
    x = leaf(1.0, 2.0)
    (x * 2).sum().backward()
    held = x.grad
    x.grad = None
    (x * 3).backward(held)
    assert held is not None
    assert held.tolist() == [2.0, 2.0]
    assert x.grad.tolist() == [6.0, 6.0]
