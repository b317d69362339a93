# SPDX-License-Identifier: Apache-2.0
"""Watchdog: foreign code that holds the server for too long is named."""

from __future__ import annotations

import logging
import threading

from transfer_queue.server.watchdog import Alarms, Watchdog

# ---- the rule, with the time passed in ----


def test_what_runs_for_too_long_is_an_alarm_that_grows_while_it_runs():
    alarms = Alarms(held_s=2.0)
    looks = [alarms.look("MySampler", now) for now in (10.0, 11.9, 12.0, 13.0)]
    assert looks == [False, False, True, False]
    assert alarms.latest(14.5) == [{"number": 1, "what": "MySampler", "held_s": 3.0, "seen_s_ago": 1.5}]


def test_what_ends_in_time_is_none():
    alarms = Alarms(held_s=2.0)
    assert [alarms.look(running, now) for running, now in (("a", 0.0), (None, 1.0), ("a", 2.0), ("a", 3.5))] == 4 * [
        False
    ]
    assert alarms.latest(9.0) == []


def test_another_one_begins_anew():
    alarms = Alarms(held_s=2.0)
    looks = [alarms.look(running, now) for running, now in (("a", 0.0), ("b", 1.0), ("b", 2.5), ("b", 3.0), ("a", 3.5))]
    assert looks == [False, False, False, True, False]


def test_the_same_one_that_holds_the_server_twice_is_two_alarms():
    alarms = Alarms(held_s=1.0)
    for running, now in (("a", 0.0), ("a", 1.0), (None, 2.0), ("a", 3.0), ("a", 6.0)):
        alarms.look(running, now)
    assert [alarm["held_s"] for alarm in alarms.latest(6.0)] == [1.0, 3.0]


def test_the_latest_sixteen_are_remembered():
    alarms = Alarms(held_s=1.0)
    for n in range(20):
        alarms.look(f"s{n}", 2.0 * n)
        alarms.look(f"s{n}", 2.0 * n + 1.0)
    assert [(alarm["number"], alarm["what"]) for alarm in alarms.latest(50.0)] == [
        (n + 1, f"s{n}") for n in range(4, 20)
    ]


# ---- the thread ----


class Looks:
    """What runs, and how often the watchdog has looked."""

    def __init__(self) -> None:
        self.running: str | None = None
        self._count = 0
        self._changed = threading.Condition()

    def __call__(self) -> str | None:
        with self._changed:
            self._count += 1
            self._changed.notify_all()
            return self.running

    def wait_for_more(self, count: int) -> None:
        with self._changed:
            until = self._count + count
            assert self._changed.wait_for(lambda: self._count >= until, 10.0)


def test_the_thread_looks_again_and_again_and_warns_once(caplog):
    looks = Looks()
    looks.running = "MySampler of task 't'"
    with caplog.at_level(logging.WARNING):
        watchdog = Watchdog(looks, held_s=0.0, look_every_s=0.001)
        looks.wait_for_more(4)
        watchdog.close()
    assert [alarm["what"] for alarm in watchdog.alarms()] == ["MySampler of task 't'"]
    assert [record.message for record in caplog.records] == [
        "MySampler of task 't' has held the server for more than 0.0 s: nobody else is served."
    ]


def test_a_closed_watchdog_has_no_thread_and_keeps_its_alarms():
    looks = Looks()
    watchdog = Watchdog(looks, held_s=0.0, look_every_s=0.001)
    looks.wait_for_more(1)
    watchdog.close()
    watchdog.close()
    assert "tq-watchdog" not in [thread.name for thread in threading.enumerate()]
    assert watchdog.alarms() == []


def test_a_watchdog_that_is_closed_at_once_does_not_wait_for_its_next_look():
    watchdog = Watchdog(lambda: None, look_every_s=1e6)
    watchdog.close()
    assert watchdog.alarms() == []
