"""How findings are compared with what is expected of them."""

from __future__ import annotations

from collections.abc import Callable

import pytest

from launcher.doctor.finding import Finding, Level

Expected = tuple[Level, str, str]


@pytest.fixture
def assert_found() -> Callable[..., None]:
    """Each finding has this level, and these words in its text and its mend; an empty mend is an empty mend."""

    def compare(findings: list[Finding], *expected: Expected) -> None:
        assert [each.level for each in findings] == [level for level, _, _ in expected], findings
        for each, (_, text, mend) in zip(findings, expected, strict=True):
            assert text in each.text
            assert mend in each.mend
            assert bool(mend) == bool(each.mend), each

    return compare
