"""`DataLoader`: batches of a dataset, one pass after the other, that can be gone on with in the middle of one."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping
from typing import TYPE_CHECKING, Any

from ddp._device import CPU, Stream, generator
from ddp.data.batches import BatchSampler
from ddp.data.collating import default_collate, default_convert
from ddp.data.datasets import IterableDataset
from ddp.data.loading import _pinning, _script
from ddp.data.loading._arguments import check_sampling, check_working, start_method
from ddp.data.loading._course import Course
from ddp.data.loading._fetching import Content
from ddp.data.loading._passes import Alone, AloneInStream, Seeds
from ddp.data.loading._position import Position, Source, State
from ddp.data.positions import Sampler
from ddp.data.samplers import RandomSampler, SequentialSampler
from ddp.errors import ArgumentError

if TYPE_CHECKING:
    from ddp.data.loading._crew import Crew
    from ddp.data.loading._parcel import Parcel

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
    multiprocessing_context: "forkserver": workers are forked from a small server, which all loaders of this process
    share; "spawn": from one that is started for this crew alone; or a context of `multiprocessing` of these names
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
        generator: Stream | None = None,
        *,
        prefetch_factor: int | None = None,
        persistent_workers: bool = False,
        pin_memory_device: str = "",
        in_order: bool = True,
    ) -> None:
        self._stream = isinstance(dataset, IterableDataset)
        check_sampling(self._stream, batch_size, shuffle, sampler, batch_sampler, drop_last)
        check_working(num_workers, timeout, prefetch_factor, persistent_workers)
        self._fresh = start_method(multiprocessing_context) == "spawn"
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
        self._crew: Crew | None = None
        self._parcel: Parcel | None = None
        self._position = Position(self._order(), max(1, num_workers))
        if num_workers:
            _script.refuse_while_imported()
            self._prepare()

    def _order(self) -> Any:
        """What yields the indices of a batch after those of another: None for a stream."""
        return self.sampler if self.batch_sampler is None else self.batch_sampler

    def _prepare(self) -> None:
        """Starts what workers come from, so that it is ready when they are wanted."""
        named = [self.worker_init_fn, self.collate_fn, type(self.dataset)]
        modules = {name for each in named if isinstance(name := getattr(each, "__module__", None), str)}
        script = None
        if "__main__" in modules:
            try:
                script = _script.current()
            except ArgumentError:
                pass  # said when workers are started: they may do without
        if not self._fresh:
            # Here and below: who has no workers need not wait for what they take.
            from ddp.data.loading import _nursery

            _nursery.nursery().prepare(script, sorted(modules - {"__main__", "builtins"}))

    @property
    def epoch(self) -> int:
        """How many passes were completed, those before a state that was loaded among them."""
        return self._position.epoch

    def __len__(self) -> int:
        """Batches of a whole pass. Raises: TypeError if the sampler, or an IterableDataset, has no length."""
        if self._stream:
            samples = len(self.dataset)
            if self.batch_size is None:
                return samples
            return samples // self.batch_size if self.drop_last else -(-samples // self.batch_size)
        return len(self._order())

    def __iter__(self) -> Iterator[Any]:
        if self.num_workers:
            _script.refuse_while_imported()
        self._position.begins()
        try:
            return _Pass(self)
        except BaseException:
            self._crew = None  # a worker that stayed has died meanwhile: the next pass has new ones
            raise

    def state_dict(self) -> State:
        """The position after the batches that were handed out, whatever workers have fetched ahead, as JSON values.

        epoch: passes completed; batches: handed out in the pass under way; seed: what random numbers of batches come
        from; sampler: the state of sampler or batch_sampler, None if it has none; streams: of an IterableDataset
        """
        return self._position.state()

    def load_state_dict(self, state_dict: Mapping[str, Any]) -> None:
        """The next `iter` goes on with the batch after that position.

        Raises: StateDictError for a state of another kind of loader, or of another sampler or dataset.
        """
        self._position.load(state_dict)

    def _begin(self) -> tuple[Source, Course | None]:
        """The batches of a pass that begins where a loaded state says, and their order."""
        position = self._position
        if position.seed is None:
            position.seed = int(generator(CPU, self.generator).integers(2**63))
        # Ranks that were seeded alike draw for different batches: their position in the world tells these apart.
        holder = self.sampler if hasattr(self.sampler, "rank") else getattr(self.batch_sampler, "sampler", None)
        seeds = Seeds(position.seed, position.epoch, int(getattr(holder, "rank", 0)))
        size = None if not self._batched else self.batch_size or 1
        content = Content(self.dataset, self.collate_fn, self.worker_init_fn, self._stream, size, self.drop_last)
        ahead = self.prefetch_factor or _PREFETCH
        if self._stream:
            streams, position.streams = position.streams, None
            if not self.num_workers:
                return AloneInStream(content, seeds, streams), None
            from ddp.data.loading._teamwork import TogetherInStream

            return TogetherInStream(self._hired(content), seeds, ahead, streams), None
        course = Course(self._order(), position.batches)
        if not self.num_workers:
            return Alone(content, course, seeds, position.batches), course
        from ddp.data.loading._teamwork import Together

        return Together(self._hired(content), course, seeds, position.batches, ahead), course

    def _hired(self, content: Content) -> Crew:
        """The workers of a pass."""
        if self._crew is not None:
            return self._crew
        from ddp.data.loading._crew import Crew
        from ddp.data.loading._parcel import Parcel

        before, self._parcel = self._parcel, Parcel(content)
        crew = Crew(self._parcel, before, self.num_workers, self.timeout, self._fresh)
        if self.persistent_workers:
            self._crew = crew
        return crew


class _Pass(Iterator[Any]):
    """One pass of a loader, as its user sees it. It ends its workers when it is over, fails or is dropped."""

    def __init__(self, loader: DataLoader) -> None:
        self._loader = loader
        self._position = loader._position
        self._source: Source | None = None
        source, course = loader._begin()
        self._source = source
        self._position.follow(source, course)
        self._batches = _pinning.through_pinned_memory(source, loader.pin_memory, loader.pin_memory_device)

    def __next__(self) -> Any:
        source = self._source
        if source is None:
            raise StopIteration
        if self._loader._crew is not None and not self._position.follows(source):
            raise ArgumentError("another iteration of this loader has begun since, and has its persistent workers")
        try:
            batch = next(self._batches)
        except StopIteration:
            self._position.complete(source)
            self._end(source, keep=True)
            raise
        except BaseException:
            self._position.leave(source, failed=True)
            self._end(source, keep=False)
            raise
        self._position.hand_out(source)
        return batch

    def __len__(self) -> int:
        return len(self._loader)

    def _end(self, source: Source, keep: bool) -> None:
        self._source = None
        self._batches = iter(())
        if not keep:
            self._loader._crew = None
        if self._loader._crew is None:
            source.close()

    def __del__(self) -> None:
        source = self._source
        if source is not None:
            self._position.leave(source)
            self._end(source, keep=True)
