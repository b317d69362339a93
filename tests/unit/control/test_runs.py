# SPDX-License-Identifier: Apache-2.0
"""Runs of processes that depend on each other: whoever is lost is named to all others, and nobody is told too much."""

from __future__ import annotations

from typing import Any

import pytest
from control_kit import ask, refused, send

from transfer_queue import protocol as p


def watch(plane: Any, member: str, opens: bool = False, wait_s: float = 0.0) -> Any:
    return ask(plane, member, p.WatchRun, "run", f"rank {member}", opens, wait_s)


@pytest.fixture
def run(plane: Any) -> Any:
    """A run with the members a, b and c, of which a and b wait."""
    watch(plane, "a", opens=True)
    for member in "bc":
        assert watch(plane, member).value is None
    for member in "ab":
        assert watch(plane, member, wait_s=60.0) is None
    return plane


def told(answers: list[Any]) -> dict[str, str | None]:
    return {to.client: to.reply.value for to in answers}


def test_all_who_wait_are_told_who_was_lost_and_so_is_who_asks_later(run):
    assert told(run.client_gone("c", 1.0, died=False)) == {"a": "rank c", "b": "rank c"}
    assert watch(run, "a", wait_s=60.0).value == "rank c"
    run.client_gone("b", 2.0)
    assert watch(run, "a").value == "rank c", "the first one is the reason"


def test_a_member_that_waits_is_lost_with_its_session(run):
    assert told(run.client_gone("a", 1.0)) == {"b": "rank a"}


@pytest.mark.parametrize("failed", [True, False])
def test_a_member_that_leaves_ends_its_own_wait_and_that_of_others_only_if_it_failed(run, failed):
    answers = told(send(run, "a", p.LeaveRun, "run", failed))
    assert answers == ({"a": "rank a", "b": "rank a"} if failed else {"a": None})
    assert told(run.client_gone("a", 1.0)) == {}


def test_a_run_ends_with_its_last_member(run):
    for member in "abc":
        ask(run, member, p.LeaveRun, "run")
    refused(watch(run, "d"), "InvalidRequestError", "no run 'run'")
    assert watch(run, "d", opens=True).value is None


def test_other_runs_hear_nothing(run):
    ask(run, "d", p.WatchRun, "other", "rank d", True)
    assert ask(run, "d", p.WatchRun, "other", "rank d", False, 60.0) is None
    assert set(told(run.client_gone("c", 1.0))) == {"a", "b"}


def test_a_wait_ends_at_its_deadline(run):
    assert told(run.expire(60.0)) == {"a": None, "b": None}


def test_who_waits_for_a_loss_is_no_waiting_request_of_the_statistics(run):
    assert ask(run, "d", p.GetStats).value["waiting"] == []
