"""Flight records as text: what a rank did last, and the table of `ddp-doctor calls`."""

from __future__ import annotations

import pytest

from collectives.flight.reader import FlightRecord, Position, RecordedCall, calls_table, describe_last

NOW = 100_000_000_000  # ns
HERE = Position(99_600_000_000, "/home/me/data.py", 31, "load", None)


def call(order: int, state: str = "done", queued: float = 60.0, took: float = 8.8, **more: object) -> RecordedCall:
    """A call that was queued at `queued` s, started 1 ms later and, if it has ended, took `took` s."""
    at = int(queued * 1e9)
    started = at + 1_000_000 if state != "queued" else 0
    ended = started + int(took * 1e9) if state in ("done", "failed") else 0
    texts = ("all_reduce", "float32", "(512, 10)", "sum", "/home/me/train.py", 88)
    return RecordedCall(order, "world", 416 + order, state, at, started, ended, *texts)._replace(**more)


def record(*calls: RecordedCall, rank: int = 0, position: Position | None = None) -> FlightRecord:
    return FlightRecord(4711 + rank, rank, 4, list(calls), position)


ALL_REDUCE = "last call all_reduce #417 (train.py:88) sum float32 (512, 10)"
STOOD = "its Python stood at data.py:31 in load"


@pytest.mark.parametrize(
    ("known", "text"),
    [
        (record(), "no call yet"),
        (record(call(1), position=HERE), f"{ALL_REDUCE}, done 31.2 s ago; {STOOD} (0.4 s before)"),
        (record(call(1, "queued")), f"{ALL_REDUCE}, queued for 40.0 s"),
        (
            record(call(1, "started", communicator="world.1 (DataParallel of Net)")),
            f"{ALL_REDUCE} on world.1 (DataParallel of Net), under way for 40.0 s",
        ),
        (record(call(1, "failed"))._replace(step=7), f"{ALL_REDUCE}, failed 31.2 s ago; step 7"),
        (  # of queued calls, the one that they wait for
            record(call(1, "started"), call(2, "queued"), call(3, "queued")),
            f"{ALL_REDUCE}, under way for 40.0 s, 2 more queued",
        ),
        (  # of those under way at once, the first
            record(
                call(1, "started"), call(2, "started"), call(3, "started", name="reduce_scatter"), call(4, "queued")
            ),
            f"{ALL_REDUCE}, under way for 40.0 s, 1 more queued",
        ),
        (
            record(call(0, "started", name="recv"), call(1, "started")),
            f"{ALL_REDUCE}, under way for 40.0 s",
        ),
        (  # The numbers of groups are counted apart, too.
            record(call(0, "started", name="create_group"), call(1, "started")),
            f"{ALL_REDUCE}, under way for 40.0 s",
        ),
        (
            record(call(0, "started"), call(1, "started", name="create_group", more="ranks 0, 2", dtype="", shape="")),
            "last call create_group #417 (train.py:88) ranks 0, 2, under way for 40.0 s",
        ),
        (
            record(position=HERE._replace(within=("/usr/lib/python3/threading.py", 327, "wait"))),
            f"no call yet; {STOOD}, within threading.py:327 in wait (0.4 s before)",
        ),
        (
            record(call(1, name="barrier", more="", dtype="", shape="")),
            "last call barrier #417 (train.py:88), done 31.2 s ago",
        ),
        (record(position=HERE._replace(time=NOW + 5)), f"no call yet; {STOOD} (0.0 s before)"),
    ],
)
def test_what_a_rank_did_last(known: FlightRecord, text: str) -> None:
    assert describe_last(known, NOW) == text


def test_a_table_of_several_ranks() -> None:
    one = record(call(1), call(2, took=0.009), call(3, "started", name="gather", more="root=1"), rank=1, position=HERE)
    none = record(call(9, "failed", 61, took=9e-3), rank=-1)
    two = record(rank=2)
    assert calls_table([two, one, none], NOW, last=2).splitlines() == [
        "rank  pid   call                     dtype    shape      where        communicator  state    begun       took",
        "?     4710  all_reduce #425  sum     float32  (512, 10)  train.py:88  world         failed   39.0 s ago  9 ms",
        "1     4712  all_reduce #418  sum     float32  (512, 10)  train.py:88  world         done     40.0 s ago  9 ms",
        "1     4712  gather #419      root=1  float32  (512, 10)  train.py:88  world         started  40.0 s ago",
        "",
        f"rank ? (pid 4710): {describe_last(none, NOW)}",
        f"rank 1 (pid 4712): {describe_last(one, NOW)}",
        "rank 2 (pid 4713): no call yet",
    ]
    assert calls_table([record()], NOW) == "rank 0 (pid 4711): no call yet"
