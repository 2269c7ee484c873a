"""The Dockerfile and the manifests of Kubernetes, as far as they can be checked without Docker and a cluster."""

from __future__ import annotations

import configparser
import json
import re
import shlex
import shutil
import subprocess
from pathlib import Path
from typing import Any

import pytest

from launcher.cli import parse
from launcher.network import Host
from tests.conftest import ROOT

FOLDER = ROOT / "configs/kubernetes"
DOCKERFILE = (ROOT / "Dockerfile").read_text()


def manifest(name: str) -> Any:
    return pytest.importorskip("yaml").safe_load((FOLDER / name).read_text())


@pytest.mark.parametrize("name", ["runtime.yaml", "trainjob.yaml"])
def test_manifests_are_of_the_published_schema(name: str) -> None:
    """Its part that they use; a field that is not among it is to be added to the copy of the schema."""
    schema = json.loads((ROOT / "tests/kubeflow_trainer.json").read_text())
    result = manifest(name)
    pytest.importorskip("jsonschema").validate(result, schema[result["kind"]])
    with pytest.raises(Exception, match="'sped' was unexpected"):
        pytest.importorskip("jsonschema").validate({**result, "sped": {}}, schema[result["kind"]])


def test_the_parts_of_a_job_find_each_other(tmp_path: Path) -> None:
    runtime, job = manifest("runtime.yaml"), manifest("trainjob.yaml")
    assert job["spec"]["runtimeRef"]["name"] == runtime["metadata"]["name"]
    replicated = runtime["spec"]["template"]["spec"]["replicatedJobs"]
    node, launcher = (each["template"]["spec"]["template"]["spec"] for each in replicated)
    keys = runtime["spec"]["mlPolicy"]["mpi"]["sshAuthMountPath"]
    user = f"--uid {node['securityContext']['runAsUser']} {Path(keys).parent.name}"
    port = node["containers"][0]["readinessProbe"]["tcpSocket"]["port"]
    config = node["containers"][0]["command"][-1]
    assert f"useradd --create-home {user}" in DOCKERFILE
    assert f"COPY configs/kubernetes/sshd_config {config}\n" in DOCKERFILE
    for name in ("ssh_config", "sshd_config"):
        text = (FOLDER / name).read_text()
        assert f"Port {port}\n" in text
        assert set(re.findall(r"/home/\S+/\.ssh", text)) == {keys}
    assert node["volumes"] == launcher["volumes"]
    # What the job runs is a command of ddp-launch, which reads the list of pods as Trainer writes it.
    hosts = [f"digits-{pod}.digits" for pod in ("launcher-0-0", "node-0-0", "node-0-1", "node-0-2")]
    (tmp_path / "hostfile").write_text("".join(f"{host} slots=2\n" for host in hosts))
    command, *arguments = job["spec"]["trainer"]["command"]
    assert command == "ddp-launch"
    result = parse([argument.replace("/etc/mpi", str(tmp_path)) for argument in arguments])
    assert (result.hosts, result.script) == (tuple(Host(host, 2) for host in hosts), "examples/resume_digits.py")
    assert result.grace < launcher["terminationGracePeriodSeconds"]


@pytest.mark.skipif(shutil.which("ssh") is None, reason="needs OpenSSH")
def test_ssh_knows_a_pod_by_the_key_of_the_job() -> None:
    done = subprocess.run(["ssh", "-G", "-F", str(FOLDER / "ssh_config"), "pod"], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    options = dict(line.partition(" ")[::2] for line in done.stdout.splitlines())
    assert (options["port"], options["stricthostkeychecking"]) == ("2222", "true")
    public = "ecdsa-sha2-nistp521 AAAA"
    command = shlex.split(options["knownhostscommand"])[:-1]
    known = subprocess.run(command, input=public, capture_output=True, text=True, check=True)
    assert known.stdout.strip() == f"* {public}"


def test_the_dockerfile_copies_what_there_is_and_installs_extras_that_exist() -> None:
    setup = configparser.ConfigParser()
    setup.read(ROOT / "setup.cfg")
    copied = set()
    for line in re.findall(r"^COPY (?!--from)(.*)$", DOCKERFILE, re.M):
        *sources, _ = [word for word in shlex.split(line) if not word.startswith("--")]
        copied |= set(sources)
    assert [path for path in copied if not (ROOT / path).exists()] == []
    packages = {each.rstrip("*") for each in setup["options.packages.find"]["include"].split()}
    assert {*packages, "setup.py", "setup.cfg", "pyproject.toml", "README.md", "LICENSE"} <= copied
    [extras] = re.findall(r"^ARG EXTRAS=(.*)$", DOCKERFILE, re.M)
    assert {*extras.split(","), "cuda12", "cuda13"} <= set(setup["options.extras_require"])
