# SPDX-License-Identifier: Apache-2.0
"""Front: a put is one turn, whatever it writes to; one that fails or is cancelled at any step leaves nothing."""

from __future__ import annotations

from typing import Any

import msgspec
import pytest

from tests.local_plane import tags_of
from tests.unit.server.front_kit import (
    NBYTES,
    NOTHING,
    PAGE,
    Client,
    Got,
    Held,
    apart,
    batch_of,
    failed,
    front_of,
    held,
    is_lease,
    is_written,
    samples_of,
    specs,
)
from transfer_queue import protocol as p


def stored(samples: int, nbytes: int = NBYTES) -> Held:
    """So many visible samples, and nothing else."""
    return Held(samples=samples, values=samples, held_nbytes=samples * nbytes)


# ---- one turn ----


def test_a_put_of_new_samples_is_reserved_stored_and_published_in_one_turn(me, other, front):
    answer = me.put([7, 8])
    assert answer == [Got("me", p.Reserved(1, p.pack_indexes([0, 1])))]
    assert batch_of(other.send(other.fetch(2))[0]) == {0: 7, 1: 8}


def test_a_put_onto_existing_samples_replaces_their_values(me, other, front):
    samples = me.stored([7, 8])
    ((_, reply, _),) = me.put([9, 9], me.check(samples))
    assert reply == p.Done(2, {})
    me.send(p.ListPartitions(me.number()), received=[1, 2])
    assert (me.values(samples), held(front)) == ({0: 9, 1: 9}, stored(2))


def test_a_put_by_keys_makes_samples_for_new_keys_and_writes_to_those_of_known_ones(me):
    (first,) = me.put([7], me.keys("a"), {0: {"n": 1}})
    (second,) = me.put([8, 9], me.keys("b", "a"))
    assert (samples_of(first.reply), tags_of(first.reply), samples_of(second.reply)) == ([0], {0: {"n": 1}}, [1, 0])
    assert me.values([0, 1]) == {0: 9, 1: 8}


def test_tags_alone_are_published_without_a_write(me, front):
    samples = me.stored([7])
    begin = p.CheckFields(me.number(), "p", p.pack_indexes(samples), {})
    assert me.one(p.Put(begin.id, begin, {0: {"n": 1}})) == p.Done(2, {})
    ((_, described, _),) = me.send(p.Describe(me.number(), "p", ["x"]))
    assert tags_of(described) == {0: {"n": 1}}


def test_tags_of_a_put_go_by_its_rows(me, other):
    me.stored([1, 2, 3])
    me.put([7, 8], tags={1: {"n": 8}})
    (batch,) = other.send(other.fetch(5))
    assert tags_of(batch.reply) == {4: {"n": 8}}


def test_a_put_answers_the_fetch_that_waits_for_it_with_its_values(me, other):
    assert other.send(other.fetch(2, wait_s=5.0)) == []
    own, batch = me.put([7, 8])
    assert (own.client, batch.client, batch_of(batch)) == ("me", "other", {0: 7, 1: 8})


def test_a_fetch_that_waited_is_answered_before_the_put_that_decides_it(me, other, front):
    other.send(other.fetch(2, wait_s=5.0))
    put, frames = me.a_put([7, 8])
    answers = me.send_raw(p.encode_request(put), frames, number=7)
    assert [answer.client for answer in answers] == ["other", "me"]


def test_a_put_by_key_answers_the_fetch_that_waits_for_it_with_the_new_values(me, other):
    me.stored([1])
    assert other.send(other.fetch(2, wait_s=5.0)) == []
    own, batch = me.put([7], me.keys("a"))
    assert (own.client, batch_of(batch)) == ("me", {0: 1, 1: 7})


def test_a_large_put_takes_the_memory_that_it_leased(me):
    front = front_of(pages=16)
    writer = Client(front, "writer")
    put = writer.put_leased([0, 0])
    assert samples_of(writer.one(put)) == [0, 1]
    assert held(front) == Held(2, 1, 0, 2, 2 * PAGE)


# ---- one effect ----


def repeated(client: Client, put: tuple[p.Put, list[bytes]]) -> tuple[list[Got], list[Got]]:
    return client.send(*put), client.send(*put)


@pytest.mark.parametrize("kind", ["new", "existing", "keys"])
def test_the_same_put_again_gets_the_same_answer_and_has_one_effect(me, other, front, kind):
    samples = me.stored([1, 2])
    begin = {"new": None, "existing": me.check(samples), "keys": me.keys("a", "b")}[kind]
    first, again = repeated(me, me.a_put([7, 8], begin))
    assert again == first
    assert isinstance(first[0].reply, (p.Reserved, p.Done, p.Batch))
    assert (held(front).samples, held(front).uncommitted_nbytes) == (2 if kind == "existing" else 4, 0)


def test_a_put_that_waits_and_comes_again_is_answered_once_on_the_later_way(other):
    front = front_of(capacity=2)
    me, clearer = Client(front, "me"), Client(front, "clearer")
    clearer.stored([1, 2])
    put = me.a_put([7], wait_s=5.0)
    assert repeated(me, put) == ([], [])
    cleared, own = clearer.send(p.ClearPartition(clearer.number(), "p"))
    assert (samples_of(cleared.reply), own) == ([0, 1], Got("me", p.Reserved(1, p.pack_indexes([2]))))


def test_new_samples_of_a_complete_put_are_deleted_when_it_is_cancelled(me, other, front):
    me.put([7, 8])
    assert me.one(p.Cancel(me.number(), 1)) == p.Done(2, "undone")
    assert held(front) == NOTHING
    assert isinstance(other.send(other.fetch(1))[0].reply, p.NotReady)


def test_a_complete_put_stays_when_its_session_ends(me, front):
    samples = me.stored([7])
    me.gone()
    assert (Client(front, "late").values(samples), held(front)) == ({0: 7}, stored(1))


def given_to_a_task(me: Client, other: Client) -> None:
    other.send(other.fetch(1))


def written_to(me: Client, other: Client) -> None:
    fields = {"y": p.FieldSpec("uint8", (1,))}
    begin = p.CheckFields(other.number(), "p", p.pack_indexes([0]), fields)
    other.one(begin)
    other.one(p.Publish(other.number(), "p", p.pack_indexes([0]), fields, completes=begin.id))


def sealed(me: Client, other: Client) -> None:
    other.one(p.SealPartition(other.number(), "p"))


def received(me: Client, other: Client) -> None:
    me.send(p.ListPartitions(me.number()), received=[1])


@pytest.mark.parametrize("happened", [given_to_a_task, written_to, sealed, received])
def test_a_complete_put_stays_as_a_whole_although_it_is_cancelled_once(me, other, front, happened):
    me.put([7, 8])
    happened(me, other)
    assert me.one(p.Cancel(me.number(), 1)).value == "kept"
    assert me.values([0, 1]) == {0: 7, 1: 8}


@pytest.mark.parametrize(("is_given", "left"), [(False, []), (True, [1])])
def test_rows_of_a_lease_are_deleted_when_their_put_is_cancelled_unless_a_task_was_given_them(
    me, other, is_given, left
):
    me.put([1], p.ResolveKeys(me.number(), "p", ["head"], True, True, specs(), 0.0, ["x"], p.Terms(parts=1)))
    (lease,) = me.one(p.LeaseGroups(me.number(), ["p"])).leases
    begin = p.Reserve(me.number(), "p", 1, specs(), 0.0, p.Members(lease.token, lease.head, lease.parts))
    me.put([7], begin)
    if is_given:
        other.send(other.fetch(1))
    me.cancel(begin.id)
    assert samples_of(me.one(p.Describe(me.number(), "p", ["x"]))) == left


# ---- a failure at any step ----


def wrong_dtype(client: Client) -> tuple[p.Put, list[bytes]]:
    put, frames = client.a_put([7])
    fields = {"x": p.FieldSpec("int64", (4,))}
    return msgspec.structs.replace(put, begin=msgspec.structs.replace(put.begin, fields=fields)), frames


def too_few_rows(client: Client) -> tuple[p.Put, list[bytes]]:
    return client.a_put([7, 8], client.reserve(1))


def unknown_lease(client: Client) -> tuple[p.Put, list[bytes]]:
    return client.put_leased([7], lease=99), []


def tags_of_rows_beyond(client: Client) -> tuple[p.Put, list[bytes]]:
    return client.a_put([7], tags={5: {"n": 1}})


def columns_that_are_none(client: Client) -> tuple[p.Put, list[bytes]]:
    put, frames = client.a_put([7])
    return msgspec.structs.replace(put, write=b"nonsense"), frames


def another_number(client: Client) -> tuple[p.Put, list[bytes]]:
    put, frames = client.a_put([7])
    return msgspec.structs.replace(put, id=client.number()), frames


BAD_PUTS = {
    "reserve": (wrong_dtype, "SchemaConflictError"),
    "write": (too_few_rows, "ProtocolError"),
    "write, of a lease": (unknown_lease, "ProtocolError"),
    "publish": (tags_of_rows_beyond, "InvalidRequestError"),
    "columns": (columns_that_are_none, "ProtocolError"),
    "number": (another_number, "ProtocolError"),
}


@pytest.mark.parametrize("name", BAD_PUTS)
def test_a_put_that_fails_at_any_step_leaves_nothing_and_others_are_served(me, other, front, name):
    make, code = BAD_PUTS[name]
    me.send(p.CreatePartition(me.number(), "p", None, {"x": p.DeclaredField("uint8")}))
    me.stored([1])
    me.send(p.ListPartitions(me.number()), received=[1, 2])
    before = held(front)
    (answer,) = me.send(*make(me))
    assert isinstance(answer.reply, p.Failed), answer
    assert (answer.reply.code, held(front)) == (code, before)
    other.stored([2])


@pytest.mark.parametrize("kind", ["new", "existing", "keys"])
def test_a_put_whose_write_fails_leaves_no_sample_no_key_and_no_value(me, front, kind):
    samples = me.stored([1])
    me.send(p.ListPartitions(me.number()), received=[1])
    begin = {"new": me.reserve(1), "existing": me.check(samples), "keys": me.keys("a")}[kind]
    (answer,) = me.put([7, 8, 9], begin)
    failed(answer, "ProtocolError")
    assert (held(front), me.values(samples)) == (stored(1), {0: 1})
    assert me.one(p.ListKeys(me.number(), "p")).keys == {"p": {}}


def test_a_put_whose_lease_was_not_used_gives_it_back():
    front = front_of(pages=16)
    me = Client(front, "me")
    put = me.put_leased([0, 0])
    bad = msgspec.structs.replace(put.begin, count=0)
    failed(me.send(msgspec.structs.replace(put, begin=bad))[0], "InvalidRequestError", "at least one sample")
    assert held(front) == NOTHING


def test_a_put_to_a_server_without_storage_or_without_a_controller_is_refused():
    for front in apart(front_of()):
        me = Client(front, "me")
        failed(me.put([7])[0], "ProtocolError", "does not serve Put")


# ---- waiting for room ----


@pytest.fixture
def few() -> Any:
    """Room for three samples."""
    return front_of(capacity=3)


@pytest.fixture
def small() -> Any:
    """Room for the values of three samples."""
    return front_of(capacity_bytes=3 * NBYTES)


@pytest.fixture(params=["samples", "bytes"])
def full(request, few, small) -> Any:
    """No room, of either kind: samples 0 to 2 are there."""
    front = few if request.param == "samples" else small
    filler = Client(front, "filler")
    filler.stored([1, 2, 3])
    filler.send(p.ListPartitions(filler.number()), received=[1])
    return front


def clear(front: Any, *samples: int, now: float = 0.0) -> list[Got]:
    """The answers of others that the clear brings about."""
    client = Client(front, "clearer")
    own, *others = client.send(p.ClearSamples(client.number(), "p", p.pack_indexes(samples)), now=now)
    assert samples_of(own.reply) == list(samples)
    client.gone(now)
    return others


def test_a_put_without_room_is_carried_on_by_the_clear_that_makes_room(full):
    me = Client(full, "me")
    assert me.put([7, 8], wait_s=5.0) == []
    assert clear(full, 0) == []
    ((client, reply, _),) = clear(full, 1)
    samples = samples_of(reply)
    assert (client, me.values(samples)) == ("me", dict(zip(samples, [7, 8], strict=True)))
    assert held(full)._replace(held_nbytes=0) == Held(3, 1, 0, 3, 0), (
        "few dead bytes may stay where samples are bounded"
    )


def test_what_a_put_that_waits_writes_is_given_to_the_fetch_that_waits_for_it(full):
    me, reader = Client(full, "me"), Client(full, "reader")
    me.put([7], wait_s=5.0)
    assert reader.send(reader.fetch(4, wait_s=9.0)) == []
    assert [sorted(batch_of(answer).values()) for answer in reader.send(reader.fetch(3, task="u"))] == [[1, 2, 3]]
    own, *rest = clear(full, 0)
    assert (own.client, rest) == ("me", [])
    assert sorted(batch_of(reader.send(reader.fetch(3, task="v"))[0]).values()) == [2, 3, 7]


def test_a_put_that_waited_too_long_fails_and_leaves_nothing(full):
    me, before = Client(full, "me"), held(full)
    assert me.put([7], wait_s=5.0, now=1.0) == []
    assert full.next_deadline() == 6.0
    (answer,) = [Got(out.envelope.client, p.decode_reply(out.header)) for out in full.expire(6.0)]
    failed(answer, "StorageFullError", "waited 5.0 s")
    assert (answer.client, held(full)) == ("me", before)


def test_a_put_waits_no_longer_in_all_than_it_asked_for_where_it_waits_for_samples_and_then_for_bytes():
    front = front_of(capacity=3, capacity_bytes=3 * NBYTES)
    filler, me = Client(front, "filler"), Client(front, "me")
    filler.stored([1, 2, 3])
    assert me.put([7], nbytes=2 * NBYTES, wait_s=5.0, now=0.0) == []
    assert clear(front, 0, now=3.0) == []
    assert (held(front).parked, front.next_deadline()) == (1, 5.0)


@pytest.mark.parametrize("leave", ["cancel", "gone"])
def test_a_put_that_is_cancelled_while_it_waits_leaves_nothing_and_lets_in_the_next(full, leave):
    me, other, before = Client(full, "me"), Client(full, "other"), held(full)
    assert me.put([7, 8], wait_s=5.0) == []
    assert other.put([9, 9, 9], wait_s=5.0) == []
    assert (me.cancel(1) if leave == "cancel" else me.gone()) == []
    assert clear(full, 0, 1) == []
    ((client, _, _),) = clear(full, 2)
    other.gone()
    assert (client, held(full)) == ("other", before)


def test_a_put_that_waits_to_be_written_to_samples_that_are_cleared_fails(small):
    filler, me = Client(small, "filler"), Client(small, "me")
    filler.stored([1, 2, 3])
    assert me.put([7], me.check([0], nbytes=2 * NBYTES), nbytes=2 * NBYTES) != [], "it may not wait"
    begin = msgspec.structs.replace(me.check([0], nbytes=2 * NBYTES), wait_s=5.0)
    assert me.put([7], begin, nbytes=2 * NBYTES) == []
    (answer,) = clear(small, 0)
    failed(answer, "SampleClearedError")
    me.gone()
    filler.gone()
    assert held(small) == stored(2)._replace(held_nbytes=3 * NBYTES)


def test_a_put_that_can_never_fit_is_refused_at_once(small, few):
    for front in (small, few):
        me = Client(front, "me")
        failed(me.put([1, 2, 3, 4], wait_s=5.0)[0], "StorageFullError")
        assert held(front) == NOTHING


# ---- leases ----


def test_a_lease_that_waits_is_answered_by_the_clear_that_makes_room():
    front = front_of(capacity_bytes=4 * PAGE, pages=16)
    me, other = Client(front, "me"), Client(front, "other")
    me.one(me.put_leased([0, 0, 0]))
    assert other.send(other.lease(2, wait_s=5.0)) == []
    ((client, leased, _),) = clear(front, 0, 1)
    assert (client, is_lease(leased)) == ("other", True)


@pytest.mark.parametrize("leave", ["cancel", "release", "gone"])
def test_a_lease_ends_when_it_is_cancelled_or_released_and_with_its_session(leave):
    front = front_of(pages=16)
    me = Client(front, "me")
    me.one(me.lease(1))
    assert held(front).leased_nbytes == PAGE
    {"cancel": lambda: me.cancel(1), "release": lambda: me.release(1), "gone": me.gone}[leave]()
    assert held(front) == NOTHING


def test_a_put_that_waits_for_samples_keeps_its_lease_until_it_is_cancelled():
    front = front_of(capacity=1, pages=16)
    me, filler = Client(front, "me"), Client(front, "filler")
    filler.one(filler.put_leased([0]))
    put = me.put_leased([0], p.Reserve(50, "p", 1, specs(PAGE), 5.0))
    assert me.send(put) == []
    assert held(front).leased_nbytes == PAGE
    me.cancel(50)
    assert (held(front).leased_nbytes, held(front).waiting) == (0, 0)


# ---- in steps ----


def test_the_steps_of_a_put_may_come_one_by_one(me, other, front):
    put, frames = me.a_put([7])
    reserved = me.one(put.begin)
    assert is_written(me.one(me.write(put, samples_of(reserved), put.id), frames))
    assert held(front) == Held(samples=1, records=1, uncommitted_nbytes=NBYTES)
    assert other.one(other.fetch(1)).ready == 0
    publish = p.Publish(me.number(), "p", reserved.indexes, specs(), completes=put.id)
    assert me.one(publish) == p.Published(publish.id)
    assert batch_of(other.send(other.fetch(1))[0]) == {0: 7}, "a reader comes before the commit"
    assert me.one(me.commit(put.id)) == p.Done(3)
    assert held(front).uncommitted_nbytes == 0


def test_a_put_over_values_that_comes_twice_has_one_effect(me, other):
    me.stored([3])
    put, frames = me.a_put([7], me.check([0]))
    (answer,) = me.send(put, frames)
    other.one(*other.a_put([9], other.check([0])))
    assert me.send(put, frames) == [answer]
    assert other.values([0]) == {0: 9}
