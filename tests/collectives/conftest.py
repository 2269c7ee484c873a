"""The contract's files are no test files themselves, and their asserts should say as much as those of one."""

import pytest

pytest.register_assert_rewrite("tests.collectives.contract")
