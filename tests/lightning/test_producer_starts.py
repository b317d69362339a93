# SPDX-License-Identifier: Apache-2.0
"""Which producers are said to be starting still."""

from lightning_tq import Producer
from lightning_tq.producers.group import ProducerProcess


def test_a_process_that_has_joined_once_or_is_between_two_starts_is_not_at_its_start() -> None:
    waits = ProducerProcess(Producer(target=["tail", "-f", "/dev/null"], name="feed"), 0, "ipc:///nowhere", None)
    fails = ProducerProcess(Producer(target=["false"], restarts=1), 0, "ipc:///nowhere", None)
    try:
        assert waits.is_starting(["feeder-0_1"])
        assert not waits.is_starting(["feed-0_1"])
        assert not waits.is_starting([])
        fails.popen.wait()
        assert not fails.is_starting([])
    finally:
        for each in (waits, fails):
            each.terminate()
            each.reap()
