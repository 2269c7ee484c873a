"""The fork server imports once what all processes under test run."""

from __future__ import annotations

import multiprocessing

# Before the server starts: it would otherwise fork processes each of which imports all of it again.
multiprocessing.set_forkserver_preload([f"tests.ddp.multiprocessing.{name}" for name in ("children", "gpu_children")])
