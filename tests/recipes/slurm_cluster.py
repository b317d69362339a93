# SPDX-License-Identifier: Apache-2.0
"""A Slurm cluster of two nodes that are both on this machine, with all its files in one directory."""

from __future__ import annotations

import contextlib
import os
import shutil
import socket
import subprocess
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path

PROGRAMS = ("munged", "slurmctld", "slurmd", "sbatch", "srun", "scontrol", "sinfo")
CONFIGURATION = """ClusterName=test
SlurmctldHost={host}(127.0.0.1)
SlurmUser={user}
SlurmdUser={user}
SlurmctldPort={ports[0]}
SlurmctldPidFile={folder}/slurmctld.pid
StateSaveLocation={folder}/state
SlurmdPidFile={folder}/%n/slurmd.pid
SlurmdSpoolDir={folder}/%n
AuthType=auth/munge
AuthInfo=socket={folder}/munge.socket
ProctrackType=proctrack/linuxproc
TaskPlugin=task/none
SelectType=select/linear
SwitchType=switch/none
JobAcctGatherType=jobacct_gather/none
ReturnToService=2
NodeName=n0 NodeHostname={host} NodeAddr=127.0.0.1 Port={ports[1]} CPUs=1
NodeName=n1 NodeHostname={host} NodeAddr=127.0.0.1 Port={ports[2]} CPUs=1
PartitionName=all Nodes=ALL Default=YES MaxTime=INFINITE State=UP
"""


def path_of(program: str) -> str | None:
    """Daemons are often not in the path of users."""
    return shutil.which(program, path=f"{os.environ['PATH']}:/usr/sbin:/usr/local/sbin")


def missing() -> str | None:
    """Why no cluster can be started here; None if one can be tried."""
    lacking = [name for name in PROGRAMS if path_of(name) is None]
    return f"not installed: {', '.join(lacking)} (slurm-wlm, munge)" if lacking else None


@contextmanager
def cluster(folder: Path) -> Iterator[dict[str, str]]:
    """Start one; raises LookupError with the reason if its nodes don't come up. Returns its users' environment."""
    import getpass

    for name in ("state", "n0", "n1"):
        (folder / name).mkdir()
    (folder / "munge.key").touch(0o600)
    (folder / "munge.key").write_bytes(os.urandom(1024))
    user, host = getpass.getuser(), socket.gethostname()
    text = CONFIGURATION.format(folder=folder, user=user, host=host, ports=_free_ports(3))
    (folder / "slurm.conf").write_text(text)
    environment = {**os.environ, "SLURM_CONF": str(folder / "slurm.conf")}
    munge = [f"--{kind}-file={folder}/munge.{kind}" for kind in ("key", "pid", "log", "seed")]
    daemons = [
        ["munged", "--foreground", "--force", f"--socket={folder}/munge.socket", *munge],
        ["slurmctld", "-D"],
        ["slurmd", "-D", "-N", "n0"],
        ["slurmd", "-D", "-N", "n1"],
    ]
    with ExitStack() as stack, (folder / "log").open("w") as log:
        for name, *options in daemons:
            process = subprocess.Popen([str(path_of(name)), *options], env=environment, stdout=log, stderr=log)
            stack.callback(process.wait)
            stack.callback(process.terminate)
        _await_nodes(folder, environment)
        yield environment


def _await_nodes(folder: Path, environment: dict[str, str]) -> None:
    """A step on both nodes waits for them by itself."""
    step = [str(path_of("srun")), "--nodes=2", "true"]
    with contextlib.suppress(subprocess.TimeoutExpired):
        for _ in range(5):  # the controller may not answer yet
            done = subprocess.run(step, env=environment, capture_output=True, timeout=60)
            if done.returncode == 0:
                return
            subprocess.run(["sleep", "1"], check=True)
    raise LookupError(f"Slurm's nodes don't start: {(folder / 'log').read_text()[-500:]}")


def _free_ports(count: int) -> list[int]:
    with ExitStack() as stack:
        sockets = [stack.enter_context(socket.socket()) for _ in range(count)]
        for each in sockets:
            each.bind(("127.0.0.1", 0))
        return [each.getsockname()[1] for each in sockets]
