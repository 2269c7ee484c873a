"""The guides show two libraries side by side: ours is run as it stands, theirs too where it is there, and what both
compute is compared."""

from __future__ import annotations

import functools
import re
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from numpy.testing import assert_allclose

import collectives
import ddp
from tests.conftest import ROOT, Run
from tests.docs.blocks import Block, pairs
from tests.docs.snippets import of_ours, outcome, run, start_alike

DOCS = ROOT / "docs"
PYTORCH, HOROVOD, MPI4PY = (DOCS / f"from-{name}.md" for name in ("pytorch", "horovod", "mpi4py"))
TWO = [sys.executable, "-m", "launcher", "-n", "2"]

# Where the two are not to agree to 1e-5, by heading.
TOLERANCES = {"Communication hooks": 2e-3}  # float16, rounded at different places
LEFT_OUT = {"Different numbers of batches": "gradient"}  # those of the last step, which not all ranks have made


def _named(result: list[tuple[Block | None, Block]]) -> list[Any]:
    return [pytest.param(theirs, mine, id=mine.place) for theirs, mine in result]


def _losses(printed: str) -> list[float]:
    return [float(loss) for loss in re.findall(r"loss ([\d.]+)$", printed, re.M)]


@pytest.mark.mpi
@pytest.mark.parametrize(("theirs", "mine"), _named([pair for pair in pairs(HOROVOD) if pair[1].is_script]))
def test_a_program_of_ours_runs(theirs: Block | None, mine: Block, run_job: Run, tmp_path: Path) -> None:
    (tmp_path / "train.py").write_text(mine.code)
    losses = _losses(run_job([*TWO, "train.py"], cwd=tmp_path, code=0).stdout)
    assert len(losses) == 3
    assert losses[-1] < losses[0]


@pytest.mark.parametrize(("theirs", "mine"), _named([pair for pair in pairs(HOROVOD) if not pair[1].is_script]))
def test_a_snippet_of_ours_runs(theirs: Block | None, mine: Block, tmp_path: Path, monkeypatch: Any) -> None:
    monkeypatch.chdir(tmp_path)
    assert theirs is None or theirs.compiled()  # is Python, at least
    collectives.run_threads(functools.partial(_outcome, mine), size=2)


@pytest.mark.mpi
@pytest.mark.timeout(200)
def test_pytorch_computes_the_same(run_job: Run, tmp_path: Path, monkeypatch: Any) -> None:
    pytest.importorskip("torch")
    pytest.importorskip("safetensors")
    # PyTorch reads what it needs from the environment; torchrun would take a PyTorch more.
    job = [*TWO, ROOT / "tests/docs/in_torch.py", PYTORCH, tmp_path]
    theirs = run_job(job, timeout=100, env={"OMP_NUM_THREADS": "1", "GLOO_SOCKET_IFNAME": "lo"}, code=0)
    assert len(_losses(theirs.stdout)) == 3
    expected = [dict(np.load(tmp_path / f"{rank}.npz")) for rank in range(2)]
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(ddp.nn.Linear, "reset_parameters", start_alike(ddp))
    assert len(pairs(PYTORCH)) >= 6
    for mine in [mine for _, mine in pairs(PYTORCH) if mine.is_script]:
        (tmp_path / "train.py").write_text(mine.code)
        done = run_job([*TWO, str(ROOT / "tests/docs/same_start.py"), "train.py"], cwd=tmp_path, code=0)
        assert_allclose(_losses(done.stdout), _losses(theirs.stdout), rtol=1e-5)
    for block, mine in pairs(PYTORCH):
        if not mine.is_script:
            got = collectives.run_threads(functools.partial(_outcome, mine), size=2)
            if block is not None:
                _compare(block, mine, got, expected)


def _outcome(mine: Block, comm: collectives.Communicator) -> dict[str, Any]:
    return outcome(run(mine.compiled(), mine.code, of_ours(comm)))


def _compare(block: Block, mine: Block, got: list[dict[str, Any]], expected: list[dict[str, Any]]) -> None:
    tolerance = TOLERANCES.get(mine.section, 1e-5)
    for rank, actual in enumerate(got):
        names = [name for name in actual if f"{block.line}:{name}" in expected[rank]]
        if mine.section in LEFT_OUT:
            names = [name for name in names if not name.startswith(LEFT_OUT[mine.section])]
        assert names, f"{block.place} and {mine.place} have no result in common"
        for name in names:
            place = f"rank {rank}, {mine.place}: {name}"
            theirs = expected[rank][f"{block.line}:{name}"]
            assert_allclose(actual[name], theirs, rtol=tolerance, atol=tolerance / 10, err_msg=place)


@pytest.mark.mpi
def test_mpi4py_computes_the_same(run_job: Run, mpiexec: Any, tmp_path: Path) -> None:
    two = [*mpiexec, "-n", "2", sys.executable]
    done = run_job([*two, str(ROOT / "tests/docs/in_mpi.py"), str(MPI4PY)], cwd=tmp_path, code=0)
    compared = re.search(r"^2 ranks compared (\d+) results$", done.stdout, re.M)
    assert compared, done.stdout
    assert int(compared[1]) >= 15
    for theirs, mine in pairs(MPI4PY):
        if mine.is_script and theirs is not None:
            (tmp_path / "theirs.py").write_text(theirs.code)
            (tmp_path / "ours.py").write_text(mine.code)
            expected = _losses(run_job([*two, "theirs.py"], cwd=tmp_path, code=0).stdout)
            got = _losses(run_job([*TWO, "ours.py"], cwd=tmp_path, code=0).stdout)
            assert len(expected) == 3
            assert_allclose(got, expected, rtol=0, atol=2e-10)
