"""`ddp-doctor calls`: looks at running ranks from outside, without their help. Who hangs cannot be asked."""

from __future__ import annotations

import json
import sys
import time
from collections.abc import Sequence

from collectives.errors import RecordError
from collectives.flight.report import FlightRecord, read, table


def calls(pids: Sequence[int], last: int, as_json: bool) -> int:
    """Prints the last calls of these processes, `last` of each; returns 1 if one of them could not be read, else 0."""
    records: list[FlightRecord] = []
    errors: dict[int, str] = {}
    for pid in dict.fromkeys(pids):
        try:
            records.append(read(pid))
        except RecordError as error:
            errors[pid] = str(error)
    now = time.monotonic_ns()
    if as_json:
        processes = [_plain(record, last) for record in records]
        print(json.dumps({"now": now, "processes": processes, "errors": errors}, indent=1))
    elif records:
        print(table(records, now, last))
    sys.stdout.flush()
    for text in errors.values():
        print(f"ddp-doctor: {text}", file=sys.stderr)
    return 1 if errors else 0


def _plain(record: FlightRecord, last: int) -> dict[str, object]:
    return {
        **record._asdict(),
        "calls": [call._asdict() for call in record.calls[-last:]],
        "position": record.position and record.position._asdict(),
    }
