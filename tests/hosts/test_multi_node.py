# SPDX-License-Identifier: Apache-2.0
"""A Lightning run on two hosts: who reads what, a resume, and a rank that is lost. Each host has its own processes."""

from __future__ import annotations

import json
import signal
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import psutil
import pytest

from tests.own_processes import SLOW

SCRIPT = str(Path(__file__).with_name("training.py"))
Ranks = tuple[subprocess.Popen[str], subprocess.Popen[str]]
Steps = list[Any]
"""[optimizer step, rows] of each batch of a rank."""


@pytest.fixture
def served(nodes: Any) -> list[dict[str, str]]:
    """A server on each host. For each: the environment that leads its ranks to the queue."""
    first = nodes[0].host.serve()
    second = nodes[1].host.serve(first.remote)
    return [{"TQ_ADDRESS": first.local}, {"TQ_ADDRESS": second.local}]


@pytest.fixture
def train(nodes: Any, tmp_path: Path) -> Callable[..., Ranks]:
    """Start a training on both hosts: ``train([environment of each], *options)``."""

    def start(environments: Any, *options: str) -> Ranks:
        first, second = (
            node.start(sys.executable, SCRIPT, str(tmp_path), *options, **environment)
            for node, environment in zip(nodes, environments, strict=True)
        )
        return first, second

    return start


def ended(node: subprocess.Popen[str]) -> tuple[int, str]:
    """The exit code of a node, and what it printed from here on."""
    output, _ = node.communicate(timeout=80.0 * SLOW)
    return node.returncode, output


def check_done(ranks: Ranks) -> list[str]:
    outputs = [ended(node) for node in ranks]
    assert [code for code, _ in outputs] == [0, 0], "\n=====\n".join(output[-6000:] for _, output in outputs)
    return [output for _, output in outputs]


def trained(folder: Path) -> list[Steps]:
    """By rank."""
    paths = sorted(folder.glob("rank*.jsonl"), key=lambda path: int(path.stem.removeprefix("rank")))
    return [[json.loads(line) for line in path.read_text().splitlines()] for path in paths]


def expected(steps: int, ranks: int) -> list[Steps]:
    """Rounds of four rows for every rank, in order."""
    starts = [[4 * (ranks * step + rank) for step in range(steps)] for rank in range(ranks)]
    return [[[step, list(range(start, start + 4))] for step, start in enumerate(own)] for own in starts]


def rank_of(node: subprocess.Popen[str]) -> psutil.Process:
    """The process that trains."""
    found = psutil.Process(node.pid).children(recursive=True)
    return next(each for each in found if each.cmdline()[1:2] == [SCRIPT])


def wait_for(node: subprocess.Popen[str], text: str) -> None:
    assert node.stdout is not None
    lines = []
    for line in node.stdout:
        if text in line:
            return
        lines.append(line)
    raise AssertionError("".join(lines))


@pytest.mark.programs
@pytest.mark.parametrize(
    "options", [[], pytest.param(["--devices", "2", "--workers", "2"], marks=pytest.mark.slow)], ids=["1", "2"]
)
def test_ranks_of_two_hosts_share_the_samples_in_lockstep(served, train, tmp_path, options):
    outputs = check_done(train(served, "--rows", "37", *options))
    size = 4 if options else 2
    assert trained(tmp_path) == expected(37 // (4 * size), size), "every rank has its own, and equally many"
    assert f"{37 % (4 * size)} samples of partition 'train' could not fill a last round" in outputs[0]


@pytest.mark.slow  # ranks of one host are killed in test_rank_watchdog
@pytest.mark.parametrize("victim", [1, 0])
def test_a_rank_that_is_killed_ends_one_of_another_host_that_waits_for_data(served, train, victim):
    ranks = train(served, "--rows", "16", "--no-seal")
    for rank, node in enumerate(ranks):
        wait_for(node, f"rank {rank} waits")
    rank_of(ranks[victim]).send_signal(signal.SIGKILL)
    code, output = ended(ranks[1 - victim])
    assert code == 1
    assert f"RankGoneError: rank {victim} (pid " in output
    assert f"failed or ended in the middle of the run, so rank {1 - victim} ends too" in output


@pytest.mark.slow
def test_a_rank_that_fails_ends_the_other_host_s(served, train):
    ranks = train(served, "--rows", "16", "--no-seal", "--fail", "0", "1")
    (code, output), (other_code, other_output) = (ended(node) for node in ranks)
    assert (code, other_code) == (1, 1)
    assert "ValueError: failed on request" in output
    assert "RankGoneError: rank 0 (pid " in other_output


@pytest.mark.slow
def test_a_host_that_vanishes_ends_the_ranks_of_the_other_once_its_lease_is_over(nodes, served, train):
    ranks = train(served, "--rows", "16", "--no-seal")
    for rank, node in enumerate(ranks):
        wait_for(node, f"rank {rank} waits")
    nodes[1].host.vanish()
    code, output = ended(ranks[0])
    assert code == 1
    assert "RankGoneError: rank 1 (pid " in output


@pytest.mark.slow
@pytest.mark.parametrize("victim", [0, 1])
def test_a_run_resumes_from_a_checkpoint_with_the_same_samples(served, train, tmp_path, victim):
    codes = [ended(node)[0] for node in train(served, "--rows", "40", "--save-every", "2", "--kill", f"{victim}", "3")]
    assert 0 not in codes
    assert [steps[:3] for steps in trained(tmp_path)] == expected(3, 2)
    for path in tmp_path.glob("rank*"):
        path.unlink()
    check_done(train(served, "--save-every", "2"))
    assert trained(tmp_path) == [steps[2:] for steps in expected(5, 2)], "from the checkpoint of step 2 on"


@pytest.mark.slow
def test_a_queue_that_other_hosts_can_not_reach_is_an_error_on_every_rank_that_says_what_to_do(train):
    outputs = [ended(node) for node in train([{}, {}])]
    assert [code for code, _ in outputs] == [1, 1]
    assert "rank 1 can't take part" in outputs[0][1]
    for _, output in outputs:
        assert "serves its own host only. Run 'lightning-tq serve --listen' on every host" in output


@pytest.mark.slow
def test_a_queue_of_the_first_rank_that_listens_is_found_by_ranks_of_both_hosts(train, tmp_path):
    settings = {"listen": "tcp://0.0.0.0:0", "key_file": str(tmp_path / "keys")}
    check_done(train([{}, {}], "--devices", "2", "--rows", "32", "--queue", json.dumps(settings)))
    assert trained(tmp_path) == expected(2, 4)


@pytest.mark.slow
def test_ranks_in_different_queues_are_refused(nodes, train):
    servers = [node.host.serve() for node in nodes]
    outputs = [ended(node) for node in train([{"TQ_ADDRESS": server.local} for server in servers])]
    assert [code for code, _ in outputs] == [1, 1]
    assert "the first rank in another one" in outputs[0][1]
