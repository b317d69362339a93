# SPDX-License-Identifier: Apache-2.0
"""Front: sessions, what the server knows of a client's calls, and whatever is wrong with one of them."""

from __future__ import annotations

from typing import Any

import msgspec
import pytest

from tests.unit.server.front_kit import (
    NBYTES,
    NOTHING,
    Client,
    Got,
    Held,
    apart,
    batch_of,
    failed,
    front_of,
    held,
    is_lease,
    samples_of,
    specs,
)
from transfer_queue import BaseSampler
from transfer_queue import protocol as p

# ---- the beginning and the end of a session ----


def test_a_hello_is_answered_with_the_configuration(me):
    assert me.one(p.Hello(1, 7, p.PROTOCOL_VERSION)) == p.Welcome(1, b'{"the": "configuration"}')


def test_a_hello_of_another_protocol_is_refused_with_both_versions(me):
    failed(me.one(p.Hello(1, 7, 99)), "ProtocolError", "99")
    failed(me.one(p.Hello(2, 7, 99)), "ProtocolError", str(p.PROTOCOL_VERSION))


@pytest.mark.parametrize("leave", ["goodbye", "gone"])
def test_with_a_session_end_its_reservations_leases_and_parked_calls(leave):
    front = front_of(capacity=3, pages=16)
    me, other = Client(front, "me"), Client(front, "other")
    me.one(me.reserve(2))
    me.one(me.lease(1))
    assert me.send(me.fetch(1, wait_s=9.0)) == []
    assert other.put([7, 8], wait_s=9.0) == []
    assert held(front) == Held(samples=2, records=1, waiting=2, leased_nbytes=4096 + 200)  # the put keeps its room
    own, *let_in = me.send(p.Goodbye(me.number())) if leave == "goodbye" else [None, *me.gone()]
    assert own in (None, Got("me", p.Done(4)))
    assert [(answer.client, type(answer.reply)) for answer in let_in] == [("other", p.Reserved)]
    assert me.gone() == []
    assert held(front) == Held(samples=2, records=1, values=2, held_nbytes=2 * NBYTES)


def test_a_client_that_says_goodbye_is_no_dead_producer_and_one_that_does_not_is():
    for polite, kinds in ((True, [p.NotReady]), (False, [p.Failed])):
        front = front_of(producer_grace_s=1.0)
        me, reader = Client(front, "me"), Client(front, "reader")
        me.stored([7])
        if polite:
            me.one(p.Goodbye(me.number()))
        me.gone(now=1.0)
        reader.send(reader.fetch(1))
        assert reader.send(reader.fetch(1, wait_s=9.0), now=1.5) == []
        answers = [p.decode_reply(out.header) for out in front.expire(10.5)]
        assert list(map(type, answers)) == kinds


def test_a_session_that_held_nothing_ends_without_a_word(me, front):
    assert (me.gone(), held(front)) == ([], NOTHING)


def test_an_evicted_client_loses_what_it_holds_and_its_connections_are_closed(me, other, front):
    closed: list[str] = []
    front.disconnect = closed.append
    me.one(me.reserve(2))
    assert other.one(p.EvictClient(other.number(), "me")).value is True
    assert (closed, held(front)) == (["me"], NOTHING)
    assert other.one(p.EvictClient(other.number(), "nobody")).value is False
    failed(other.one(p.EvictClient(other.number(), "other")), "InvalidRequestError", "can't evict itself")


# ---- cancels ----


def test_a_cancel_says_what_became_of_its_call(me, front):
    me.send(me.fetch(2, wait_s=9.0, task="u"))
    me.one(me.reserve(1))
    me.put([7])
    me.send(me.fetch(1, task="v"))
    became = [me.one(p.Cancel(me.number(), call)).value for call in (1, 2, 3, 4, 99)]
    assert became == ["removed", "undone", "kept", "undone", "kept"]


def test_a_client_cancels_its_own_calls_alone(me, other):
    me.one(me.reserve(1))
    assert other.one(p.Cancel(9, 1)).value == "kept"


def test_a_cancel_at_a_server_of_storage_alone_is_done_and_frees_what_the_call_held():
    _, storage = apart(front_of(pages=4))
    me = Client(storage, "me")
    me.one(me.lease(1))
    assert (me.one(p.Cancel(2, 1)), storage.unit.stats().leased_nbytes) == (p.Done(2, "undone"), 0)


# ---- what the client has received ----


def test_received_answers_are_forgotten(me, front):
    me.stored([7])
    me.stored([8])
    assert held(front).records == 2
    me.send(p.ListPartitions(me.number()), received=[1, 2])
    assert held(front).records == 0


def test_a_batch_is_kept_until_it_was_read(me, other, front):
    assert me.stored([7, 8]) == [0, 1]
    fetch = msgspec.structs.replace(me.fetch(2), with_values=False)
    assert isinstance(me.one(fetch), p.Batch)
    me.send_raw(p.encode_request(p.ListPartitions(me.number()), [1, fetch.id]))
    assert other.one(p.ClearConsumed(other.number(), "p", [])).readers == {"me": 2}
    me.send_raw(p.encode_request(p.ListPartitions(me.number()), [], [fetch.id]))
    assert samples_of(other.one(p.ClearConsumed(other.number(), "p", []))) == [0, 1]


def test_what_was_received_and_read_counts_also_where_the_request_beside_it_can_not_be_read(me, front):
    me.stored([7])
    fetch = msgspec.structs.replace(me.fetch(1), with_values=False)
    me.one(fetch)
    header = msgspec.msgpack.encode([[1, "x", None], ["NoSuchVerb", 3], [fetch.id, "x", None]])
    ((_, reply, _),) = me.send_raw(header)
    failed(reply, "ProtocolError", "no request of protocol version")
    assert (reply.id, held(front).records) == (0, 0)


@pytest.mark.parametrize(
    "header",
    [
        b"",
        b"\xc1",
        b"nonsense",
        *map(msgspec.msgpack.encode, (7, [], [7, 8], {"a": 1}, "text", [[1], ["Put"]], [[1], ["Put"], 7])),
    ],
)
def test_what_is_no_message_is_refused_and_others_are_served(me, other, front, header):
    ((client, reply, _),) = me.send_raw(header)
    failed(reply, "ProtocolError")
    assert (client, other.stored([7])) == ("me", [0])


# ---- which server serves what ----


def test_a_server_refuses_the_requests_of_the_other_kind():
    controller, storage = (Client(each, "me") for each in apart(front_of()))
    failed(controller.one(controller.commit(1)), "ProtocolError", "does not serve Commit")
    failed(storage.one(p.ListPartitions(1)), "ProtocolError", "does not serve ListPartitions")
    failed(storage.one(p.GetStats(2)), "ProtocolError", "does not serve GetStats")
    assert storage.one(storage.commit(1)) == p.Done(1)
    assert storage.one(p.Goodbye(4)) == p.Done(4)


def test_a_fetch_with_values_is_the_batch_alone_where_the_storage_is_elsewhere():
    both = front_of()
    Client(both, "writer").stored([7])
    me = Client(apart(both)[0], "me")
    ((_, batch, frames),) = me.send(me.fetch(1))
    assert (type(batch), list(frames)) == (p.Batch, [])


def test_a_message_that_expects_no_answer_gets_none(me, front):
    me.one(me.reserve(1))
    assert me.tell(p.Cancel(me.number(), 1)) == []
    assert me.release(7) == []
    assert held(front) == NOTHING


def test_status_names_what_clients_hold_and_what_alarms_there_are():
    front = front_of(pages=16)
    me = Client(front, "me")
    front.alarms = lambda: [{"what": "MySampler"}]
    assert is_lease(me.one(me.lease(1)))
    stats = me.one(p.GetStats(me.number())).value
    assert (stats["alarms"], stats["clients"]["me"]["leases"], stats["clients"]["me"]["pins"]) == (
        [{"what": "MySampler"}], 1, 0,
    )  # fmt: skip


# ---- whatever is wrong with a call ----


def test_an_answer_that_can_not_be_encoded_harms_its_own_call_alone(me, other, front):
    front.alarms = lambda: [{"what": object()}]
    failed(me.one(p.GetStats(me.number())), "ProtocolError", "the answer can't be sent")
    assert other.stored([7]) == [0]


class Breaking(BaseSampler):
    """Raises what it was told to, once."""

    def __init__(self, error: BaseException | None = None) -> None:
        super().__init__()
        self.error = error

    def sample(self, ready_indexes: list[int], batch_size: int, *args: Any, **kwargs: Any) -> Any:
        if self.error is not None:
            error, self.error = self.error, None
            raise error
        return ready_indexes[:batch_size], ready_indexes[:batch_size]


@pytest.mark.parametrize(
    "error", [RuntimeError("no"), SystemExit("no"), RecursionError("no")], ids=lambda e: type(e).__name__
)
def test_an_error_of_a_sampler_answers_the_fetch_that_asked_and_the_next_is_served(error):
    front = front_of(sampler=Breaking(error))
    me, other = Client(front, "me"), Client(front, "other")
    me.stored([7])
    failed(me.one(me.fetch(1)), "SamplerError", "no")
    assert batch_of(other.send(other.fetch(1))[0]) == {0: 7}


def test_a_call_that_fails_for_one_client_is_no_matter_for_those_that_wait(me, other):
    assert other.send(other.fetch(1, wait_s=9.0)) == []
    failed(me.send(p.Put(1, p.Reserve(1, "p", 1, specs()), {}, b"nonsense"))[0], "ProtocolError")
    own, batch = me.put([7])
    assert (own.client, batch.client, list(batch_of(batch).values())) == ("me", "other", [7])


# ---- eviction ----


def test_memory_of_an_evicted_client_is_not_used_again_before_its_process_has_ended() -> None:
    """It may have been stopped while it copied into its lease, and goes on one day."""
    front = front_of(pages=4)
    assert front.unit is not None
    me, other = Client(front, "me"), Client(front, "other")
    ended: list[Any] = []
    front.watch = lambda pid, namespace, act: ended.append((pid, namespace, act))
    me.one(p.Hello(me.number(), 77, p.PROTOCOL_VERSION, 5))
    assert is_lease(me.one(me.lease(3)))
    assert other.one(p.EvictClient(other.number(), "me")).value is True
    assert front.unit.stats().leased_nbytes == 0
    assert not is_lease(other.one(other.lease(3))), "the arena has no other such range"
    ((pid, namespace, act),) = ended
    assert (pid, namespace) == (77, 5)
    act()
    assert is_lease(other.one(other.lease(3)))
