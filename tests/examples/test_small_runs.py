"""The other examples at a small size, as users start them: alone, and on two ranks."""

from __future__ import annotations

import re
import sys
from pathlib import Path
from typing import Any

import pytest

import ddp
from tests.conftest import ROOT, Run

EXAMPLES = ROOT / "examples"
STARTS = {"alone": [sys.executable], "two": [sys.executable, "-m", "launcher", "-n", "2"]}


def run_example(run_job: Run, start: str, name: str, *args: str) -> str:
    command = [*STARTS[start], str(EXAMPLES / name), *args]
    return run_job(command, timeout=100, env={"OMP_NUM_THREADS": "1"}, code=0).stdout


def of(name: str, args: str, expected: str, *, short: str = "") -> list[Any]:
    """An example alone and on two ranks, with the pattern of what it prints. short: how it runs without --long, too"""
    marks = {"alone": [pytest.mark.long], "two": [pytest.mark.mpi, pytest.mark.long]}
    if short:
        marks[short].remove(pytest.mark.long)
    return [pytest.param(start, name, args, expected, id=f"{name}-{start}", marks=marks[start]) for start in STARTS]


GPT = "--steps 60 --lr 0.01 --width 32 --layers 2 --length 32 --bytes 100000"


@pytest.mark.parametrize(
    ("start", "name", "args", "expected"),
    [
        *of("custom_function.py", "--epochs 4 --units 64", r"test accuracy (?:[89]\d|100)[\d.]* %", short="two"),
        *of("frozen_trunk.py", "--epochs 3", r"(?s)(?:9\d|100)[\d.]* % right.*(?:[6-9]\d|100)[\d.]* % right"),
        *of("char_gpt.py", GPT, r"held-out loss (?:[012]\.|3\.[0-4])\d*", short="alone"),
        *of("contrastive.py", "--epochs 6 --batch-size 100", r"retrieval (?:[5-9]|\d\d+)[\d.]* %"),  # 0.3 by chance
    ],
)
def test_an_example_learns(run_job: Run, start: str, name: str, args: str, expected: str) -> None:
    out = run_example(run_job, start, name, *args.split())
    assert re.search(expected, out), out


@pytest.mark.parametrize(
    ("start", "name", "args", "expected"),
    [
        *of("dcgan_digits.py", "--epochs 2 --width 16", "epoch 2: discriminator"),
        *of("wgan_gp.py", "--steps 60", r"[5-8] of 8 spots", short="alone"),
    ],
)
def test_an_example_draws(run_job: Run, start: str, name: str, args: str, expected: str, tmp_path: Path) -> None:
    image = pytest.importorskip("PIL.Image")
    picture = tmp_path / "picture.png"
    out = run_example(run_job, start, name, *args.split(), "--out", str(picture))
    assert re.search(expected, out), out
    with image.open(picture) as opened:
        assert opened.size == (480, 480)
        low, high = opened.convert("L").getextrema()
    assert low < 100 < high  # not one grey


@pytest.mark.mpi
def test_evaluate_prints_the_same_on_any_number_of_ranks(run_job: Run, tmp_path: Path) -> None:
    weights = tmp_path / "digits.safetensors"
    trained = run_example(run_job, "alone", "evaluate.py", "--epochs", "3", "--save", str(weights))
    match = re.match(r"accuracy ([\d.]+) % \((\d+) of 359\), mean loss [\d.]+\n", trained)
    assert match
    assert float(match[1]) > 85
    counts = [[int(count) for count in row] for row in re.findall(r"^ {4}\d" + r" +(\d+)" * 10, trained, re.M)]
    assert sum(map(sum, counts)) == 359
    assert sum(row[label] for label, row in enumerate(counts)) == int(match[2])
    # 359 images: no even shares
    printed = run_example(run_job, "two", "evaluate.py", "--load", str(weights))
    assert re.sub(r"^0: ", "", printed, flags=re.M) == trained


def test_every_example_is_short_and_run() -> None:
    tested = "".join(path.read_text() for path in Path(__file__).parent.glob("test_*.py"))
    for path in EXAMPLES.glob("*.py"):
        assert len(path.read_text().splitlines()) < 200, path
        assert path.name in tested, path


@pytest.mark.skipif(ddp.cuda.is_available(), reason="there is a GPU")
@pytest.mark.parametrize("name", ["train_digits.py", pytest.param("char_gpt.py", marks=pytest.mark.long)])
def test_without_a_gpu_it_says_so(run_job: Run, name: str) -> None:
    done = run_job([sys.executable, str(EXAMPLES / name), "--device", "cuda"], code=1)
    assert "--device cuda: no CUDA GPU here, or no CuPy" in done.stderr
    assert "Traceback" not in done.stderr


@pytest.mark.mpi
@pytest.mark.long
@pytest.mark.parametrize(("name", "args"), [("torch_ddp.py", ()), ("torch_fsdp.py", ("--checkpoint",))])
def test_pytorch_on_our_backend(run_job: Run, name: str, args: tuple[str, ...], tmp_path: Path) -> None:
    pytest.importorskip("torch")
    out = run_example(run_job, "two", name, *args, *([str(tmp_path)] if args else []))
    losses = [float(each) for each in re.findall(r"loss ([\d.]+)", out)]
    assert losses[-1] < losses[0] / 2, out
    assert not args or (tmp_path / ".metadata").exists()
