"""One rank on a real GPU: `python on_gpu.py BACKEND TRANSPORT`, under an engine or alone. Ranks may share the GPU."""

from __future__ import annotations

import functools
import sys
from typing import Any

import cupy
import numpy as np

import collectives
import ddp
from ddp import nn
from ddp.parallel import DataParallel, comm_hooks
from tests.ddp.parallel.gpu.training import train, train_layers

DEVICE = "cuda:0"
SEEDS = 12
WAYS: dict[str, Any] = {
    "all-reduce": dict,
    "bf16": lambda: {"hook": lambda: comm_hooks.bf16},
    "low rank": lambda: {"hook": lambda: comm_hooks.PowerSGD(1, 1, min_compression_rate=0)},
    "top k": lambda: {"hook": lambda: comm_hooks.TopK(0.2)},
    "zero": lambda: {"zero": True},
}


def main() -> None:
    backend, over = sys.argv[1:]
    comm = collectives.init(backend, timeout=60)
    for way, options in WAYS.items():
        for seed in range(SEEDS if way == "all-reduce" else 2):
            with_stream(seed % 2 == 1, functools.partial(same, comm, train, seed, **options()))
        say(comm, f"{way}: the numbers of the CPU")
    same(comm, train_layers, 0)
    say(comm, "layers: the numbers of the CPU")
    if comm.size > 1:
        found = timed_backward(comm, cupy, DEVICE, layers=10, width=2048, rows=32768)
        assert found.over == over, found.over
        say(comm, str(found))
        # The first bucket is there long before the last layer's gradient.
        assert found.reduced[0] < found.computed, str(found)
        assert over != "NCCL" or found.ahead, "the host waited for the device inside backward"
    print(f"rank {comm.rank}: gradients kept")


def with_stream(own: bool, run: Any) -> None:
    """Runs it on the default stream, or on one of its own, which the default stream does not wait for."""
    if not own:
        run()
        return
    with cupy.cuda.Stream(non_blocking=True) as stream:
        run()
    stream.synchronize()


def same(comm: Any, program: Any, seed: int, **options: Any) -> None:
    """The program gives the numbers that as many ranks give on the CPU."""
    got = program(comm, DEVICE, seed, **options)
    expected = collectives.run_threads(lambda cpu: program(cpu, "cpu", seed, **options), comm.size)[comm.rank]
    assert got.keys() == expected.keys()
    for name in expected:
        np.testing.assert_allclose(got[name], expected[name], rtol=1e-7, atol=1e-9, err_msg=f"{name}, seed {seed}")


class Timed:
    """A backward by the device's clock, in ms after it began.

    over: the transport's name; computed: when the last gradient was there; started, reduced: of each bucket, on the
    communication stream; ahead: the host was through before the device was
    """

    def __init__(self, over: str, computed: float, started: list[float], reduced: list[float], ahead: bool) -> None:
        self.over, self.computed, self.started, self.reduced, self.ahead = over, computed, started, reduced, ahead

    def __str__(self) -> str:
        pairs = ", ".join(f"{a:.1f}-{b:.1f}" for a, b in zip(self.started, self.reduced, strict=True))
        host = "before" if self.ahead else "after"
        return f"{self.over}: computed {self.computed:.1f} ms, reduced {pairs}; the host was through {host} the device"


def timed_backward(comm: Any, xp: Any, device: str, layers: int, width: int, rows: int) -> Timed:
    """The sixth backward of a model, one bucket a layer."""
    net = nn.Sequential(*[nn.Linear(width, width, bias=False) for _ in range(layers)]).to(device)
    model: Any = DataParallel(net, comm, bucket_cap_mb=width * width * 4 / 2**20, check_every=0)
    x = ddp.from_numpy(np.random.default_rng(comm.rank).normal(size=(rows, width)).astype(np.float32)).to(device)
    started: list[Any] = []
    reduced: list[Any] = []
    computed: list[Any] = []

    def note(events: list[Any], stream: Any = None) -> None:
        events.append(xp.cuda.Event())
        events[-1].record(stream)

    for _ in range(5):
        (model(x) * model(x).detach()).sum().backward()
        model.zero_grad()
    device, watch = model.comm._device_communicator, model.reducer._timer
    made, ended = device._handoff, watch.end

    def timed(*things: Any) -> Any:
        handoff = made(*things)
        begin, end = handoff.begin, handoff.end

        def timed_begin(stream: Any) -> None:
            begin(stream)
            note(started, stream)

        def timed_end(*arguments: Any) -> None:
            note(reduced, handoff._comm)
            end(*arguments)

        handoff.begin, handoff.end = timed_begin, timed_end
        return handoff

    def timed_watch_end() -> None:
        ended()
        note(computed)

    device._handoff, watch.end = timed, timed_watch_end
    loss = (model(x) * model(x).detach()).sum()
    comm.barrier()
    begun: list[Any] = []
    note(begun)
    loss.backward()
    last = xp.cuda.Event()
    last.record()
    ahead = not last.done
    last.synchronize()
    from_begin = functools.partial(xp.cuda.get_elapsed_time, begun[0])
    return Timed(
        device._device_transport.name,
        from_begin(computed[0]),
        [from_begin(event) for event in started],
        [from_begin(event) for event in reduced],
        ahead,
    )


def say(comm: Any, what: str) -> None:
    if comm.rank == 0:
        print(what, flush=True)


if __name__ == "__main__":
    main()
