"""`DataLoader`: batches of a dataset, one pass after the other, that can be resumed in the middle of a pass."""

from __future__ import annotations

import functools
import threading
from collections.abc import Callable, Iterable, Iterator, Mapping
from typing import TYPE_CHECKING, Any

import numpy as np

from ddp._device import CPU, BaseGenerator, generator
from ddp.data import device_prefetcher
from ddp.data.collate import default_collate, default_convert
from ddp.data.datasets import IterableDataset
from ddp.data.fetching import FetchConfig, mix_seed
from ddp.data.passes import IndexTasks, LocalBatches, State, StreamTasks, WorkerBatches, check_streams
from ddp.data.samplers import BatchSampler, RandomSampler, Sampler, SequentialSampler
from ddp.errors import ArgumentError, StateDictError

if TYPE_CHECKING:
    from ddp.data.shared_memory import Payload
    from ddp.data.worker_pool import WorkerPool

Batches = LocalBatches | WorkerBatches

_PREFETCH = 2  # tasks ahead of each worker


class DataLoader:
    """Batches of a dataset: `for x, y in DataLoader(dataset, batch_size=32, shuffle=True, num_workers=2)`.

    dataset: a Dataset, or anything with `__getitem__` and `__len__`; or an IterableDataset
    batch_size: samples a batch; None: samples as they are, one by one
    shuffle: in random order, anew in each pass
    sampler: indices in the order in which they are read, e.g. a DistributedSampler
    batch_sampler: lists of indices, instead of batch_size, shuffle, sampler and drop_last
    num_workers: processes that fetch; 0: this one does. The batches, and their order, are the same for any number
    collate_fn: makes a batch of a list of samples; None: `default_collate`, or `default_convert` without batches
    pin_memory: batches are copied to the GPU while the step before runs, through pinned memory, and handed out there
    drop_last: leave out the last batch if it is shorter
    timeout: seconds that a batch of a worker may take; 0: as long as it takes
    worker_init_fn: called as `worker_init_fn(worker_id)` in each worker when it starts
    multiprocessing_context: "forkserver", "spawn", or a context of `multiprocessing` of these names: workers are forked
    from a small server, which all loaders of this process share
    generator: where the loader's seed, and that of `shuffle`, is drawn; None: this thread's stream
    prefetch_factor: batches that each worker has ahead; None: 2
    persistent_workers: workers stay for the next pass, with the dataset as they have it
    pin_memory_device: which GPU; "": the current one
    in_order: accepted; batches always come in order

    Every `iter` is one pass. `epoch` counts the passes that were completed: those of which all batches were handed out.

    Raises: ArgumentError for arguments that exclude each other.
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
        check_sampling(self._stream, batch_size, shuffle, sampler, batch_sampler, drop_last)
        check_workers(num_workers, timeout, prefetch_factor, persistent_workers)
        check_context(multiprocessing_context)
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
            batch_size, drop_last = None, False
        elif not self._stream and sampler is None:
            sampler = RandomSampler(dataset, generator=generator) if shuffle else SequentialSampler(dataset)
        self.batch_size = batch_size
        self.drop_last = drop_last
        self.sampler: Any = sampler
        self.batch_sampler: Any = batch_sampler
        if batch_size is not None and sampler is not None:
            self.batch_sampler = BatchSampler(sampler, batch_size, drop_last)
        self._batched = batch_size is not None or batch_sampler is not None
        self.collate_fn = collate_fn or (default_collate if self._batched else default_convert)
        self._pool: WorkerPool | None = None  # of persistent workers
        self._payload: Payload | None = None
        self.epoch = 0  # passes completed, those before a state that was loaded among them
        self._batches = 0  # handed out in the pass under way
        self._seed: int | None = None  # what random numbers of batches come from
        self._streams: Any = None  # where the next pass over a stream goes on
        self._current: Batches | None = None  # of the pass that counts now
        self._left: Any = None  # the state of a pass that was left early
        self._loaded = False
        if num_workers:
            # A loader without workers need not wait for these imports.
            from ddp.data import fork_server

            self._modules = fork_server.modules_of(worker_init_fn, self.collate_fn, type(dataset))
            fork_server.fork_server(self._modules)  # it is ready by the time that workers are wanted

    def _order(self) -> Any:
        """What yields the indices of a batch after those of another: None for a stream."""
        return self.sampler if self.batch_sampler is None else self.batch_sampler

    def __len__(self) -> int:
        """Batches of a whole pass. Raises: TypeError if the sampler, or an IterableDataset, has no length."""
        if self._stream:
            samples = len(self.dataset)
            if self.batch_size is None:
                return samples
            return samples // self.batch_size if self.drop_last else -(-samples // self.batch_size)
        return len(self._order())

    def __iter__(self) -> Iterator[Any]:
        if self._current is not None:
            self._leave(self._current)
        if not self._loaded:
            self._batches, self._streams = 0, None
        self._loaded, self._left = False, None
        try:
            return _Pass(self)
        except BaseException:
            self._pool = None  # a worker that stayed has died meanwhile: the next pass has new ones
            raise

    def state_dict(self) -> State:
        """The position after the batches that were handed out, whatever workers have fetched ahead, as JSON values.

        epoch: passes completed; batches: handed out in the pass under way; seed: what random numbers of batches come
        from; sampler: the state of sampler or batch_sampler, None if it has none; streams: of an IterableDataset
        """
        state: State = {"epoch": self.epoch, "batches": self._batches, "seed": self._seed}
        inner = self._current.tasks.position if self._current is not None else self._left
        if self._stream:
            return {**state, "streams": self._streams if inner is None else inner}
        if inner is None and hasattr(self._order(), "state_dict"):
            inner = self._order().state_dict()
        return {**state, "sampler": inner}

    def load_state_dict(self, state_dict: Mapping[str, Any]) -> None:
        """The next `iter` goes on with the batch after that position.

        Raises: StateDictError for a state of another kind of loader, or of another sampler or dataset.
        """
        state, wanted = state_dict, "streams" if self._stream else "sampler"
        if not isinstance(state, Mapping) or wanted not in state:
            found = sorted(state) if isinstance(state, Mapping) else state
            raise StateDictError(f"DataLoader: the state has {found!r}, expected {wanted!r} among them")
        for name in ("epoch", "batches", "seed"):
            value = state.get(name)
            if (type(value) is not int or value < 0) and not (name == "seed" and value is None):
                raise StateDictError(f"DataLoader: the state has {name} {value!r}, expected a number of at least 0")
        inner = state[wanted]
        if self._stream:
            if inner is not None:
                check_streams(inner, max(1, self.num_workers))
            self._streams = inner
        elif (inner is None) == hasattr(self._order(), "state_dict"):
            has = ("none", "one") if inner is None else ("one", "none")
            raise StateDictError(f"DataLoader: the state has {has[0]} of a sampler, this loader's sampler has {has[1]}")
        elif inner is not None:
            self._order().load_state_dict(inner)
        self.epoch, self._batches, self._seed = state["epoch"], state["batches"], state.get("seed")
        self._loaded, self._current, self._left = True, None, None

    def _complete(self, source: Batches) -> None:
        """Counts a pass that came to its end."""
        if self._current is source:
            self.epoch += 1
            self._batches, self._streams, self._current = 0, None, None

    def _leave(self, source: Batches, failed: bool = False) -> None:
        """Ends a pass early. It counts as complete if all of it was handed out."""
        if self._current is not source:
            return
        if source.tasks.leave(failed):
            self._complete(source)
        else:
            self._left, self._current = source.tasks.position, None

    def _start_pass(self) -> Batches:
        """The batches of a pass that begins where a loaded state says."""
        if self._seed is None:
            self._seed = int(generator(CPU, self.generator).integers(2**63))
        # Ranks that were seeded alike draw for different batches: their position in the world tells these apart.
        holder = self.sampler if hasattr(self.sampler, "rank") else getattr(self.batch_sampler, "sampler", None)
        seed = functools.partial(mix_seed, self._seed, self.epoch, int(getattr(holder, "rank", 0)))
        size = None if not self._batched else self.batch_size or 1
        config = FetchConfig(self.dataset, self.collate_fn, self.worker_init_fn, self._stream, size, self.drop_last)
        pool = self._workers(config) if self.num_workers else None
        tasks: IndexTasks | StreamTasks
        if self._stream:
            tasks = StreamTasks(max(1, self.num_workers), self._streams)
        else:
            tasks = IndexTasks(self._order(), self._batches)
        if pool is None:
            self._current = LocalBatches(config, tasks, seed)
        else:
            self._current = WorkerBatches(pool, tasks, seed, self.prefetch_factor or _PREFETCH)
        return self._current

    def _workers(self, config: FetchConfig) -> WorkerPool:
        """The workers of a pass."""
        if self._pool is not None:
            return self._pool
        from ddp.data.shared_memory import Payload
        from ddp.data.worker_pool import WorkerPool

        previous, self._payload = self._payload, Payload(config)
        pool = WorkerPool(self._payload, previous, self._modules, self.num_workers, self.timeout)
        if self.persistent_workers:
            self._pool = pool
        return pool


class _Pass(Iterator[Any]):
    """One pass of a loader, as its user sees it. It ends its workers when it is over, fails or is dropped."""

    def __init__(self, loader: DataLoader) -> None:
        self._loader = loader
        self._source: Batches | None = None
        self._source = source = loader._start_pass()
        self._batches = device_prefetcher.prefetch_to_device(source, loader.pin_memory, loader.pin_memory_device)

    def __next__(self) -> Any:
        source, loader = self._source, self._loader
        if source is None:
            raise StopIteration
        if loader._pool is not None and loader._current is not source:
            raise ArgumentError("another iteration of this loader has begun since, and has its persistent workers")
        try:
            batch = next(self._batches)
        except StopIteration:
            loader._complete(source)
            self._end(source, keep=True)
            raise
        except BaseException:
            loader._leave(source, failed=True)
            self._end(source, keep=False)
            raise
        source.tasks.advance()
        if loader._current is source:
            loader._batches += 1
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


def check_sampling(
    stream: bool, batch_size: int | None, shuffle: Any, sampler: Any, batch_sampler: Any, drop_last: bool
) -> None:
    """Raises: ArgumentError for arguments that exclude each other."""
    if stream and (shuffle or sampler is not None or batch_sampler is not None):
        raise ArgumentError("an IterableDataset has an order of its own: no shuffle, sampler or batch_sampler with it")
    if sampler is not None and shuffle:
        raise ArgumentError("the sampler decides on the order: no shuffle with it")
    if batch_sampler is not None and (batch_size != 1 or shuffle or sampler is not None or drop_last):
        raise ArgumentError(
            "the batch_sampler decides on batches: no batch_size, shuffle, sampler or drop_last with it"
        )
    if batch_size is None and drop_last:
        raise ArgumentError("batch_size=None makes no batches: no drop_last with it")
    if batch_size is not None and not (_is_count(batch_size) and batch_size > 0):
        raise ArgumentError(f"batch_size should be a number above 0, is {batch_size!r}")


def check_workers(num_workers: int, timeout: float, prefetch_factor: int | None, persistent_workers: bool) -> None:
    """Raises: ArgumentError for values out of range, and for options of workers where there are none."""
    if not _is_count(num_workers):
        raise ArgumentError(f"num_workers should be a count, is {num_workers!r}")
    if not isinstance(timeout, (int, float, np.number)) or not 0 <= timeout <= threading.TIMEOUT_MAX:
        raise ArgumentError(f"timeout should be seconds, or 0, is {timeout!r}")
    if num_workers == 0 and (prefetch_factor is not None or persistent_workers or timeout):
        raise ArgumentError("prefetch_factor, persistent_workers and timeout are about workers, and num_workers is 0")
    if prefetch_factor is not None and not (_is_count(prefetch_factor) and prefetch_factor > 0):
        raise ArgumentError(f"prefetch_factor should be a number above 0, is {prefetch_factor!r}")


def _is_count(value: Any) -> bool:
    return isinstance(value, (int, np.integer)) and not isinstance(value, bool) and bool(value >= 0)


def check_context(context: Any) -> None:
    """Raises: ArgumentError for another `multiprocessing_context` than "forkserver" and "spawn"."""
    name = "forkserver" if context is None else context if isinstance(context, str) else context.get_start_method()
    if name == "fork":
        raise ArgumentError(
            "multiprocessing_context='fork' would copy a process that may hold MPI, CUDA and threads, which do not"
            " survive that; leave it out: workers are forked from a small server, which starts them as fast"
        )
    if name not in ("forkserver", "spawn"):
        raise ArgumentError(f"multiprocessing_context should be 'forkserver' or 'spawn', is {name!r}")
