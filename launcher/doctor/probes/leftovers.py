"""What killed MPI jobs have left: asked of the kernel by signals and leases, which are better had apart."""

from __future__ import annotations

from launcher.doctor.aside import answer
from launcher.doctor.leftovers import look

if __name__ == "__main__":
    answer(lambda: look()._asdict())
