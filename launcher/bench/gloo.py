"""PyTorch's gloo, what DDP on CPUs would use: torch.distributed, on tensors that share the buffers' memory."""

from __future__ import annotations

import os
import socket
from typing import Any

import numpy as np

from launcher.bench.contestants import Call, OnHost, ping_pong
from launcher.bench.kinds import ROOT, Kind, partner
from launcher.bench.raw_mpi import MPIMeeting


class Gloo(OnHost):
    """torch.distributed with gloo, over a process group of its own."""

    name = "torch-gloo"
    refusals: tuple[type[Exception], ...] = (NotImplementedError, RuntimeError, TypeError, ValueError)

    def __init__(self, meeting: MPIMeeting, rank: int, size: int, one_node: bool) -> None:
        import torch
        import torch.distributed

        self._torch: Any = torch
        self._dist: Any = torch.distributed
        dist = self._dist
        self._rank, self._size = rank, size
        if one_node:
            os.environ.setdefault("GLOO_SOCKET_IFNAME", "lo")
        host = "127.0.0.1" if one_node else socket.gethostname()
        store = dist.TCPStore(host, 0, size, True, wait_for_workers=False) if rank == 0 else None
        host, _, port = meeting.tell(f"{host} {store.port}" if store is not None else "").partition(" ")
        if store is None:
            store = dist.TCPStore(host, int(port), size, False)
        dist.init_process_group("gloo", store=store, rank=rank, world_size=size)

    def bind(self, kind: Kind, x: Any, out: Any, op: str) -> Call:
        dist = self._dist
        if kind.reduces and op == "mean":
            raise NotImplementedError("gloo has no mean")
        in_place = out is None or (x is not None and np.shares_memory(x, out))
        if kind.name in ("all_reduce", "reduce") and not in_place:
            raise NotImplementedError("torch.distributed reduces in place")
        ops = dist.ReduceOp
        operator = {"sum": ops.SUM, "prod": ops.PRODUCT, "max": ops.MAX, "min": ops.MIN}.get(op)
        sent, into = self._tensor(x), self._tensor(out)
        root = self._rank == ROOT
        size = self._size
        parts = list(into.chunk(size)) if kind.out == "whole" else list(sent.chunk(size)) if kind.x == "whole" else []
        calls: dict[str, Call] = {
            "all_reduce": lambda: dist.all_reduce(sent, operator),
            "reduce": lambda: dist.reduce(sent, ROOT, operator),
            "broadcast": lambda: dist.broadcast(sent, ROOT),
            "gather": lambda: dist.gather(sent, parts if root else None, ROOT),
            "scatter": lambda: dist.scatter(into, parts if root else None, ROOT),
            "all_gather": lambda: dist.all_gather(parts, sent),
            "reduce_scatter": lambda: dist.reduce_scatter(into, parts, operator),
            "all_to_all": lambda: dist.all_to_all_single(into, sent),
            "barrier": dist.barrier,
        }
        if kind.name != "send_recv":
            return calls[kind.name]
        other = partner(self._rank, size)
        return ping_pong(self._rank, other, lambda: dist.send(sent, other), lambda: dist.recv(into, other))

    def close(self) -> None:
        self._dist.destroy_process_group()

    def _tensor(self, array: Any) -> Any:
        if array is None:
            return None
        if array.dtype.name == "bfloat16":  # which torch.from_numpy does not know
            return self._torch.from_numpy(array.view(np.int16)).view(self._torch.bfloat16)
        return self._torch.from_numpy(array)
