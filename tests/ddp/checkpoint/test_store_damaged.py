"""Checkpoints that are not what was written: each is refused, in words of ours, at no more memory than it takes."""

from __future__ import annotations

import contextlib
import errno
import json
import os
import re
import shutil
import tracemalloc
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import collectives
from collectives.communicator import Communicator
from ddp.checkpoint import checkpoint_files
from ddp.checkpoint.checkpoint_files import DamagedCheckpoint, ShardReader
from ddp.checkpoint.checkpoint_reader import Saved, open_checkpoint
from ddp.checkpoint.store import Store
from ddp.errors import CheckpointError
from tests.ddp.checkpoint.stores import check, write
from tests.ddp.checkpoint.test_store_tables import signed

Files = dict[str, bytes]
SLACK = 1 << 18  # bytes, of the interpreter's own, whatever is read


@pytest.fixture(autouse=True)
def _small_blocks(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(checkpoint_files, "_CHUNK", 1 << 16)


def saved(folder: Path, steps: tuple[int, ...] = (1,), ranks: int = 2) -> list[Files]:
    """What the files of such checkpoints hold."""

    def main(comm: Communicator) -> list[Path]:
        store = Store(folder, comm, keep=None)
        paths = [write(store, comm, step) for step in steps]
        store.close()
        return paths

    paths = collectives.run_threads(main, size=ranks)[0]
    return [{file.name: file.read_bytes() for file in path.iterdir()} for path in paths]


def put(folder: Path, files: Files) -> Path:
    shutil.rmtree(folder, ignore_errors=True)
    folder.mkdir()
    for name, data in files.items():
        (folder / name).write_bytes(data)
    return folder


@contextlib.contextmanager
def no_more_memory_than(size: int) -> Iterator[None]:
    """Fails if more than twice as many bytes are allocated meanwhile."""
    tracemalloc.start()
    try:
        yield
        assert tracemalloc.get_traced_memory()[1] < 2 * size + SLACK
    finally:
        tracemalloc.stop()


def refused(folder: Path) -> str:
    """What is said of it. Fails if it is taken for whole."""
    size = sum(file.stat().st_size for file in folder.iterdir())
    with no_more_memory_than(size), pytest.raises(CheckpointError) as caught:
        open_checkpoint(folder).read_all()
    return str(caught.value)


MANIFEST = "manifest.json"
FIRST = "rank-0000.safetensors"
SECOND = "rank-0001.safetensors"


def mutate(original: Files, other: Files, rng: np.random.Generator) -> Files:
    """Another content of the same files. other: of a checkpoint with the same names, dtypes and shapes"""
    files = dict(original)
    name = str(rng.choice(list(files)))
    data = bytearray(files[name])
    offset = int(rng.integers(len(data)))
    stop = min(len(data), offset + int(rng.integers(1, 200)))
    match rng.integers(9):
        case 0 | 1 | 2:  # flips of bits
            for place in rng.integers(0, len(data), rng.integers(1, 4)):
                data[place] ^= 1 << int(rng.integers(8))
        case 3:
            del data[offset:]
        case 4:  # garbage
            data[offset:stop] = rng.bytes(stop - offset)
        case 5:
            data += rng.bytes(int(rng.integers(1, 100)))
        case 6:  # a page that never came to the disk
            data[offset:stop] = bytes(stop - offset)
        case 7:
            data[:] = other[name]
        case 8:
            del data[offset:stop]
    files[name] = bytes(data)
    return files


@pytest.mark.timeout(600)  # with --long
def test_every_mutation_is_refused(tmp_path: Path, count: Any) -> None:
    original, other = saved(tmp_path, (1, 2))
    mutations = 0
    for seed in range(count(200, 10_000)):
        files = mutate(original, other, np.random.default_rng(seed))
        if files != original:
            mutations += 1
            assert refused(put(tmp_path / "x", files)).startswith(f"{tmp_path}/x: ")
    assert mutations > count(150, 9000)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda files: files.pop(MANIFEST), "manifest.json: No such file or directory"),
        (lambda files: files.pop(SECOND), "rank-0001.safetensors: No such file or directory"),
        (lambda files: files.update({MANIFEST: b""}), "manifest.json: it is empty"),
        (lambda files: files.update({MANIFEST: b'{"a": 1}'}), "manifest.json: it does not begin as a manifest does"),
        (lambda files: files.update({FIRST: files[FIRST][:-1]}), r"rank-0000.*: it has [\d,]+ bytes, and [\d,]+ were"),
        (lambda files: files.update({FIRST: files[SECOND], SECOND: files[FIRST]}), "rank-0000.safetensors: "),
        (
            lambda files: files.update({SECOND: files[SECOND][:-1] + b"\x05"}),
            r"rank-0001.*: rng, bytes .* is not what was written",
        ),
    ],
)
def test_what_is_said(change: Callable[[Files], object], message: str, tmp_path: Path) -> None:
    files = saved(tmp_path)[0]
    change(files)
    for read in (Saved.verify, Saved.read_all):
        with pytest.raises(CheckpointError, match=message):
            read(open_checkpoint(put(tmp_path / "x", files)))


def test_the_newest_whole_one_is_found(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    saved(tmp_path, (1, 2, 3, 4, 5), ranks=3)
    (tmp_path / "step-0000000005" / MANIFEST).unlink()
    os.truncate(tmp_path / "step-0000000004" / SECOND, 10)
    shard = tmp_path / "step-0000000003" / FIRST
    data = bytearray(shard.read_bytes())
    data[-1] ^= 128
    shard.write_bytes(data)
    (tmp_path / "step-0000000009.7").mkdir()
    shutil.copytree(tmp_path / "step-0000000001", tmp_path / "step-0000000008")

    def main(comm: Communicator) -> None:
        check(Store(tmp_path, comm).newest(), 2)

    collectives.run_threads(main, size=2)
    said = [
        "0000009.7 is passed over: .*manifest.json: No such file",
        "000000008 is passed over: .*it is of step 1, another folder's",
        "000000005 is passed over: ",
        "000000004 is passed over: .*rank-0001.safetensors: it has 10 bytes",
        "000000003 is passed over: .*is not what was written",
    ]
    for message, pattern in zip(caplog.messages, said, strict=True):
        assert re.search(pattern, message)


def test_where_none_is_whole_nobody_begins_anew_unawares(tmp_path: Path) -> None:
    saved(tmp_path, (1, 2), ranks=1)
    for path in tmp_path.glob(f"step-*/{FIRST}"):
        path.unlink()
    message = r"no checkpoint in .* is whole \(.*step-0000000001: rank-0000.safetensors: No such .*to begin anew, move"
    with pytest.raises(CheckpointError, match=message):
        Store(tmp_path, collectives.init("single")).newest()


def test_a_file_that_cannot_be_read_here_is_no_damaged_one(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    saved(tmp_path, (1, 2), ranks=1)
    real = os.open

    def refuse(path: Any, *args: Any) -> int:
        if str(path).endswith(f"step-0000000002/{FIRST}"):
            raise OSError(errno.EMFILE, "Too many open files")
        return real(path, *args)

    store = Store(tmp_path, collectives.init("single"))
    with monkeypatch.context() as patch:
        patch.setattr(os, "open", refuse)
        with pytest.raises(CheckpointError, match=f"loaded: rank 0: .*step-0000000002: {FIRST}: Too many open files"):
            store.newest()
    check(store.newest(), 2)


def test_a_file_that_shrinks_while_it_is_read(tmp_path: Path) -> None:
    saved(tmp_path)
    result = open_checkpoint(tmp_path / "step-0000000001")
    shard = ShardReader(str(result.path / FIRST), result._manifest.files[0])
    os.truncate(result.path / FIRST, 10)
    with shard, pytest.raises(DamagedCheckpoint, match="it became shorter while it was read"):
        shard.verified("its header", 0, 100, "")


def test_a_signed_manifest_with_anything_in_it(tmp_path: Path, count: Any) -> None:
    """It is refused, or what is read is what it says; no more memory is taken than the files have."""
    original = saved(tmp_path)[0]
    values = [0, -1, 2**31, 2**62, 10**30, "", "x", "F64", FIRST, None, [], {}, [1], True, 0.5]
    refusals = 0

    def places(value: Any) -> list[tuple[Any, Any]]:
        items = value.items() if isinstance(value, dict) else enumerate(value) if isinstance(value, list) else ()
        return [place for key, inner in items for place in [(value, key), *places(inner)]]

    for seed in range(count(200, 5000)):
        rng = np.random.default_rng(seed)
        fields = json.loads(original[MANIFEST])
        del fields["sha256"]
        result = places(fields)
        for offset in rng.integers(len(result), size=rng.integers(1, 4)):
            result[offset][0][result[offset][1]] = values[rng.integers(len(values))]
        folder = put(tmp_path / "x", {**original, MANIFEST: signed(fields)})
        with no_more_memory_than(sum(map(len, original.values()))):
            try:
                checkpoint = open_checkpoint(folder)
                arrays = checkpoint.read_all()
                assert {name: (each.dtype, each.shape) for name, each in arrays.items()} == checkpoint.names
            except CheckpointError:
                refusals += 1
    assert refusals > count(60, 1600)
