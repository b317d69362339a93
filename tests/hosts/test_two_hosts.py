# SPDX-License-Identifier: Apache-2.0
"""A queue over two hosts: where values lie, what crosses the network, and what happens if a link or a host is lost."""

from __future__ import annotations

import time

import pytest

from tests.own_processes import SLOW

pytestmark = pytest.mark.programs


def test_values_of_a_host_whose_server_is_killed_are_missed_within_seconds(hosts, two_programs):
    near, far, second = two_programs
    far.do("put('p', 4)")
    second.process.kill()
    near.begin("get('p', 4, timeout_s=30.0)")
    kind, text = near.result()
    assert kind in ("UnitLostError", "QueueUnreachableError"), text
    waiting = "[time.sleep(0.1) for _ in iter(lambda: bool(client.get_lost_samples('p')), True)]"
    started = time.monotonic()
    near.do(f"(lambda time: {waiting})(__import__('time'))")
    assert time.monotonic() - started < 10.0 * SLOW, "a lease of 15 s is for those that are silent"
    assert near.do("client.get_lost_samples('p')") == {"x": [0, 1, 2, 3]}


def test_a_full_host_is_routed_around_and_all_of_it_comes_back(hosts, program):
    a, b = hosts
    first = a.serve(memory="8MiB")
    b.serve(first.remote, memory="8MiB")
    near = program(a, first.local)
    for start in range(0, 192, 16):
        near.do(f"put('p', 16, {start})")
    assert near.do("get('p', 192)") == list(range(192))
    assert near.do("client.clear_partition('p')") is None
    assert near.do("put('q', 120)") == list(range(192, 312)), "what was cleared leaves room on both hosts"


def test_a_host_that_leaves_takes_its_values_along_by_name_and_everything_else_goes_on(two_programs):
    near, far, second = two_programs
    near.do("put('p', 4)")
    far.do("put('p', 4, 4)")
    assert second.stop() == 0
    assert near.do("client.get_lost_samples('p')") == {"x": [4, 5, 6, 7]}
    assert near.do("get('p', 4)") == [0, 1, 2, 3]
    assert near.do("client.get_production_status(['x'], 'p')[1].flatten().tolist()") == [1] * 4 + [0] * 4
    far.do("put('p', 4, 4, 'x', client.get_meta(None, None, 'p', mode='force_fetch').select_samples([4, 5, 6, 7]))")
    assert near.do("get('p', 4)") == [4, 5, 6, 7]
    assert near.do("client.get_lost_samples('p')") == {}


@pytest.mark.slow
def test_a_link_that_is_cut_for_ten_seconds_loses_nothing(hosts, two_programs):
    a, b = hosts
    near, far, _ = two_programs
    far.do("put('p', 16)")
    b.cut()
    far.begin("[put('p', 16, start) for start in (16, 32, 48)]")
    near.begin("get('p', 64, timeout_s=100.0)")
    a.start("sleep", "10").wait()
    b.heal()
    assert len(far.result()) == 3
    assert near.result() == list(range(64))
    assert near.do("client.get_lost_samples('p')") == {}


@pytest.mark.slow
def test_the_first_connection_to_a_host_waits_while_its_link_is_cut_for_some_seconds(hosts, two_programs):
    a, b = hosts
    near, far, _ = two_programs
    far.do("put('p', 4)")
    b.cut()
    near.begin("get('p', 4, timeout_s=60.0)")
    a.start("sleep", "7").wait()
    b.heal()
    assert near.result() == [0, 1, 2, 3]


@pytest.mark.slow
def test_a_program_that_was_cut_off_for_longer_than_its_lease_comes_back(hosts, program):
    a, b = hosts
    first = a.serve()
    far = program(b, first.remote)
    far.do("put('before', 4)")
    b.cut()
    a.start("sleep", "20").wait()
    b.heal()
    far.do("client.get_partition_list()")  # it may be told now that its session has ended
    assert far.do("len(put('p', 4))") == 4
    assert far.do("get('p', 4)") == list(range(4))


@pytest.mark.slow
def test_a_host_that_vanishes_is_missed_after_its_lease_and_everything_else_goes_on(hosts, two_programs):
    _, b = hosts
    near, far, _ = two_programs
    near.do("put('p', 4)")
    far.do("put('p', 4, 4)")
    b.vanish()
    near.begin("get('p', 8, timeout_s=30.0)")
    kind, text = near.result()
    assert kind in ("UnitLostError", "QueueUnreachableError"), text
    waiting = "[time.sleep(0.1) for _ in iter(lambda: bool(client.get_lost_samples('p')), True)]"
    near.do(f"(lambda time: {waiting})(__import__('time'))")
    assert near.do("client.get_lost_samples('p')") == {"x": [4, 5, 6, 7]}
    near.do("put('p', 4, 4, 'x', client.get_meta(None, None, 'p', mode='force_fetch').select_samples([4, 5, 6, 7]))")
    assert near.do("get('p', 8, 'again')") == list(range(8))


def test_a_stream_waits_for_values_that_were_lost_with_a_host_until_they_are_put_again(two_programs):
    near, far, second = two_programs
    far.do("put('p', 8)")
    near.do("client.seal_partition('p')")
    assert near.do("stream('p', 4)") == [0, 1, 2, 3]
    assert second.stop() == 0
    near.begin("stream('p', 4)")
    far.do("client.get_stats()")
    far.do("put('p', 8, 0, 'x', client.get_meta(None, None, 'p', mode='force_fetch'))")
    assert near.result() == [4, 5, 6, 7]
