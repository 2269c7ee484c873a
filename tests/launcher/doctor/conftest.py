"""How findings are compared with what is expected of them."""

from __future__ import annotations

from collections.abc import Callable

import pytest

from launcher.doctor.findings import Finding, Level

Expected = tuple[Level, str, str]


@pytest.fixture
def assert_found() -> Callable[..., None]:
    """Each finding has this level, and these words in its text and its fix; an empty fix is an empty fix."""

    def compare(findings: list[Finding], *expected: Expected) -> None:
        assert [each.level for each in findings] == [level for level, _, _ in expected], findings
        for each, (_, text, fix) in zip(findings, expected, strict=True):
            assert text in each.text
            assert fix in each.fix
            assert bool(fix) == bool(each.fix), each

    return compare
