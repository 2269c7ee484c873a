"""How a contract's tests reach their ranks."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from collectives import Communicator

#: Calls a function with its communicator on every rank, and returns the results of the ranks in this process.
Run = Callable[[Callable[[Communicator], Any]], list[Any]]
