# SPDX-License-Identifier: Apache-2.0
"""A queue over two hosts: where values lie, what crosses the network, and what happens if a link or a host is lost."""

from __future__ import annotations

import time

import pytest

from tests.own_processes import SLOW

ROW = 8192 * 8
SLACK = 200_000
"""Bytes of messages and heartbeats."""


def test_values_stay_on_the_host_that_produced_them_and_cross_the_network_once(hosts, two_programs):
    a, b = hosts
    near, far, _ = two_programs
    sent = b.received_nbytes(), a.received_nbytes()
    assert far.do("put('p', 64)") == list(range(64))
    assert far.do("get('p', 64, 'own')") == list(range(64))
    assert a.received_nbytes() - sent[1] < SLACK, "what is read where it was produced crosses no network"
    assert near.do("get('p', 64, 'other')") == list(range(64))
    assert 64 * ROW <= a.received_nbytes() - sent[1] < 64 * ROW * 1.1 + SLACK, "each byte crosses once"
    assert b.received_nbytes() - sent[0] < 64 * ROW * 0.1 + SLACK
    samples = {name: own[0] for name, own in far.do("units()").items()}
    assert sorted(samples.values()) == [0, 64]


def test_by_the_first_host_s_address_too_values_take_shared_memory_on_their_own_host(hosts, program):
    a, b = hosts
    first = a.serve()
    b.serve(first.remote)
    for at, host in enumerate(hosts):
        own = program(host, first.remote)
        own.do(f"put('{host.name}', 64)")
        assert list(own.do("units()").values())[at] == (64, "arena")


def test_the_address_of_a_server_that_joined_leads_to_the_queue_from_both_hosts(hosts, program):
    a, b = hosts
    second = b.serve(a.serve().remote)
    for host in hosts:
        own = program(host, second.remote)
        own.do(f"put('{host.name}', 8)")
        assert own.do(f"get('{host.name}', 8)") == (list(range(8)))
    assert sorted(samples for samples, _ in own.do("units()").values()) == [8, 8], "values stay where they were put"


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


def test_fields_of_one_sample_lie_where_each_was_produced_and_are_read_together(two_programs):
    near, far, _ = two_programs
    assert near.do("put('p', 8)") == list(range(8))
    assert far.do("put('p', 8, 100, 'y', client.get_meta(['x'], 8, 'p', task_name='reward'))") == list(range(8))
    for reader in (near, far):
        both = f"client.get_data(client.get_meta(['x', 'y'], 8, 'p', task_name='{id(reader)}'))"
        read = f"(lambda d: [(d['x'][i][0].item(), d['y'][i][0].item()) for i in range(8)])({both})"
        assert reader.do(read) == [(i, 100 + i) for i in range(8)]
    assert sorted(own[0] for own in near.do("units()").values()) == [8, 8]


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
