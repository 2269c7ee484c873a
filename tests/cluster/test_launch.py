"""ddp-launch across two hosts by a real ssh: the right world, every failure named, and nothing left on either host."""

from __future__ import annotations

import os
import re
import shlex
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any

import pytest

from launcher.linux import stat_of
from tests.conftest import Ended, Run, wait_until
from tests.launcher.conftest import wait_for

pytestmark = [pytest.mark.long, pytest.mark.mpi, pytest.mark.root, pytest.mark.timeout(200)]

HERE = Path(__file__).parent
WHERE = str(HERE / "where.py")
SCRIPT = str(HERE / "hosts.sh")
IP = shutil.which("ip", path=f"{os.environ.get('PATH', '')}:/usr/sbin:/sbin") or "ip"
FIRST, SECOND, NOBODY = "10.0.0.1", "10.0.0.2", "10.0.0.9"

# The child is one that no process group and no session would find.
WAITING = """
import os, subprocess, time
subprocess.Popen(["sleep", "60"], start_new_session=True)
print("ready", os.environ["RANK"], os.getpid(), os.getppid(), flush=True)
time.sleep(60)
"""
READY = re.compile(r"ready (\d+) (\d+) (\d+)\n")


class Hosts:
    """Two hosts, and who runs on them besides what was there at first."""

    def __init__(self, names: list[str], folder: Path) -> None:
        self.names = names
        self.ssh = str(folder / "ssh")
        self._networks = [os.readlink(f"/proc/{name.removeprefix('host-')}/ns/net") for name in names]
        self._at_first = {pid for host in (0, 1) for pid in self._on(host)}

    def new(self, host: int) -> dict[int, str]:
        """Pid and command line of every process on a host that these tests have brought there."""
        return {pid: text for pid, text in self._on(host).items() if pid not in self._at_first}

    def _on(self, host: int) -> dict[int, str]:
        result = {}
        for entry in Path("/proc").glob("[0-9]*"):
            with suppress(OSError):  # it has ended
                pid = int(entry.name)
                if stat_of(pid).state != "Z" and os.readlink(entry / "ns/net") == self._networks[host]:
                    result[pid] = (entry / "cmdline").read_bytes().replace(b"\0", b" ").decode()
        return result

    def assert_left(self, within: float = 5.0) -> None:
        """Fails if something still runs on one of them `within` seconds from now."""
        deadline = time.monotonic() + within
        while left := {**self.new(0), **self.new(1)}:
            if time.monotonic() > deadline:
                for pid in left:
                    os.kill(pid, signal.SIGKILL)
                pytest.fail(f"left behind: {left}")
            time.sleep(0.05)


@pytest.fixture(scope="module")
def hosts(cluster: Any, tmp_path_factory: Any) -> Hosts:
    """Two hosts with an sshd each."""
    folder = tmp_path_factory.mktemp("ssh")
    names = cluster("hosts.sh", "up", "", str(folder))
    time.sleep(0.5)  # the trial connections end
    return Hosts(names, folder)


@pytest.fixture
def start(hosts: Hosts, mpiexec: Any, start_job: Any) -> Callable[..., Any]:
    """`start(script, ...)` runs it under ddp-launch from the first host, on both."""

    def start(
        *args: str,
        each: int = 1,
        on: tuple[str, ...] = (FIRST, SECOND),
        main: Sequence[str] = ("-m", "launcher"),
        **environ: str,
    ) -> Any:
        words = ["--hosts", ",".join(f"{host}:{each}" for host in on), *args]
        environ |= {"HYDRA_LAUNCHER_EXEC": hosts.ssh, "PRTE_MCA_plm_ssh_agent": hosts.ssh}
        # The hosts share one kernel, and UCX must not find its ways from process to process.
        environ |= {"UCX_TLS": "tcp,self"}
        return start_job([SCRIPT, hosts.names[0], sys.executable, *main, *words], env=environ)

    return start


@pytest.fixture
def run(hosts: Hosts, start: Any) -> Run:
    """The same, to its end, and leaving nothing."""

    def run(*args: str, code: int = 0, **options: Any) -> Ended:
        done = start(*args, **options).wait(60, code=code)
        hosts.assert_left()
        return done

    return run


@pytest.fixture
def script(tmp_path: Path) -> Callable[[str], str]:
    def write(text: str) -> str:
        path = tmp_path / "job.py"
        path.write_text(text)
        return str(path)

    return write


def test_hosts_are_filled_in_order_and_a_rank_knows_its_place(run: Any, hosts: Hosts, script: Any) -> None:
    first, second = hosts.names
    assert run(WHERE).stdout == f"{first}:0: mpi True [[0, 0, 0], [1, 0, 1]]\n"
    names = ("RANK", "WORLD_SIZE", "LOCAL_RANK", "LOCAL_WORLD_SIZE", "NODE_RANK", "FROM_USER")
    done = run("-n", "3", script(f"import os\nprint(*(os.environ[name] for name in {names}))\n"), each=2, FROM_USER="x")
    assert done.lines == sorted([f"{first}:0: 0 3 0 2 0 x", f"{first}:1: 1 3 1 2 0 x", f"{second}:2: 2 3 0 1 1 x"])


def test_the_secret_stands_on_no_command_line(start: Any, hosts: Hosts, script: Any) -> None:
    job = start(script(WAITING))
    wait_for(job.process.stdout, "ready", 2)
    running = {**hosts.new(0), **hosts.new(1)}
    agents = [pid for pid, text in running.items() if "agent/main.py" in text]
    secrets = {
        word.split(b"=", 1)[1].decode()
        for pid in agents
        for word in Path(f"/proc/{pid}/environ").read_bytes().split(b"\0")
        if word.startswith(b"DDP_LAUNCH_SECRET=")
    }
    assert len(secrets) == 1
    assert not [text for text in running.values() if min(secrets) in text]
    job.process.send_signal(signal.SIGINT)
    job.wait(20, code=130)
    hosts.assert_left()


@pytest.mark.parametrize(
    ("victim", "says", "code"),
    [
        ("rank", r"rank {last} on {second} \(pid {pid}\) was killed by SIGKILL .*", 137),
        ("agent", r"the agent of rank {last} on {second} \(pid {pid}\) died, and its rank with it", 1),
        ("reaper", r"the agent of rank {last} on {second} \(pid {pid}\) died, and its rank with it", 1),
        # Open MPI's own mpiexec ends at once when it misses the one on the other host, and may be heard of first.
        ("proxy", r"\S+ on (?:{second}|{first}) \(pid \d+\), which had started the ranks, died", 1),
        ("mpiexec", r"mpiexec \(pid \d+\) was killed by SIGKILL \(signal 9\) while ranks were running", 137),
        ("launcher", None, -9),
    ],
)
def test_whoever_is_killed_all_end(
    start: Any, hosts: Hosts, script: Any, victim: str, says: str | None, code: int
) -> None:
    job = start(script(WAITING), each=2)
    said = wait_for(job.process.stdout, "ready", 4)
    last = 3  # a rank of the second host
    rank, agent = next((int(pid), int(parent)) for n, pid, parent in READY.findall(said) if int(n) == last)
    reaper = stat_of(agent).parent
    assert len([pid for pid, text in hosts.new(1).items() if text == "sleep 60 "]) == 2
    pids = {
        "rank": rank,
        "agent": agent,
        "reaper": reaper,
        "proxy": stat_of(reaper).parent,
        "mpiexec": min(pid for pid, text in hosts.new(0).items() if re.match(r"\S*(mpiexec|prterun) ", text)),
        "launcher": job.process.pid,
    }
    os.kill(pids[victim], signal.SIGKILL)
    start_of_end = time.monotonic()
    done = job.wait(20, code=code)
    hosts.assert_left()
    assert time.monotonic() - start_of_end < 5
    if says is not None:
        first, second = hosts.names
        told = says.format(first=first, second=second, last=last, pid=pids[victim])
        assert re.fullmatch("ddp-launch: " + told, done.last)


@pytest.mark.parametrize(
    ("name", "why"), [(NOBODY, "No route to host"), ("no.such.host", "(Temporary failure in name|Name or service).*")]
)
def test_a_host_that_cannot_be_reached_is_named(run: Any, script: Any, name: str, why: str) -> None:
    done = run(script("print('started')"), on=(FIRST, name), code=2)
    assert re.fullmatch(rf"ddp-launch: host {name} cannot be reached by ssh: {why}\n", done.stderr)


@pytest.fixture
def cable(hosts: Hosts) -> Iterator[Callable[[str], None]]:
    """`cable("down")` pulls the cable between the hosts, `cable("up")` puts it back, as the end of a test does."""

    def put(state: str) -> None:
        host = hosts.names[1].removeprefix("host-")
        subprocess.run(["nsenter", "--target", host, "--net", IP, "link", "set", "eth0", state], check=True)

    yield put
    put("up")


TRAINING = """
import sys, time
import numpy as np
import collectives
comm = collectives.init(timeout=float(sys.argv[1]))
print("ready", flush=True)
while True:
    comm.all_reduce(np.ones(1000))
    time.sleep(0.01)
"""


@pytest.mark.parametrize(
    ("timeout", "limit"),
    [(600, 8), (15, 30)],  # the time limit of a collective may run out first
)
def test_a_pulled_cable_ends_the_job_on_both_sides(
    start: Any, hosts: Hosts, script: Any, cable: Any, timeout: int, limit: int
) -> None:
    job = start("--heartbeat-timeout", str(limit), script(TRAINING), str(timeout))
    wait_for(job.process.stdout, "ready", 2)
    cable("down")
    pulled = time.monotonic()
    _, err = job.process.communicate(timeout=min(timeout, limit) + 20)
    assert job.process.returncode == 1, err
    last = err.splitlines()[-1]
    assert re.match(rf"ddp-launch: lost host {hosts.names[1]} with rank 1: no heartbeat for \d+(\.\d)? s, so", last), (
        err
    )
    # The ranks there end, too, though nothing can reach them.
    while ours := [text for text in hosts.new(1).values() if "agent/main.py" in text]:
        assert time.monotonic() < pulled + 45, ours
        time.sleep(0.1)
    cable("up")
    hosts.assert_left(within=30)


@pytest.mark.parametrize("loss", ["agent", "network"])
def test_a_restart_does_without_a_host_that_is_lost(
    start: Any, hosts: Hosts, script: Any, cable: Any, loss: str
) -> None:
    body = (
        "import os, signal, time\n"
        "attempt, rank = os.environ['DDP_ATTEMPT'], os.environ['RANK']\n"
        "print('ready', flush=True)\n"
        f"if attempt == '0' and rank == '1' and {loss == 'agent'}:\n"
        "    time.sleep(0.5)\n"
        "    os.kill(os.getppid(), signal.SIGKILL)\n"
        "if attempt == '0': time.sleep(60)\n"
        "print('world', os.environ['WORLD_SIZE'])\n"
    )
    job = start("--max-restarts", "1", "--min-ranks", "1", "--heartbeat-timeout", "6", script(body))
    seen = wait_for(job.process.stdout, "ready", 2)
    if loss == "network":
        cable("down")
    out, err = job.process.communicate(timeout=60)
    cable("up")
    hosts.assert_left(within=30)  # whoever was cut off learns of the end by TCP's next attempt
    assert job.process.returncode == 0, err
    assert (seen + out).splitlines()[-1].endswith(":0: world 1")
    assert f"ddp-launch: restart 1 of 1, without {SECOND}: 1 rank\n" in err


# The ranks of the first start have copied their state, those of the second train and copy nothing.
WITHOUT_COPIES = """
import os, time
from collectives.world import report
report(**({"resizable": 0} if os.environ["DDP_ATTEMPT"] == "1" else {"held": 1}))
print("ready", os.environ["RANK"], os.getpid(), os.getppid(), flush=True)
time.sleep(60)
"""


def test_agents_that_hold_the_state_do_not_stay_for_ever_for_ranks_that_copy_nothing(
    start: Any, hosts: Hosts, script: Any
) -> None:
    limit = "from launcher.supervisor.environment import StateMemory; StateMemory.copy_limit = 5.0"
    main = "from launcher.__main__ import main; main()"
    job = start("--max-restarts", "1", script(WITHOUT_COPIES), main=["-c", shlex.quote(f"{limit}; {main}")])

    def ready() -> dict[str, tuple[int, int]]:
        """Pid and agent by rank."""
        seen = READY.findall(wait_for(job.process.stdout, "ready", 2, timeout=60))
        return {rank: (int(pid), int(agent)) for rank, pid, agent in seen}

    before = ready()
    os.kill(before["0"][0], signal.SIGKILL)
    agents = [before["1"][1], ready()["1"][1]]
    assert all(stat_of(agent).state for agent in agents)
    wait_until(lambda: not stat_of(agents[0]).state)
    assert stat_of(agents[1]).state
    assert job.process.poll() is None
    job.process.send_signal(signal.SIGTERM)
    job.wait(15)
    hosts.assert_left()


# Each host sees its own memory alone: the two share one /proc.
ELASTIC = """
import hashlib, os, signal, sys, time
from collectives.world import STATE_MEMORY

def is_here(slot):
    try:
        return os.readlink("/proc/" + slot.partition("/")[0] + "/ns/uts") == os.readlink("/proc/self/ns/uts")
    except OSError:
        return False

token, *slots = os.environ.get(STATE_MEMORY, "").split() or [""]
os.environ[STATE_MEMORY] = " ".join([token, *(slot if is_here(slot) else "0/fd/0" for slot in slots)] if slots else [])

import collectives, ddp
from ddp import nn
from ddp.nn import functional as F

folder, kind, events = sys.argv[1], sys.argv[2], sys.argv[3:]
comm = collectives.init(timeout=30)
ddp.manual_seed(3)
data = ddp.data.TensorDataset(ddp.arange(48), ddp.randn(48, 6), ddp.randint(3, (48,)))
loader = ddp.data.DataLoader(data, 4, sampler=ddp.data.DistributedSampler(data, seed=2, micro_batches=2))
net = nn.Sequential(nn.Linear(6, 8), nn.BatchNorm1d(8), nn.ReLU(), nn.Dropout(0.3), nn.Linear(8, 3))
model = ddp.DataParallel(net, micro_batches=2)
if kind == "zero":
    adam = ddp.parallel.ZeroOptimizer(model, ddp.optim.AdamW, lr=0.01)
else:
    adam = ddp.optim.AdamW(model.parameters(), lr=0.01)
ckpt = ddp.checkpoint.Checkpointer(f"{folder}/run", model=model, optimizer=adam, memory_every=1)
began = None
for ids, x, t in ckpt.resume(loader, epochs=20):
    F.cross_entropy(model(x), t).backward()
    if model.accumulating:
        continue
    adam.step()
    adam.zero_grad()
    if began is None:
        began = ckpt.step
        print("began", comm.size, began, flush=True)
    done = len(os.listdir(f"{folder}/done"))
    if events and comm.size == 1:
        time.sleep(0.25)
    elif ckpt.step == began + 3 and done < len(events):
        victim, rank = events[done].split("-")
        comm.barrier()
        if comm.rank == int(rank):
            os.mkdir(f"{folder}/done/{ckpt.step}")
            os.kill(os.getpid() if victim == "rank" else os.getppid(), signal.SIGKILL)
        time.sleep(30)
state = b"".join(value.numpy().tobytes() for value in model.state_dict().values())
if comm.rank == 0:
    open(f"{folder}/sha256", "w").write(hashlib.sha256(state).hexdigest())
"""


@pytest.mark.timeout(300)
@pytest.mark.parametrize(
    "kind_and_events",
    ["adam rank-1", "adam agent-1 rank-0", "adam agent-0 rank-1", "zero agent-1 rank-0", "zero agent-0 rank-1"],
)
def test_hosts_go_and_come_back_and_the_state_stays_in_memory(
    start: Any, hosts: Hosts, script: Any, tmp_path: Path, kind_and_events: str
) -> None:
    kind, *events = kind_and_events.split()
    path = script(ELASTIC)
    for name in ("whole/done", "elastic/done"):
        (tmp_path / name).mkdir(parents=True)
    start(path, str(tmp_path / "whole"), kind, on=(FIRST,)).wait(60, code=0)
    job = start("--max-restarts", "3", "--min-ranks", "1", path, str(tmp_path / "elastic"), kind, *events)
    done = job.wait(180, code=0)
    hosts.assert_left()
    began = [tuple(map(int, line.split()[-2:])) for line in done.stdout.splitlines() if "began" in line]
    kills = sorted(int(name) for name in os.listdir(tmp_path / "elastic/done"))
    # Nothing was saved on disk before the end, and the step in which a rank was killed is made again.
    assert [name for name in os.listdir(tmp_path / "elastic/run") if name.startswith("step-")] == ["step-0000000120"]
    assert {step for _, step in began} >= set(kills), (began, done.stderr)
    assert "no state in memory" not in done.stderr
    if len(events) > 1:
        assert "resized from 1 to 2 ranks after step" in done.stderr
    assert (tmp_path / "elastic/sha256").read_text() == (tmp_path / "whole/sha256").read_text()
