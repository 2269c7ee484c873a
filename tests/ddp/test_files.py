"""Writing to paths that users give: whole files or none, and nothing made beside a device."""

from __future__ import annotations

import errno
import os
from collections.abc import Callable
from pathlib import Path

import pytest

import ddp
from ddp._files import atomic_write
from ddp.metrics import JsonLines

Write = Callable[[str | os.PathLike[str]], None]


def write_plain(path: str | os.PathLike[str]) -> None:
    with atomic_write(path) as file:
        file.write(b"whole\n")


def write_save(path: str | os.PathLike[str]) -> None:
    ddp.save({"x": ddp.ones(2)}, path)


def write_lines(path: str | os.PathLike[str]) -> None:
    with JsonLines(path, rank=0) as lines:
        lines.log(0, loss=0.5)


WRITERS = pytest.mark.parametrize("write", [write_plain, write_save, write_lines])


@WRITERS
def test_a_pipe_is_written_to(write: Write, tmp_path: Path) -> None:
    os.mkfifo(tmp_path / "pipe")
    with pytest.raises(OSError, match=r"No process reads this pipe: .*pipe") as caught:
        write(tmp_path / "pipe")
    assert caught.value.errno == errno.ENXIO
    read: list[bytes] = []
    reading = os.open(tmp_path / "pipe", os.O_RDONLY | os.O_NONBLOCK)
    try:
        write(tmp_path / "pipe")
        read.append(os.read(reading, 1 << 16))
    finally:
        os.close(reading)
    write(tmp_path / "file")
    assert read == [(tmp_path / "file").read_bytes()]
    with atomic_write(os.devnull) as file:
        assert not [name for name in os.listdir("/dev") if name.endswith(".tmp")]  # which only root may make
        file.write(b"nothing")
    assert sorted(os.listdir(tmp_path)) == ["file", "pipe"]


@WRITERS
def test_a_folder_is_named(write: Write, tmp_path: Path) -> None:
    with pytest.raises(IsADirectoryError, match=f"expected the path of a file: '{tmp_path}'"):
        write(tmp_path)
    assert os.listdir(tmp_path) == []


@WRITERS
def test_a_folder_that_takes_no_new_file_is_one_sentence(write: Write) -> None:
    with pytest.raises(OSError, match=r"'/sys/metrics'$") as caught:  # which nobody makes files in, not even root
        write("/sys/metrics")
    assert caught.value.errno in (errno.EACCES, errno.EROFS)


def test_a_file_is_replaced_whole_or_not_at_all(tmp_path: Path) -> None:
    path = tmp_path / "x"
    write_plain(path)
    path.chmod(0o600)
    (tmp_path / "link").symlink_to(path)
    with atomic_write(tmp_path / "link") as file:
        file.write(b"new\n")
        assert path.read_bytes() == b"whole\n"
    assert (path.read_bytes(), (tmp_path / "link").is_symlink()) == (b"new\n", True)

    def fail() -> None:
        with atomic_write(path) as file:
            file.write(b"half")
            raise ZeroDivisionError

    with pytest.raises(ZeroDivisionError):
        fail()
    assert path.read_bytes() == b"new\n"
    assert path.stat().st_mode & 0o777 == 0o600
    assert sorted(os.listdir(tmp_path)) == ["link", "x"]
