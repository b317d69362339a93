# SPDX-License-Identifier: Apache-2.0
"""A queue over two hosts that live on: where values lie, and what crosses the network. The tests share it."""

from __future__ import annotations

from typing import Any

import pytest

pytestmark = pytest.mark.programs

ROW = 8192 * 8
SLACK = 200_000
"""Bytes of messages and heartbeats."""


def stored(program: Any) -> list[int]:
    """Samples in the unit of each host."""
    return [samples for samples, _ in program.do("units()").values()]


def more(program: Any, before: list[int]) -> list[int]:
    return [now - then for now, then in zip(stored(program), before, strict=True)]


def test_values_stay_on_the_host_that_produced_them_and_cross_the_network_once(lasting):
    a, b = lasting.hosts
    near, far = lasting.programs
    sent, before = (b.received_nbytes(), a.received_nbytes()), stored(far)
    assert len(far.do("put('p', 64)")) == 64
    assert far.do("get('p', 64, 'own')") == list(range(64))
    assert a.received_nbytes() - sent[1] < SLACK, "what is read where it was produced crosses no network"
    assert near.do("get('p', 64, 'other')") == list(range(64))
    assert 64 * ROW <= a.received_nbytes() - sent[1] < 64 * ROW * 1.1 + SLACK, "each byte crosses once"
    assert b.received_nbytes() - sent[0] < 64 * ROW * 0.1 + SLACK
    assert more(far, before) == [0, 64]


def test_by_the_first_host_s_address_too_values_take_shared_memory_on_their_own_host(lasting, program):
    for at, host in enumerate(lasting.hosts):
        own = program(host, lasting.servers[0].remote)
        before = stored(own)
        own.do(f"put('{host.name}', 64)")
        assert more(own, before)[at] == 64
        assert list(own.do("units()").values())[at][1] == "arena"


def test_the_address_of_a_server_that_joined_leads_to_the_queue_from_both_hosts(lasting, program):
    before = stored(lasting.programs[0])
    for host in lasting.hosts:
        own = program(host, lasting.servers[1].remote)
        own.do(f"put('{host.name}', 8)")
        assert own.do(f"get('{host.name}', 8)") == (list(range(8)))
    assert more(own, before) == [8, 8], "values stay where they were put"


def test_fields_of_one_sample_lie_where_each_was_produced_and_are_read_together(lasting):
    near, far = lasting.programs
    before = stored(near)
    samples = near.do("put('p', 8)")
    assert far.do("put('p', 8, 100, 'y', client.get_meta(['x'], 8, 'p', task_name='reward'))") == samples
    for reader in (near, far):
        both = f"client.get_data(client.get_meta(['x', 'y'], 8, 'p', task_name='{id(reader)}'))"
        read = f"(lambda d: [(d['x'][i][0].item(), d['y'][i][0].item()) for i in range(8)])({both})"
        assert reader.do(read) == [(i, 100 + i) for i in range(8)]
    assert more(near, before) == [8, 8]


def test_values_of_cleared_samples_are_deleted_on_both_hosts(lasting):
    near, far = lasting.programs
    before = stored(near)
    for program in (near, far):
        assert len(program.do("put('p', 8)")) == 8
    assert near.do("client.clear_partition('p')") is None
    assert any(more(near, before) == [0, 0] for _ in range(200))
