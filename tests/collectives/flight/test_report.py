"""A flight record in words."""

from __future__ import annotations

from collectives.flight.report import FlightRecord, Position, RecordedCall, describe_last, table

NOW = 100_000_000_000  # ns


def call(order: int, state: str = "done", queued: float = 60.0, took: float = 8.8, **more: object) -> RecordedCall:
    """A call that was queued at `queued` s, started 1 ms later and, if it has ended, took `took` s."""
    at = int(queued * 1e9)
    started = at + 1_000_000 if state != "queued" else 0
    ended = started + int(took * 1e9) if state in ("done", "failed") else 0
    default = RecordedCall(
        order=order,
        communicator="world",
        number=416 + order,
        state=state,
        queued=at,
        started=started,
        ended=ended,
        name="all_reduce",
        more="sum",
        dtype="float32",
        shape="(512, 10)",
        file="/home/me/train.py",
        line=88,
    )
    return default._replace(**more)  # type: ignore[arg-type]


def record(*calls: RecordedCall, rank: int = 0, position: Position | None = None) -> FlightRecord:
    return FlightRecord(4711 + rank, rank, 4, 0, list(calls), position)


HERE = Position(99_600_000_000, "/home/me/data.py", 31, "load", None)


def test_what_a_rank_did_last() -> None:
    assert describe_last(record(call(1), position=HERE), NOW) == (
        "last call all_reduce #417 (train.py:88) sum float32 (512, 10), done 31.2 s ago; "
        "its Python stood at data.py:31 in load (0.4 s before)"
    )


def test_each_state_has_its_words() -> None:
    words = {
        "queued": "queued for 40.0 s",
        "started": "under way for 40.0 s",
        "done": "done 31.2 s ago",
        "failed": "failed 31.2 s ago",
    }
    for state, text in words.items():
        assert describe_last(record(call(1, state)), NOW).endswith(f"(512, 10), {text}")


def test_of_queued_calls_the_one_that_they_wait_for_is_told() -> None:
    calls = [call(1), call(2, "started"), call(3, "queued"), call(4, "queued")]
    expected = "last call all_reduce #418 (train.py:88) sum float32 (512, 10), under way for 40.0 s, 2 more queued"
    assert describe_last(record(*calls), NOW) == expected


def test_little_is_known() -> None:
    assert describe_last(record(), NOW) == "no call yet"
    within = HERE._replace(within=("/usr/lib/python3/threading.py", 327, "wait"))
    assert describe_last(record(position=within), NOW) == (
        "no call yet; its Python stood at data.py:31 in load, within threading.py:327 in wait (0.4 s before)"
    )
    barrier = call(1, name="barrier", more="", dtype="", shape="")
    assert describe_last(record(barrier), NOW) == "last call barrier #417 (train.py:88), done 31.2 s ago"
    future = HERE._replace(time=NOW + 5)  # a sample taken after `now` was
    assert describe_last(record(position=future), NOW).endswith("(0.0 s before)")


def test_a_table_of_several_ranks() -> None:
    one = record(call(1), call(2, took=0.009), call(3, "started", name="gather", more="root=1"), rank=1, position=HERE)
    none = record(call(9, "failed", took=2), rank=-1)
    two = record(rank=2)
    text = table([two, one, none], NOW, last=2)
    lines = text.splitlines()
    assert lines[:5] == [
        "rank  pid   call                     dtype    shape      where        communicator  state    begun       took",
        "?     4710  all_reduce #425  sum     float32  (512, 10)  train.py:88  world         failed   40.0 s ago  2 s",
        "1     4712  all_reduce #418  sum     float32  (512, 10)  train.py:88  world         done     40.0 s ago  9 ms",
        "1     4712  gather #419      root=1  float32  (512, 10)  train.py:88  world         started  40.0 s ago",
        "",
    ]
    described = [describe_last(each, NOW) for each in (none, one, two)]
    assert lines[5:] == [
        f"rank ? (pid 4710): {described[0]}",
        f"rank 1 (pid 4712): {described[1]}",
        "rank 2 (pid 4713): no call yet",
    ]
    assert table([record()], NOW) == "rank 0 (pid 4711): no call yet"
    assert len(table([record(*(call(order) for order in range(30)))], NOW).splitlines()) == 1 + 10 + 2
