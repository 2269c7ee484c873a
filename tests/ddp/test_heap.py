"""Memory that a step frees is there for the next one: no page comes back by a fault."""

from __future__ import annotations

import platform
import subprocess
import sys

import pytest

STEPS = """
import resource, sys
import numpy as np
if "ddp" in sys.argv:
    import ddp

def step():
    arrays = [np.ones(1 << 20, np.uint8) for _ in range(100)]  # 100 MiB alive at once, in blocks of 1 MiB

for _ in range(3):
    step()
before = resource.getrusage(resource.RUSAGE_SELF).ru_minflt
for _ in range(10):
    step()
print(resource.getrusage(resource.RUSAGE_SELF).ru_minflt - before)
"""


@pytest.mark.skipif(platform.libc_ver()[0] != "glibc", reason="other allocators have other rules")
def test_steps_do_not_fault_their_memory_in_again() -> None:
    def faults(*libraries: str) -> int:
        command = [sys.executable, "-c", STEPS, *libraries]
        return int(subprocess.run(command, capture_output=True, text=True, timeout=60, check=True).stdout)

    assert faults("ddp") < 1000 < 10_000 < faults()
