"""How findings are compared with what is expected of them."""

from __future__ import annotations

from collections.abc import Callable, Iterable

import pytest

from launcher.doctor.findings import Finding


@pytest.fixture
def assert_found() -> Callable[..., None]:
    """Each finding is as `level text -> fix` says: these words are in its text and its fix; no fix means no fix."""

    def compare(actual: Iterable[Finding], *expected: str) -> None:
        findings = list(actual)
        assert [finding.level for finding in findings] == [line.partition(" ")[0] for line in expected], findings
        for each, line in zip(findings, expected, strict=True):
            text, _, fix = line.partition(" ")[2].partition(" -> ")
            assert text in each.text
            assert fix in each.fix
            assert bool(fix) == bool(each.fix), each

    return compare
