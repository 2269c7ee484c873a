"""`DataLoader`: yields the batches of a dataset, pass after pass. It can be resumed in the middle of a pass."""

from __future__ import annotations

import functools
import itertools
import threading
import warnings
from collections.abc import Callable, Iterable, Iterator, Mapping
from typing import TYPE_CHECKING, Any

from collectives.flight.recorder import process_recorder
from ddp._device import CPU, BaseGenerator, generator
from ddp._tensor.dtypes import is_count
from ddp.data import device_prefetcher
from ddp.data.collate import default_collate, default_convert
from ddp.data.datasets import IterableDataset
from ddp.data.distributed_sampler import DistributedSampler
from ddp.data.fetching import FetchConfig, mix_seed
from ddp.data.passes import OF_BATCH, Batches, IndexBatches, LocalPool, State, StreamBatches, check_streams
from ddp.data.samplers import (
    BatchSampler,
    RandomSampler,
    Sampler,
    SequentialSampler,
    has_position,
    read_count,
)
from ddp.errors import ArgumentError, StateDictError
from ddp.parallel.micro_batches import begin_micro_batch

if TYPE_CHECKING:
    from ddp.data.shared_memory import Payload
    from ddp.data.worker_pool import WorkerPool

_PREFETCH = 2  # the default of prefetch_factor


class DataLoader:
    """Batches of a dataset: `for x, y in DataLoader(dataset, batch_size=32, shuffle=True, num_workers=2)`.

    dataset: a Dataset, or anything with `__getitem__` and `__len__`; or an IterableDataset
    batch_size: samples per batch; None: samples one by one, without batches
    shuffle: read the samples in random order, a new one in each pass
    sampler: indices in the order in which they are read, e.g. a DistributedSampler
    batch_sampler: lists of indices, instead of batch_size, shuffle, sampler and drop_last
    num_workers: number of processes that fetch; 0: this process does. If the dataset has an index, and draws random
    numbers from `ddp` only, the batches and their order do not depend on this number
    collate_fn: makes a batch of a list of samples; None: `default_collate`, or `default_convert` without batches
    pin_memory: return batches on the GPU; they are copied through pinned memory, while the previous step runs. Without
    a GPU it only causes a warning
    drop_last: leave out the last batch if it is shorter
    timeout: the longest wait for a batch from a worker, in seconds; 0: no limit
    worker_init_fn: called as `worker_init_fn(worker_id)` in each worker when it starts
    multiprocessing_context: "forkserver", "spawn", or a context of `multiprocessing` for one of these. In all cases
    workers are forked from a small server, which all loaders of this process share
    generator: draws the loader's seed, and that of `shuffle`; None: this thread's generator
    prefetch_factor: batches that each worker makes ahead; None: 2
    persistent_workers: workers stay for the next pass, with their copy of the dataset. Before each pass the dataset of
    this process is compared with that copy; if it has changed (by `dataset.set_epoch`, say), new workers start
    pin_memory_device: which GPU; "": the current one
    in_order: has no effect: batches always come in order

    Every `iter` is one pass. `epoch` counts the completed passes: those that handed out all their batches.

    Raises: ArgumentError for invalid arguments, and for arguments that exclude each other; DeviceError for a generator
    of a GPU (without `shuffle`, the first `iter` raises it); WorkerError if the server from which workers are forked
    cannot be started.
    """

    def __init__(
        self,
        dataset: Any,
        batch_size: int | None = 1,
        shuffle: bool | None = None,
        sampler: Sampler[Any] | Iterable[Any] | None = None,
        batch_sampler: Sampler[list[Any]] | Iterable[list[Any]] | None = None,
        num_workers: int = 0,
        collate_fn: Callable[[list[Any]], Any] | None = None,
        pin_memory: bool = False,
        drop_last: bool = False,
        timeout: float = 0,
        worker_init_fn: Callable[[int], None] | None = None,
        multiprocessing_context: Any = None,
        generator: BaseGenerator | None = None,
        *,
        prefetch_factor: int | None = None,
        persistent_workers: bool = False,
        pin_memory_device: str = "",
        in_order: bool = True,
    ) -> None:
        self._stream = isinstance(dataset, IterableDataset)
        ordered = bool(shuffle) or sampler is not None or batch_sampler is not None
        listed = batch_size != 1 or shuffle or sampler is not None or drop_last
        method = multiprocessing_context or "forkserver"
        method = method if isinstance(method, str) else method.get_start_method()
        of_workers = prefetch_factor is not None or persistent_workers or timeout
        unsized = not self._stream and sampler is None and batch_sampler is None and not hasattr(dataset, "__len__")
        name = type(dataset).__name__
        for wrong, why in (
            (
                unsized,
                f"a stream such as {name} goes into an IterableDataset whose __iter__ gives each worker its part",
            ),
            (self._stream and ordered, "an IterableDataset has its own order: no shuffle, sampler or batch_sampler"),
            (sampler is not None and shuffle, "the sampler decides on the order: no shuffle with it"),
            (batch_sampler is not None and listed, "no batch_size, shuffle, sampler or drop_last with a batch_sampler"),
            (batch_size is None and drop_last, "batch_size=None makes no batches: no drop_last with it"),
            (not (batch_size is None or is_count(batch_size, 1)), f"batch_size is {batch_size!r}, and not above 0"),
            (not is_count(num_workers), f"num_workers should be a count, is {num_workers!r}"),
            (not 0 <= timeout <= threading.TIMEOUT_MAX, f"timeout should be seconds, or 0, is {timeout!r}"),
            (not num_workers and of_workers, "prefetch_factor, persistent_workers and timeout need num_workers"),
            (prefetch_factor is not None and not is_count(prefetch_factor, 1), "prefetch_factor should be above 0"),
            (method == "fork", "multiprocessing_context='fork': MPI, CUDA and threads do not survive that"),
            (method not in ("fork", "forkserver", "spawn"), f"multiprocessing_context is {method!r}"),
        ):
            if wrong:
                raise ArgumentError(f"DataLoader: {why}")
        self.dataset = dataset
        self.num_workers = num_workers
        self.pin_memory = pin_memory
        self.pin_memory_device = pin_memory_device
        self.timeout = timeout
        self.worker_init_fn = worker_init_fn
        self.multiprocessing_context = multiprocessing_context
        self.generator = generator
        self.prefetch_factor = _PREFETCH if num_workers and prefetch_factor is None else prefetch_factor
        self.persistent_workers = persistent_workers
        self.in_order = in_order
        if batch_sampler is not None:
            batch_size = None
            drop_last = False
        elif not self._stream and sampler is None:
            sampler = RandomSampler(dataset, generator=generator) if shuffle else SequentialSampler(dataset)
        self.batch_size = batch_size
        self.drop_last = drop_last
        self.sampler: Any = sampler
        self.batch_sampler: Any = batch_sampler
        if batch_size is not None and sampler is not None:
            self.batch_sampler = BatchSampler(sampler, batch_size, drop_last)
        self._order: Any = self.sampler if self.batch_sampler is None else self.batch_sampler  # None for a stream
        self._size = None if batch_size is None and batch_sampler is None else batch_size or 1
        self.collate_fn = collate_fn or (default_convert if self._size is None else default_collate)
        self._pool: WorkerPool | None = None  # the persistent workers, once started
        self._payload: Payload | None = None
        self.epoch = 0  # passes completed, including those before a loaded state
        self._batches = 0  # the number handed out in this pass
        self._seed: int | None = None  # the seed of the batches' random numbers
        self._streams: State | None = None  # for an IterableDataset: the position after the last batch handed out
        self._began: tuple[State, int] | None = None  # where this `iter` began: sampler's state, batch number
        self._current: Batches | None = None  # of the present pass
        self._loaded = False
        if num_workers:
            # Imported here, since a loader without workers need not wait for it.
            from ddp.data import fork_server

            self._modules = fork_server.modules_of(worker_init_fn, self.collate_fn, type(dataset))
            fork_server.fork_server(self._modules)  # now, so that it is ready when workers are wanted

    def __len__(self) -> int:
        """The number of batches of a whole pass. Several workers of an IterableDataset may make more or fewer.

        Raises: TypeError if the sampler, or an IterableDataset, has no length.
        """
        if self._stream:
            samples = len(self.dataset)
            size = self.batch_size or 1
            return samples // size if self.drop_last else -(-samples // size)
        return len(self._order)

    def __iter__(self) -> Iterator[Any]:
        if self._current is not None:
            self._leave(self._current)
        if not self._loaded:
            self._batches = 0
            self._streams = None
        self._loaded = False
        self._began = None
        try:
            return _Pass(self)
        except BaseException:
            self._pool = None  # a persistent worker may have died meanwhile: the next pass starts new ones
            raise

    def state_dict(self) -> State:
        """The position, as JSON values: after the batches that were handed out, without those that were fetched ahead.

        epoch: passes completed; batches: handed out in the pass under way (with micro_batches: to all ranks, in whole
        steps); seed: of the random numbers of batches; sampler: the state of sampler or batch_sampler, None if
        it has none; streams: the positions of the processes that read an IterableDataset
        """
        batches = self._batches
        if (steps := self._steps()) is not None:
            batches = steps.batches_of(batches, all_ranks=True)
        state: State = {"epoch": self.epoch, "batches": batches, "seed": self._seed}
        if self._stream:
            return {**state, "streams": self._streams}
        order = self._order
        inner = None
        if self._began is not None:
            began, first = self._began
            inner = order.state_after(began, self._batches - first)
        elif has_position(order):
            inner = order.state_dict()
        return {**state, "sampler": inner}

    def load_state_dict(self, state_dict: Mapping[str, Any]) -> None:
        """Makes the next `iter` continue with the batch after the position in this state.

        Raises: StateDictError for a state of another kind of loader, or of another sampler or dataset; for an
        IterableDataset, also for a state of another number of workers.
        """
        state = state_dict
        wanted = "streams" if self._stream else "sampler"
        if not isinstance(state, Mapping) or wanted not in state:
            keys = list(state) if isinstance(state, Mapping) else state
            raise StateDictError(f"DataLoader: the state has {keys!r}, expected {wanted!r} among them")
        for name in ("epoch", "batches", *(["seed"] if state.get("seed") is not None else [])):
            read_count(self, state, name, 2**63)
        inner = state[wanted]
        order = self._order
        if self._stream:
            if inner is not None:
                check_streams(inner, max(1, self.num_workers))
            self._streams = inner
        elif has_position(order) != (inner is not None):
            has = "none" if inner is None else "one"
            raise StateDictError(f"DataLoader: the state has {has} of a sampler, unlike this loader")
        elif inner is not None:
            order.load_state_dict(inner)
        self.epoch = state["epoch"]
        self._batches = state["batches"]
        self._seed = state.get("seed")
        if (steps := self._steps()) is not None:
            self._batches = steps.batches_of(self._batches, all_ranks=False)
        self._loaded = True
        self._current = None
        self._began = None

    def _sampler_of_rank(self) -> Any:
        """`sampler` if it has a `rank` (a DistributedSampler does), else the `sampler` of `batch_sampler`, if any."""
        return self.sampler if hasattr(self.sampler, "rank") else getattr(self.batch_sampler, "sampler", None)

    def _steps(self) -> DistributedSampler | None:
        """The DistributedSampler, if it has micro_batches; otherwise None."""
        holder = self._sampler_of_rank()
        return holder if isinstance(holder, DistributedSampler) and holder.micro_batches_of_rank is not None else None

    def _complete(self, source: Batches) -> None:
        """Counts a pass that came to its end."""
        if self._current is source:
            if self._stream and self.drop_last and not self._batches:
                warnings.warn(
                    "DataLoader: this pass had no batch: drop_last=True, and the IterableDataset gave each process"
                    f" fewer than batch_size={self.batch_size} samples. Take a smaller batch_size, fewer workers or"
                    " drop_last=False",
                    stacklevel=3,
                )
            self.epoch += 1
            self._batches = 0
            self._streams = None
            self._current = None
            self._began = None

    def _leave(self, source: Batches, failed: bool = False) -> None:
        """Ends a pass early. With an indexed dataset, it counts as complete if all its batches were handed out."""
        if self._current is source:
            if source.leave(self._batches, failed):
                self._complete(source)
            self._current = None

    def _start_pass(self) -> Batches:
        """Starts a pass, at the position of a loaded state if there is one, and returns its batches."""
        steps = self._steps()
        if self._seed is None:
            # With micro_batches all ranks need the same seed, so they use the sampler's: their generators may differ.
            self._seed = steps.seed if steps else int(generator(CPU, self.generator).integers(2**63))
        # Ranks with the same seed need different random numbers: their rank is mixed in.
        holder = self._sampler_of_rank()
        position = 0 if steps else int(getattr(holder, "rank", 0))
        mixed = functools.partial(mix_seed, self._seed, self.epoch, position)

        def seed(of: int, number: int) -> int:
            return mixed(of, steps.number_of(number) if steps and of == OF_BATCH else number)

        config = FetchConfig(
            self.dataset, self.collate_fn, self.worker_init_fn, self._stream, self._size, self.drop_last
        )
        pool = self._workers(config) if self.num_workers else LocalPool(config)
        ahead = self.prefetch_factor or 0
        if self._stream:
            self._current = StreamBatches(pool, seed, ahead, self._streams)
            return self._current
        sampler = self._order
        first = self._batches
        order = iter(sampler)
        if has_position(sampler):
            self._began = sampler.state_dict(), first
        else:
            order = itertools.islice(order, first, None)
        self._current = IndexBatches(pool, seed, ahead, sampler, order, first)
        return self._current

    def _workers(self, config: FetchConfig) -> WorkerPool:
        """Returns the persistent workers if the configuration is unchanged or cannot be pickled, else new workers."""
        from ddp.data.shared_memory import Payload
        from ddp.data.worker_pool import WorkerPool

        try:
            payload = Payload(config)
        except ArgumentError as error:
            if self._pool is None:
                raise
            warnings.warn(f"{error}. The persistent workers keep the copy that they have", stacklevel=5)
            return self._pool
        unchanged = payload.share_memory_of(self._payload)
        if self._pool is not None:
            if unchanged:
                return self._pool
            self._pool.close()
        self._payload = payload
        pool = WorkerPool(payload, self._modules, self.num_workers, self.timeout)
        if self.persistent_workers:
            self._pool = pool
        return pool


def count_samples(batch: Any) -> int:
    """How many samples a batch has: the greatest length of a tensor or array in it; 1 if there is none.

    >>> count_samples({"x": ("a", np.zeros((3, 5))), "y": np.zeros(3)})
    3
    """
    if isinstance(batch, Mapping):
        batch = tuple(batch.values())
    if isinstance(batch, list | tuple):
        return max(map(count_samples, batch), default=1)
    return len(batch) if getattr(batch, "ndim", 0) else 1


class _Pass(Iterator[Any]):
    """One pass of a loader, as its user sees it.

    When it fails, it ends its workers. When it is over or dropped, it ends them unless they are persistent.
    """

    def __init__(self, loader: DataLoader) -> None:
        self._loader = loader
        self._source: Batches | None = None
        self._first = True  # nothing was handed out yet
        self._source = source = loader._start_pass()
        self._batches = device_prefetcher.prefetch_to_device(source, loader.pin_memory, loader.pin_memory_device)

    def __next__(self) -> Any:
        source = self._source
        loader = self._loader
        if source is None:
            raise StopIteration
        if loader._pool is not None and loader._current is not source:
            raise ArgumentError("another iteration of this loader has begun since, and has its persistent workers")
        try:
            batch, position = next(self._batches)
        except StopIteration:
            loader._complete(source)
            self._end(source, keep=True)
            raise
        except BaseException:
            loader._leave(source, failed=True)
            self._end(source, keep=False)
            raise
        if loader._current is source:
            loader._batches += 1
            loader._streams = position
            if loader._steps() is not None:
                begin_micro_batch(first=self._first)
            self._first = False
        process_recorder().add("samples", 1 if loader._size is None else count_samples(batch))
        return batch

    def __len__(self) -> int:
        return len(self._loader)

    def _end(self, source: Batches, keep: bool) -> None:
        self._source = None
        self._batches = iter(())
        if not keep:
            self._loader._pool = None
        if self._loader._pool is None:
            source.close()

    def __del__(self) -> None:
        source = self._source
        if source is not None:
            self._loader._leave(source)
            self._end(source, keep=True)
