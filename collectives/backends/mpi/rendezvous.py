"""Rendezvous: how ranks that were not started by an MPI engine find each other, by environment variables.

torchrun, Kubernetes' PyTorchJob, Ray and others set RANK, WORLD_SIZE, MASTER_ADDR and MASTER_PORT, and start plain
processes. Rank 0 starts a PMI server (`pmi_server`) at one of the ports after MASTER_PORT. MASTER_PORT itself may be in
use by the launcher's own store.
All ranks connect to the server, and wait here, in Python, until the last has joined. Only then do they call MPI_Init,
which can neither be interrupted nor say which ranks are missing.
"""

from __future__ import annotations

import contextlib
import hashlib
import logging
import os
import socket
import subprocess
import sys
import time
from collections.abc import Iterator, Mapping

from collectives.backends.mpi import pmi_server
from collectives.errors import WorldError, name_ranks
from collectives.handshake import is_proof, nonce, proof
from collectives.world import World

_log = logging.getLogger("collectives")

#: A secret that only ranks of this job know, with the same value on every host. The user sets it. When ranks meet by a
#: store of PyTorch, `collectives.torch` sets it to a value from that store.
SECRET = "DDP_JOB_SECRET"
#: Set to 1 by the user: everyone who can reach rank 0's host over the network may join the job.
TRUST = "DDP_TRUST_NETWORK"
# Number of ports that are tried in turn, since other programs may use some.
_PORTS = 16
# Time limit of connecting, and of each answer in a handshake (s). The PMI server answers at once; another program at
# the port may not answer.
_HANDSHAKE = 2.0
# How long to retry if the server says that this rank has joined already (s): the server may belong to an earlier start
# of the job, and end soon.
_TAKEN = 3.0
# After this time a waiting rank 0 logs which ranks are missing (s).
_WARN_AFTER = 10.0
# How long rank 0 waits at its exit for the other ranks, which need the server until they have finalized MPI (s).
_LEAVE = 10.0
# Prefixes of an outer engine's variables. They describe the launcher's process, and not this one.
_FOREIGN = ("PMI_", "PMIX_", "MPI_LOCAL")

#: Host and port.
Address = tuple[str, int]


def addresses(world: World, environ: Mapping[str, str]) -> list[Address]:
    """The addresses where the server may listen, the first choice first. Raises: WorldError if variables are invalid.

    >>> world = World("environment", 1, 4, 1, 2)
    >>> addresses(world, {"MASTER_ADDR": "node1", "MASTER_PORT": "29500"})[:2]
    [('node1', 29501), ('node1', 29502)]
    """
    if not 0 <= world.rank < world.size:
        raise WorldError(f"RANK should be from 0 to {world.size - 1} (WORLD_SIZE is {world.size}), is {world.rank}")
    host = environ.get("MASTER_ADDR", "")
    port = environ.get("MASTER_PORT", "")
    if not host or not port.isdecimal() or not 0 < int(port) < 1 << 16:
        raise WorldError(
            f"rank {world.rank} of {world.size}: RANK and WORLD_SIZE are set and no MPI engine has started this "
            f"process, so MASTER_ADDR and MASTER_PORT must say where rank 0 is; they are {host!r} and {port!r}. "
            "Or start with ddp-launch or mpiexec"
        )
    if world.local_size == world.size:  # All ranks are on this host.
        host = "localhost"
    # Ports below 1024 are the system's, so port 65535 is followed by 1024.
    return [(host, 1024 + (int(port) - 1024 + number) % (0x10000 - 1024)) for number in range(1, _PORTS + 1)]


def secret(world: World, environ: Mapping[str, str]) -> bytes:
    """The key with which ranks of this start of the job authenticate, derived from variables that all ranks share.

    Without the user's own secret, the key is easily guessed: torchrun's run id, for example, is "none" by default.
    torchrun's restart count is included so that no rank joins a server of an earlier start. MASTER_ADDR is not
    included, since it may be another name of rank 0's host on each host.

    Raises: what `addresses` raises; WorldError if the ranks meet over an untrusted network and have no secret.
    """
    host, _ = addresses(world, environ)[0]
    if not (_is_loopback(host) or environ.get(SECRET) or environ.get(TRUST) == "1"):
        raise WorldError(
            f"rank {world.rank} of {world.size}: the ranks meet over the network, at {host}, and without a secret "
            f"anyone there could join the job. Set {SECRET} to the same random value on every host "
            f"(python -c 'import secrets; print(secrets.token_hex())'), or {TRUST}=1 on every host if all who can "
            "reach them are trusted"
        )
    names = (SECRET, "TORCHELASTIC_RUN_ID", "TORCHELASTIC_RESTART_COUNT", "WORLD_SIZE", "MASTER_PORT")
    return hashlib.sha256("\0".join(environ.get(name, "") for name in names).encode()).digest()


@contextlib.contextmanager
def settings(variables: Mapping[str, str]) -> Iterator[None]:
    """Sets environment variables while MPI starts, and removes them afterwards. Variables set by the user are kept."""
    added = [name for name in variables if name not in os.environ]
    os.environ.update((name, variables[name]) for name in added)
    try:
        yield
    finally:
        for name in added:
            os.environ.pop(name, None)


class Rendezvous:
    """This rank's connection to the PMI server of a job. Its creation waits until all ranks have joined.

    Raises: WorldError if not all ranks have joined after `timeout` seconds, rank 0 ends before that or cannot start the
    server, this rank cannot find the server, or has joined already; what `secret` raises.
    """

    def __init__(self, world: World, timeout: float, environ: Mapping[str, str] = os.environ) -> None:
        self._world = world
        self._name = f"rank {world.rank} of {world.size}"
        self._timeout = timeout
        self._deadline = time.monotonic() + timeout
        self._addresses = addresses(world, environ)
        self._secret = secret(world, environ)
        self._partial_line = b""
        self._missing: list[int] | None = []  # None: all ranks have joined.
        self._died: set[int] = set()
        self._server: subprocess.Popen[bytes] | None = None
        self._control: socket.socket | None = None
        try:
            if world.rank == 0:
                self._serve()
            self._control = self._connect(pmi_server.CONTROL)
            self._wait()
            self._deadline = max(self._deadline, time.monotonic() + _HANDSHAKE)
            self._pmi = self._connect(pmi_server.PMI)
            self._pmi.settimeout(None)
        except BaseException:
            self._end()
            raise
        # A forked child must not keep the connection open: when it closes, the other ranks learn that this rank died.
        os.register_at_fork(after_in_child=self._control.close)

    def environment(self) -> contextlib.AbstractContextManager[None]:
        """Removes an outer engine's variables. Returns: a context that sets variables by which MPI finds the server."""
        for name in [name for name in os.environ if name.startswith(_FOREIGN)]:
            del os.environ[name]
        return settings(
            {
                "PMI_FD": str(self._pmi.fileno()),
                "PMI_RANK": str(self._world.rank),
                "PMI_SIZE": str(self._world.size),
            }
        )

    def died(self) -> set[int]:
        """The ranks that have ended without leaving, as far as is known now."""
        with contextlib.suppress(EOFError):
            while self._receive(0.0):
                pass
            return self._died
        if self._world.rank:  # The server has ended, as it does when rank 0 ends.
            self._died.add(0)
        return self._died

    def _receive(self, timeout: float) -> bool:
        """Waits `timeout` s for messages of the server. Returns: whether any came. Raises: EOFError if it has ended."""
        assert self._control is not None
        try:
            self._control.settimeout(timeout)
            data = self._control.recv(1 << 12)
        except (TimeoutError, BlockingIOError):
            return False
        except OSError:
            data = b""
        if not data:
            raise EOFError
        *lines, self._partial_line = (self._partial_line + data).split(b"\n")
        for line in lines:
            word, *numbers = line.decode().split()
            ranks = [int(number) for number in numbers]
            if word == "died":
                self._died.update(ranks)
            else:
                self._missing = ranks if word == "missing" else None
        return True

    def leave(self) -> None:
        """Tells the server that this rank has finalized MPI. Rank 0 then waits for the other ranks, at most 10 s."""
        assert self._control is not None
        self._answer_finalize()
        with contextlib.suppress(OSError):
            self._control.send(b"left\n")
        if self._server is not None:
            with contextlib.suppress(subprocess.TimeoutExpired):
                self._server.wait(_LEAVE)
        self._end()

    def _end(self) -> None:
        if self._control is not None:
            self._control.close()
        if self._server is not None:
            self._server.kill()
            self._server.wait()

    def _answer_finalize(self) -> None:
        """Prepares an answer for MPICH: some versions send their server a request at exit, and crash without an answer.

        The connection's descriptor is replaced by a socket of this process that already contains the answer.
        """
        reading, writing = socket.socketpair()
        writing.sendall(pmi_server.FINALIZED.encode() + b"\n")
        os.dup2(reading.detach(), self._pmi.fileno())
        self._pmi.detach()  # Both sockets stay open until the process ends.
        writing.detach()

    def _serve(self) -> None:
        for address in self._addresses:
            try:
                listener = _listen(*address)
                break
            except OSError as error:
                reason = error
        else:
            raise WorldError(f"{self._name}: no free port for the other ranks to connect to ({reason})")
        with listener:
            # -I and -S: only the standard library and this package, whatever the user's variables and folders contain.
            options = [sys.executable, "-I", "-S", pmi_server.__file__]
            numbers = [str(listener.fileno()), str(self._world.size), str(os.getpid())]
            try:
                self._server = subprocess.Popen(
                    [*options, *numbers], stdin=subprocess.PIPE, stdout=subprocess.DEVNULL, pass_fds=[listener.fileno()]
                )
            except OSError as error:
                raise WorldError(f"rank 0 cannot start its PMI server, {' '.join(options)}: {error}") from None
        assert self._server.stdin is not None
        with contextlib.suppress(BrokenPipeError), self._server.stdin as stdin:  # _connect reports a dead server.
            stdin.write(self._secret)

    def _connect(self, role: str) -> socket.socket:
        taken_until = time.monotonic() + _TAKEN
        pause = 0.02
        while True:
            reasons: dict[str, None] = {}
            for host, port in self._addresses:
                try:  # Rank 0 reaches its own server by "localhost", also if MASTER_ADDR cannot be reached from here.
                    sock, answer = self._greet(("localhost" if self._world.rank == 0 else host, port), role)
                except (OSError, ValueError) as error:
                    reasons[str(getattr(error, "strerror", None) or error)] = None
                    continue
                if answer == "welcome":
                    self._addresses = [(host, port)]  # The second connection must go to the same server.
                    return sock
                sock.close()
                if time.monotonic() > taken_until:
                    raise WorldError(
                        f"{self._name} has joined already: RANK must be another in every process, and a process that a "
                        "rank starts is no rank"
                    )
                reasons["this rank has joined already"] = None
            if self._server is not None and self._server.poll() is not None:
                raise WorldError(f"rank 0's PMI server ended at once, with exit status {self._server.returncode}")
            if time.monotonic() > self._deadline:
                host, first = self._addresses[0]
                _, last = self._addresses[-1]
                raise WorldError(
                    f"{self._name} has not found rank 0 at {host}, ports {first} to {last}, within {self._timeout:g} s "
                    f"({'; '.join(reasons)}): rank 0 must call collectives.init() too, the hosts must reach each "
                    f"other, and WORLD_SIZE, MASTER_PORT, TORCHELASTIC_RUN_ID and {SECRET} must be the same everywhere"
                )
            time.sleep(pause)
            pause = min(2 * pause, 0.5)

    def _greet(self, address: Address, role: str) -> tuple[socket.socket, str]:
        """A connection to this job's server, and the server's answer, "welcome" or "taken".

        Raises: OSError, ValueError if this job's server does not answer at `address`.
        """
        sock = socket.create_connection(address, _HANDSHAKE)
        try:
            sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
            banner, _, challenge = pmi_server.read_line(sock, _HANDSHAKE).partition(" ")
            if banner != pmi_server.BANNER:
                raise ValueError("another program answers")
            own_challenge = nonce()
            rank = str(self._world.rank)
            answer = proof(self._secret, "rank", role, rank, own_challenge, challenge)
            sock.sendall(f"{role} {rank} {own_challenge} {answer}\n".encode())
            server_proof, _, decision = pmi_server.read_line(sock, _HANDSHAKE).partition(" ")
            if not is_proof(server_proof, self._secret, "server", own_challenge):
                raise ValueError("another job answers, or one with another secret")
        except BaseException:
            sock.close()
            raise
        return sock, decision

    def _wait(self) -> None:
        """Waits until all ranks have joined."""
        warn_at = min(time.monotonic() + _WARN_AFTER, self._deadline)
        while self._missing is not None:
            try:
                self._receive(max(0.01, warn_at - time.monotonic()))
            except EOFError:
                # The server may have reported rank 0 as missing, too, before the server itself ended.
                missing = name_ranks([rank for rank in self._missing if rank != 0])
                raise WorldError(
                    f"{self._name}: rank 0 ended while ranks were joining; {missing} had not come"
                ) from None
            if self._missing is None or (now := time.monotonic()) < warn_at:
                continue
            missing = name_ranks(self._missing)
            if now > self._deadline:
                raise WorldError(
                    f"{self._name}: {missing} did not come within {self._timeout:g} s: look at their output"
                )
            warn_at = self._deadline
            if self._world.rank == 0:
                _log.warning("%s waits for %s", self._name, missing)


def _listen(host: str, port: int) -> socket.socket:
    if _is_loopback(host):
        family = socket.AF_INET6 if ":" in host else socket.AF_INET
        return socket.create_server((host, port), family=family, backlog=1024)
    dual = socket.has_dualstack_ipv6()
    family = socket.AF_INET6 if dual else socket.AF_INET
    return socket.create_server(("", port), family=family, backlog=1024, dualstack_ipv6=dual)


def _is_loopback(host: str) -> bool:
    return host in ("localhost", "::1") or host.startswith("127.")
