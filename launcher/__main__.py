"""`python -m launcher` is `ddp-launch`, for places where the command is not on PATH."""

from __future__ import annotations

import sys

from launcher.cli import main

sys.exit(main())
