# SPDX-License-Identifier: Apache-2.0
"""The recipes for launchers of several hosts: scripts run, manifests and units are valid."""

from __future__ import annotations

import os
import re
import shutil
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import yaml
from slurm_cluster import cluster, missing, path_of

from benchmarks.hosts import missing_privilege, two_hosts

ROOT = Path(__file__).resolve().parents[2]
RECIPES = ROOT / "recipes"
IN_PATH = f"{Path(sys.executable).parent}:{os.environ['PATH']}"
"""With ``lightning-tq`` and ``torchrun``."""
TRAINED = {f"rank {rank} trained 128 samples in 8 steps" for rank in range(2)}


def trained(output: str) -> set[str]:
    return {line for line in output.splitlines() if re.match(r"rank \d+ trained", line)}


@pytest.fixture
def slurm(tmp_path: Path) -> Iterator[dict[str, str]]:
    reason = missing()
    if reason is not None:
        pytest.skip(reason)
    try:
        with cluster(tmp_path) as environment:
            yield environment
    except LookupError as error:
        pytest.skip(str(error))


@pytest.mark.slow
@pytest.mark.timeout(180)
def test_the_slurm_job_trains_on_both_nodes_and_leaves_nothing_running(slurm, tmp_path):
    folder = tmp_path / "project"
    shutil.copytree(RECIPES, folder / "recipes")
    tools = Path(str(path_of("srun"))).parent
    environment = {**slurm, "PATH": f"{IN_PATH}:{tools}", "PYTHONPATH": str(ROOT), "MEMORY": "64MiB"}
    command = [str(path_of("sbatch")), "--wait", "--output=output", "recipes/slurm.sbatch"]
    done = subprocess.run(command, env=environment, cwd=folder, capture_output=True, text=True)
    output = (folder / "output").read_text()
    assert done.returncode == 0, output
    assert trained(output) == TRAINED
    assert [path.name for path in folder.glob("tq-*/*")] == ["members"], "the keys are gone"
    running = subprocess.run(["ps", "-eo", "args"], capture_output=True, text=True, check=True).stdout
    assert str(folder) not in running


def run_torchrun(tmp_path: Path, recipes: Path) -> list[tuple[int, str]]:
    """Exit code and output of each of two nodes."""
    reason = missing_privilege()
    if reason is not None:
        pytest.skip(reason)
    with two_hosts(tmp_path) as hosts:
        (tmp_path / "shared").mkdir()
        common = {"FIRST": hosts[0].address, "NODES": "2", "SHARED": str(tmp_path / "shared"), "PATH": IN_PATH}
        nodes = [
            host.start(str(recipes / "torchrun.sh"), **common, NODE=str(at), GLOO_SOCKET_IFNAME=f"link-{host.name[-1]}")
            for at, host in enumerate(hosts)
        ]
        outputs = [node.communicate()[0] for node in nodes]
        return [(node.returncode, output) for node, output in zip(nodes, outputs, strict=True)]


@pytest.mark.slow
def test_torchrun_s_nodes_train_together_each_with_a_server_and_a_rollout_worker(tmp_path):
    (code, output), (other_code, other_output) = run_torchrun(tmp_path, RECIPES)
    assert (code, other_code) == (0, 0)
    assert trained(output + other_output) == TRAINED
    assert not (tmp_path / "shared" / "keys").exists()


@pytest.mark.slow
def test_torchrun_s_nodes_end_if_a_rollout_worker_fails(tmp_path):
    recipes = tmp_path / "recipes"
    shutil.copytree(RECIPES, recipes)
    (recipes / "rollout.py").write_text("import os, sys\nsys.exit(int(os.environ['NODE']))")
    assert 0 not in [code for code, _ in run_torchrun(tmp_path, recipes)]


def refused(**options: str) -> str:
    """What torchrun.sh says before it starts anything."""
    command = ["bash", str(RECIPES / "torchrun.sh")]
    done = subprocess.run(command, env={"PATH": os.environ["PATH"], **options}, capture_output=True, text=True)
    assert (done.returncode != 0, done.stdout) == (True, "")
    return done.stderr


def test_torchrun_says_which_variable_is_missing(tmp_path):
    assert "SHARED: set SHARED to an empty folder that all nodes see" in refused(FIRST="10.0.0.1", NODE="0", NODES="2")
    assert "NODE: set NODE to the number of this node" in refused(FIRST="10.0.0.1", SHARED=str(tmp_path), NODES="2")


@pytest.mark.parametrize("left", ["address", "failed"])
def test_torchrun_refuses_the_folder_of_an_earlier_run(tmp_path, left):
    (tmp_path / left).touch()
    said = refused(FIRST="10.0.0.1", NODE="0", NODES="2", SHARED=str(tmp_path))
    assert f"{tmp_path} is of an earlier run. Set SHARED to an empty folder" in said


def test_torchrun_s_other_nodes_end_if_node_0_can_t_serve(tmp_path):
    shared = {"FIRST": "127.0.0.1", "NODES": "2", "SHARED": str(tmp_path), "PATH": IN_PATH}
    command = ["bash", str(RECIPES / "torchrun.sh")]
    other = subprocess.Popen(command, env={**shared, "NODE": "1"}, stderr=subprocess.PIPE, text=True)
    first = subprocess.run(command, env={**shared, "NODE": "0", "MEMORY": "nonsense"}, capture_output=True, text=True)
    _, said = other.communicate()
    assert (first.returncode != 0, "memory" in first.stderr, other.returncode) == (True, True, 1)
    assert "another node has failed before node 0 could serve" in said
    assert [path.name for path in tmp_path.iterdir()] == ["failed"], "the keys are gone"


def test_torchrun_s_other_nodes_do_not_wait_for_ever_for_a_node_0_that_never_starts(tmp_path):
    said = refused(FIRST="127.0.0.1", NODES="2", SHARED=str(tmp_path), NODE="1", WAIT_S="0")
    assert "node 0 has not written" in said


@pytest.mark.parametrize("name", ["torchrun.sh", "slurm.sbatch"])
def test_scripts_are_valid(name):
    subprocess.run(["bash", "-n", str(RECIPES / name)], check=True)
    if shutil.which("shellcheck") is not None:
        subprocess.run(["shellcheck", str(RECIPES / name)], check=True)


@pytest.fixture
def manifests() -> list[dict[str, Any]]:
    return list(yaml.safe_load_all((RECIPES / "kubernetes.yaml").read_text()))


def test_the_manifests_follow_the_schemas_of_kubernetes(manifests):
    checker = pytest.importorskip("kubernetes_validate", reason="pip install kubernetes-validate (108 MB of schemas)")
    for manifest in manifests:
        checker.validate(manifest, "1.29", strict=True)


def test_each_pod_s_memory_limits_leave_room_for_the_values(manifests):
    pods = [manifest["spec"]["template"]["spec"] for manifest in manifests if "template" in manifest["spec"]]
    assert len(pods) == 2
    for pod in pods:
        containers = [*pod.get("initContainers", ()), *pod["containers"]]
        (memory,) = re.findall(r"--memory (\d+)GiB", str(containers))
        for container in containers:
            assert int(container["resources"]["limits"]["memory"].removesuffix("Gi")) > int(memory)


def test_pods_meet_the_restricted_standard_for_pod_security(manifests):
    for pod in (manifest["spec"]["template"]["spec"] for manifest in manifests if "template" in manifest["spec"]):
        assert pod["securityContext"]["runAsNonRoot"]
        assert pod["securityContext"]["runAsUser"] > 0
        assert pod["securityContext"]["seccompProfile"] == {"type": "RuntimeDefault"}
        for container in [*pod.get("initContainers", ()), *pod["containers"]]:
            own = {"allowPrivilegeEscalation": False, "capabilities": {"drop": ["ALL"]}}
            assert container["securityContext"] == own


def test_the_unit_is_one_of_systemd_s(tmp_path):
    if shutil.which("systemd-analyze") is None:
        pytest.skip("systemd-analyze is not installed")
    text = (RECIPES / "lightning-tq.service").read_text()
    unit = tmp_path / "lightning-tq.service"
    unit.write_text(text.replace("/opt/lightning-tq/bin/lightning-tq", sys.executable).replace("User=tq", "User=root"))
    done = subprocess.run(["systemd-analyze", "verify", str(unit)], capture_output=True, text=True)
    assert (done.returncode, done.stderr) == (0, "")
