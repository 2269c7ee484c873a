"""Questions and answers between ranks, over a mailbox instead of MPI."""

from __future__ import annotations

import json
import threading
import time
from typing import Any

from collectives.account import Account
from collectives.inquiry import Inquiry

QUESTION, ANSWER = 1, 2


class Status:
    source = count = 0

    def Get_source(self) -> int:
        return self.source

    def Get_count(self, kind: object) -> int:
        return self.count


class FakeMPI:
    BYTE = "byte"
    Status = Status


class Sent:
    def Test(self) -> bool:
        return True


class Mailbox:
    """One rank's end of MPI's communicator. posts: rank → what has been sent to it, as (source, tag, bytes)"""

    def __init__(self, rank: int, posts: dict[int, list[tuple[int, int, bytes]]]) -> None:
        self.rank, self.posts = rank, posts
        self.looks = 0

    def Isend(self, message: list[Any], rank: int, tag: int) -> Sent:
        self.posts[rank].append((self.rank, tag, message[0]))
        return Sent()

    def Improbe(self, *, tag: int, status: Status) -> Any:
        self.looks += 1
        for post in self.posts[self.rank]:
            if post[1] == tag:
                self.posts[self.rank].remove(post)
                status.source, status.count = post[0], len(post[2])
                return Matched(post[2])
        return None


class Matched:
    def __init__(self, data: bytes) -> None:
        self._data = data

    def Recv(self, room: list[Any]) -> None:
        room[0][:] = self._data


def inquiries(size: int) -> tuple[list[Inquiry], dict[int, list[tuple[int, int, bytes]]]]:
    posts: dict[int, list[tuple[int, int, bytes]]] = {rank: [] for rank in range(size)}
    made = [
        Inquiry(FakeMPI, Mailbox(rank, posts), lambda key, rank=rank: Account(rank, "", f"{key} of {rank}"))
        for rank in range(size)
    ]
    return made, posts


def test_who_answers_is_heard_and_who_does_not_ends_the_patience() -> None:
    (asker, answerer, _), _ = inquiries(3)
    over = threading.Event()

    def answer() -> None:
        while not over.wait(0.01):
            answerer.answer()

    thread = threading.Thread(target=answer)
    thread.start()
    start = time.monotonic()
    assert asker.ask([1], "world", patience=20) == {1: Account(1, "", "world of 1")}
    assert asker.ask([1, 2], "world.0", patience=0.3) == {1: Account(1, "", "world.0 of 1")}
    assert 0.3 < time.monotonic() - start < 15
    over.set()
    thread.join()


def test_an_answer_to_an_earlier_question_is_none_to_this_one() -> None:
    (asker, answerer), posts = inquiries(2)
    assert asker.ask([1], "world", patience=0.01) == {}
    answerer.answer()
    assert asker.ask([1], "world.0", patience=0.01) == {}
    assert posts[0] == []
    assert [json.loads(data)["number"] for _, tag, data in posts[1] if tag == QUESTION] == [2]


def test_once_closed_nothing_is_sent_or_looked_for() -> None:
    (asker, answerer), posts = inquiries(2)
    asker.ask([1], "world", patience=0.0)
    answerer.close()
    assert posts[1] == []  # MPI ends more surely with nothing unread
    asker.ask([1], "world", patience=0.0)
    answerer.answer()
    assert posts[0] == []
    assert len(posts[1]) == 1


def test_nobody_is_waited_for_if_nobody_is_asked() -> None:
    (asker,), _ = inquiries(1)
    start = time.monotonic()
    assert asker.ask([], "world") == {}
    assert time.monotonic() - start < 1
