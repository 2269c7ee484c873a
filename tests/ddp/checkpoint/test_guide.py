"""What docs/checkpoints.md shows of saving and resuming runs as it stands, on two ranks, and twice."""

from __future__ import annotations

import functools
from pathlib import Path
from typing import Any

import pytest

import collectives
from ddp.data import DataLoader, DistributedSampler
from tests.docs.blocks import Block, blocks
from tests.docs.snippets import of_ours, run

PAGE = Path(__file__).parents[3] / "docs" / "checkpoints.md"
SECTIONS = (
    "Checkpoints and exact resume",
    "Stopping a job",
    "Saving while training goes on",
    "Fine-tuning from a checkpoint",
    "What is on disk",
)


@pytest.mark.parametrize("block", [pytest.param(b, id=b.place) for b in blocks(PAGE) if b.section in SECTIONS])
def test_the_page_runs(block: Block, folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def loader(get: Any) -> Any:
        data = get("dataset")
        return DataLoader(data, batch_size=4, sampler=DistributedSampler(data))

    def once(block: Block, comm: collectives.Communicator) -> None:
        run(block.compiled(), block.code, {**of_ours(comm), "loader": loader})

    monkeypatch.chdir(folder)
    for _ in range(2):  # the second one finds what the first has saved
        collectives.run_threads(functools.partial(once, block), size=2)
    assert list(folder.glob("runs/*/step-*"))


def test_every_section_shows_something() -> None:
    assert {block.section for block in blocks(PAGE)} >= set(SECTIONS)
