# SPDX-License-Identifier: Apache-2.0
"""Readers of a queue that is restored while they read: their tokens, their place, the end of their pass."""

from __future__ import annotations

from control_kit import ACTOR, ack, batch, fetch, indexes, load, put, register, save, send

from transfer_queue import protocol as p


def test_a_late_ack_of_a_batch_that_the_restored_queue_never_gave_settles_nothing(plane):
    register(plane)
    put(plane, 8)
    kept = fetch(plane, 4, 0, 0)
    state = save(plane)
    late, other = fetch(plane, 4, 0, 1), fetch(plane, 8, 0, 0, task="other")
    load(plane, state)
    again = fetch(plane, 4, 0, 1), fetch(plane, 8, 0, 0, task="other")
    assert (ack(plane, late.token), ack(plane, other.token, task="other")) == (0, 0)
    load(plane, save(plane))
    load(plane, state)
    assert ack(plane, again[0].token) == 0
    assert ack(plane, kept.token) == 1, "what was saved keeps its token"


def test_a_reader_goes_on_in_a_partition_that_was_restored_meanwhile(plane):
    put(plane, 6)
    token, state = fetch(plane, 2, 0, 0).token, save(plane)
    for _ in "ab":
        load(plane, state)
        again = fetch(plane, 2, 0, 1, after=token)
        assert batch(plane, 2, 0, 2, after=again.token) == [index + 2 for index in indexes(again)]
    send(plane, ACTOR, p.ClearPartition, "p")
    assert isinstance(fetch(plane, 2, 0, 2, after=again.token), p.Ended)


def test_where_a_pass_of_a_finite_stream_ended_is_as_it_was(plane, make_plane):
    one_pass = {"finite": True, "dp_size": 1, "pass_start": 0}
    put(plane, 1)
    assert [type(fetch(plane, 1, 0, at, **one_pass)) for at in range(2)] == [p.Batch, p.Ended]
    restored = make_plane()
    load(restored, save(plane))
    put(restored, 1)
    assert isinstance(fetch(restored, 1, 0, 1, **one_pass), p.Ended)
    assert batch(restored, 1, 0, 1, finite=True, dp_size=1, pass_start=1) == [2**32 + 1]
