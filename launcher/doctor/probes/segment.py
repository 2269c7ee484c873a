"""Memory that two processes share as ranks do: one makes it, the other maps it through /proc, and writes to it."""

from __future__ import annotations

import os
from typing import Any

from collectives._shared import segment
from launcher.doctor.aside import answer

_BYTES = 1 << 20
_VALUE = 77


def look() -> dict[str, Any]:
    """unsupported: why ranks do not share memory on such a machine; trouble: why it failed here; "" for neither."""
    unsupported = segment.supported()
    if unsupported:
        return {"unsupported": unsupported, "trouble": ""}
    try:
        made = segment.create(_BYTES)
    except (OSError, OverflowError) as failure:
        return {"unsupported": "", "trouble": f"a segment of 1 MiB cannot be made: {failure}"}
    reading, writing = os.pipe()
    child = os.fork()
    if child == 0:
        said = b""
        try:
            segment.attach(made.address, _BYTES).memory[-1] = _VALUE
        except (OSError, ValueError) as failure:
            said = str(failure).encode()
        os.write(writing, said)
        os._exit(0)
    os.close(writing)
    with open(reading, "rb") as pipe:
        trouble = pipe.read().decode(errors="replace")
    os.waitpid(child, 0)
    if not trouble and made.memory[-1] != _VALUE:
        trouble = "what one process writes does not reach the other"
    return {"unsupported": "", "trouble": trouble}


if __name__ == "__main__":
    answer(look)
