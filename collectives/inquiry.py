"""Asking a rank on another node what it did last, which nobody there can be asked instead.

Who runs into a time limit asks. In every rank a thread answers once a second, whatever the main thread does meanwhile;
a rank that is stopped, or whose Python never lets go of the GIL, does not answer, and that tells something too.
"""

from __future__ import annotations

import json
import threading
import time
from collections.abc import Callable, Sequence
from typing import Any

from collectives.account import Account

_QUESTION, _ANSWER = 1, 2  # tags beside that of the farewell
_PATIENCE = 2.5  # s; a rank that can answer does so within one period of its thread
_PAUSE = 1e-3  # s


class Inquiry:
    """One rank's questions and answers. Usable from any thread until it is closed.

    comm: MPI's communicator of all ranks of the world, on which nothing else has these tags
    account: what this rank has to say of itself, by a communicator's key
    """

    def __init__(self, MPI: Any, comm: Any, account: Callable[[str], Account]) -> None:
        self._MPI = MPI
        self._comm = comm
        self._account = account
        self._lock = threading.Lock()
        self._asking = threading.Lock()
        self._sent: list[tuple[Any, bytes]] = []  # MPI reads the bytes until they are gone
        self._number = 0
        self._closed = False

    def ask(self, ranks: Sequence[int], communicator: str, patience: float = _PATIENCE) -> dict[int, Account]:
        """What these ranks of the world say, as far as they answer within `patience` seconds."""
        answers: dict[int, Account] = {}
        with self._asking:
            self._number += 1
            for rank in ranks:
                self._send(rank, _QUESTION, {"number": self._number, "communicator": communicator})
            deadline = time.monotonic() + patience
            while len(answers) < len(ranks) and time.monotonic() < deadline:
                for rank, answer in self._receive(_ANSWER):
                    if answer["number"] == self._number:  # not one that came too late for an earlier question
                        answers[rank] = Account(*answer["account"])
                time.sleep(_PAUSE)
        return answers

    def answer(self) -> None:
        """Answers what has been asked; to be called once a second."""
        for rank, question in self._receive(_QUESTION):
            account = self._account(question["communicator"])
            self._send(rank, _ANSWER, {"number": question["number"], "account": account})

    def close(self) -> None:
        """Nothing more is asked or answered: MPI is about to end."""
        self._receive(_QUESTION)
        with self._lock:
            self._closed = True

    def _send(self, rank: int, tag: int, message: object) -> None:
        data = json.dumps(message).encode()
        with self._lock:
            if not self._closed:
                self._sent = [(request, kept) for request, kept in self._sent if not request.Test()]
                self._sent.append((self._comm.Isend([data, self._MPI.BYTE], rank, tag), data))

    def _receive(self, tag: int) -> list[tuple[int, Any]]:
        came: list[tuple[int, Any]] = []
        status = self._MPI.Status()
        with self._lock:
            looks = 0 if self._closed else 2  # the first one may only have MPI fetch what the second one sees
            while looks:
                message = self._comm.Improbe(tag=tag, status=status)
                if message is None:
                    looks -= 1
                    continue
                data = bytearray(status.Get_count(self._MPI.BYTE))
                message.Recv([data, self._MPI.BYTE])  # matched and small: it has arrived
                came.append((status.Get_source(), json.loads(data)))
        return came
