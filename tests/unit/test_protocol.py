# SPDX-License-Identifier: Apache-2.0
"""The wire: every message survives the trip, and whatever isn't one of ours is a DecodeError."""

from __future__ import annotations

from contextlib import suppress

import msgspec
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from transfer_queue import protocol as p
from transfer_queue.errors import InvalidRequestError, ProtocolError, UnsupportedValueError

UNITS = [(0, 2), (3, 1)]
SPEC = {
    "x": p.FieldSpec("bfloat16", None, True, False, b"\1\0\0\0", ["bfloat16", None], b"\0\1", UNITS),
    "y": p.FieldSpec(None, None, is_non_tensor=True),
}
TAGS = {7: {"a": 1, "b": 2.5, "c": "text", "d": None, "e": [True, {"f": []}]}}
decode_message = p.message_decoder()
INDEXES = p.pack_indexes([0, 5, 2**40])

REQUESTS = [
    p.Hello(1, 99, 2),
    p.Goodbye(2),
    p.CreatePartition(3, "train@3", 64),
    p.SealPartition(4, "p"),
    p.RegisterTask(5, "t", {"class": "GRPOGroupNSampler", "args": [4], "kwargs": {}}, 2, "pad"),
    p.Reserve(6, "p", 8, SPEC, 1.5),
    p.CheckFields(7, "p", INDEXES, SPEC),
    p.Publish(9, "p", INDEXES, SPEC, TAGS, True, 6),
    p.Insert(10, "p", 3, ["x"], 2.0),
    p.Fetch(11, "p", "t", ["x", "y"], 4, 1, 2, 8, 30.0, True, {"temperature": 0.5}, 0, 2, 1, "after", True),
    p.Cancel(12, 11),
    p.Ack(13, "p", "t", ["token"], True),
    p.Describe(14, "p", ["x"], INDEXES, 7),
    p.ConsumptionStatus(15, "p", "t", True, 7),
    p.FieldStatus(16, "p", ["x"], True, 7),
    p.ResetConsumption(17, "p", "t"),
    p.SetTags(18, {"p": TAGS}, True),
    p.ClearSamples(19, "p", INDEXES),
    p.ClearConsumed(26, "p", ["t"], True),
    p.ClearPartition(20, "p"),
    p.ListPartitions(21),
    p.ResolveKeys(22, "p", ["k"], True, True, SPEC, 3.0),
    p.Put(22, p.Reserve(22, "p", 8, SPEC, 1.5), TAGS, b"columns"),
    p.KeysOf(23, "p", INDEXES),
    p.ListKeys(24, "p", 5),
    p.WatchKeys(1, "p", (1, 2, 3), "v == 1", 2.0),
    p.WaitKeys(1, "p", "v == 1", 2, 3.0),
    p.ForgetTask(25, "t"),
    p.GetStats(25),
    p.ExpectProducers(25),
    p.NoteExit(25, "rollout-0", "pid 7 ended with exit code 1", "ValueError: x", True),
    p.EvictClient(25, "client"),
    p.JoinUnit(25, "unit0", "host", ["ipc:///unit0", "tcp://host:1"], 2**40),
    p.ListUnits(25, 7, 30.0),
    p.WatchRun(25, "run", "rank 1", True, 30.0),
    p.LeaveRun(25, "run", True),
    p.Freeze(26, 5.0),
    p.ListLost(26, "p"),
    p.ReadFrozen(26, 1, 3),
    p.Thaw(27, 1),
    p.Stage(28, p.pack_indexes([3, 4])),
    p.RestorePart(29, 29, 0, b"state", 7),
    p.Restore(29, b"state", 7, 28),
    p.LeaseGroups(30, ["a", "b*"], 3, True, "v == 1", 5.0, "all", 2.0),
    p.EndLease(31, "p", p.Members(4, 5, [0, 1], True), "release", "why", "sample"),
    p.RenewLeases(32, [1, 2**40], 3.0),
    p.Advance(33, "p*", 7, True),
    p.RetryGroups(34, "p", "v == 1"),
    p.RejectGroups(35, "p", INDEXES, "why"),
    p.Trained(36, "p", "t", 5, 1),
    p.MoveOn(37, "p", "t", ["o"], 1),
]
REPLIES = [
    p.Done(1, {"any": [1, "small", None]}),
    p.Failed(2, "SamplerError", "text"),
    p.Welcome(3, b"{}"),
    p.Reserved(4, INDEXES, {"x": ["int64", None]}),
    p.Published(5),
    p.Batch(6, "p", INDEXES, SPEC, b"\1\1\0", p.pack_tags([p.encode({"a": 1})]), "token", 3, b"\0\0\1", ["k"], True),
    p.NotReady(7, 8, 1, 3, {"x": 2}, 1.5, ["x"], 2, ["writer"], 1, True),
    p.Ended(8, "sealed", 3),
    p.Status(9, True, INDEXES, b"\1\0\1", 1, True),
    p.Cleared(10, INDEXES, {"t": 3}, ["u"], True, 4),
    p.Names(11, ["a", None]),
    p.KeyList(12, {"p": {"k": {"a": 1}}}, 5),
    p.Units(13, 7, [p.UnitInfo(0, "unit0", "host", ["ipc:///unit0"], 2**40)]),
    p.ChangedKeys(1, (1, 2, 3), {"k": {"v": 1}}, ["l"], True, 5),
    p.Frozen(14, b"state", 2),
    p.LeasedGroups(
        15, [p.GrantedLease(1, "p", 2, "k", 3, 4, [0], {0: INDEXES})], [p.Batch(15, "p", INDEXES, SPEC, b"")]
    ),
]


def of(verb, messages):
    return [message for message in messages if type(message) is verb]


def sent(request):
    """The message that carries a request, decoded."""
    return decode_message(p.encode_request(request))


@pytest.mark.parametrize("verb", p.AnyRequest.__args__, ids=lambda verb: verb.__name__)
def test_every_request_survives_the_trip(verb):
    (request,) = of(verb, REQUESTS)
    message = p.ClientMessage([3, 2**63 - 1], request, [4])
    assert decode_message(p.encode_request(request, [3, 2**63 - 1], [4])) == message
    assert decode_message(memoryview(p.encode_request(request))) == p.ClientMessage([], request)


@pytest.mark.parametrize("begin", [of(verb, REQUESTS)[0] for verb in (p.Reserve, p.CheckFields, p.ResolveKeys)])
def test_a_put_may_begin_in_three_ways(begin):
    assert sent(p.Put(1, begin)).request == p.Put(1, begin)


@pytest.mark.parametrize("verb", p.AnyReply.__args__, ids=lambda verb: verb.__name__)
def test_every_reply_survives_the_trip(verb):
    (reply,) = of(verb, REPLIES)
    assert p.decode_reply(p.encode(reply)) == reply


def test_requests_and_replies_are_told_apart():
    with pytest.raises(msgspec.DecodeError):
        p.decode_reply(p.encode(p.GetStats(1)))
    with pytest.raises(ProtocolError, match=f"no request of protocol version {p.PROTOCOL_VERSION}"):
        decode_message(p.encode(p.ClientMessage([], p.Done(1))))


def packed(*request):
    return msgspec.msgpack.encode([[], list(request)])


def test_fields_appended_since_may_be_missing_from_an_older_message():
    assert decode_message(packed("Fetch", 1, "p", "t", ["x"], 4)).request == p.Fetch(1, "p", "t", ["x"], 4)


def test_fields_of_a_newer_message_are_ignored():
    assert decode_message(packed("SealPartition", 1, "p", "new")).request == p.SealPartition(1, "p")


@pytest.mark.parametrize(
    "data",
    [
        b"",
        b"\xc1",
        b"GET / HTTP/1.1\r\n\r\n",
        packed("NoSuchVerb", 1),
        packed("GetStats"),
        msgspec.msgpack.encode([["one"], ["GetStats", 1]]),
        msgspec.msgpack.encode([[-1], ["GetStats", 1]]),
        msgspec.msgpack.encode([[], {"type": "GetStats", "id": 1}]),
        msgspec.msgpack.encode(["GetStats", 1]),
        p.encode_request(p.ClearPartition(1, "p"))[:-1],
        p.encode_request(p.GetStats(1)) + b"\0",
        b"\x92\x90\x93\xa8GetStats\x01" + b"\x91" * 100_000 + b"\x01",
    ],
)
def test_what_is_no_message_of_ours_is_a_protocol_error(data):
    with pytest.raises(ProtocolError):
        decode_message(data)


@settings(max_examples=150, deadline=None, print_blob=True)
@given(st.binary(max_size=60))
def test_random_bytes_are_a_message_or_a_typed_error_and_nothing_else(data):
    with suppress(ProtocolError, InvalidRequestError):
        assert isinstance(decode_message(data).request, p.Request)
    with suppress(ProtocolError, InvalidRequestError):
        assert isinstance(decode_message(b"\x92\x90" + data).request, p.Request)


class Read(msgspec.Struct, frozen=True, tag="unit.read", array_like=True):
    """A request of another server."""

    id: int
    rows: list[int]


def test_a_decoder_may_know_the_requests_of_another_server_too():
    decode = p.message_decoder(Read)
    assert decode(p.encode_request(Read(1, [2]))).request == Read(1, [2])
    assert decode(p.encode_request(p.GetStats(1))).request == p.GetStats(1)
    with pytest.raises(InvalidRequestError, match=r"rows\[0\] of Read: Expected `int`, got `str`"):
        decode(p.encode_request(Read(1, ["two"])))
    with pytest.raises(ProtocolError):
        decode_message(p.encode_request(Read(1, [2])))


def test_messages_cannot_be_changed():
    with pytest.raises(AttributeError):
        p.GetStats(1).id = 2


def test_numpy_scalars_in_tags_travel_as_plain_numbers():
    request = p.SetTags(1, {"p": {0: {"reward": np.float32(0.5), "n": np.int64(3), "flag": np.bool_(True)}}})
    assert sent(request).request == p.SetTags(1, {"p": {0: {"reward": 0.5, "n": 3, "flag": True}}})


@pytest.mark.parametrize("value", [object(), np.zeros(2)])
def test_a_tag_that_is_not_plain_data_is_refused_with_its_type_and_the_way_out(value):
    with pytest.raises(UnsupportedValueError, match=f"holds a {type(value).__name__}.*[Ss]tore it as a field"):
        p.encode(p.SetTags(1, {"p": {0: {"v": value}}}))


@settings(max_examples=50, deadline=None, print_blob=True)
@given(st.lists(st.integers(-(2**63), 2**63 - 1)))
def test_indexes_survive_the_trip_as_eight_bytes_each(indexes):
    packed = p.pack_indexes(indexes)
    assert (p.unpack_indexes(packed).tolist(), len(packed)) == (indexes, 8 * len(indexes))
    assert p.unpack_indexes(packed).dtype == np.int64


@pytest.mark.parametrize("data", [b"odd", bytes(9)])
def test_bytes_that_can_be_no_indexes_are_a_protocol_error(data):
    with pytest.raises(ProtocolError, match=f"8 bytes each, got {len(data)}"):
        p.unpack_indexes(data)


MANY = p.MOST_ROWS
TOO_MANY_TAGS = {index: {"a": 1} for index in range(MANY + 1)}
BOUNDED = {
    "batch_index of Fetch: Expected `int` <= 9007199254740992": p.Fetch(1, "p", "t", ["x"], 4, 0, 2**64 - 1),
    "batch_size of Fetch: Expected `int` <= 2147483647": p.Fetch(1, "p", "t", ["x"], 2**31),
    "first_index of Fetch: Expected `int` <= 9007199254740992": p.Fetch(1, "p", "t", ["x"], 4, first_index=2**62),
    "wait_s of Fetch: Expected `float` >= 0.0": p.Fetch(1, "p", "t", ["x"], 4, wait_s=float("nan")),
    "wait_s of Reserve: Expected `float` <= 1000000000.0": p.Reserve(1, "p", 1, {}, float("inf")),
    "wait_s of Insert: Expected `float` >= 0.0": p.Insert(1, "p", 1, [], -1.0),
    "count of Insert: Expected `int` <= 2147483647": p.Insert(1, "p", 2**62),
    "count of Reserve: Expected `int` <= 2147483647": p.Put(1, p.Reserve(1, "p", 2**40)),
    "dp_size of RegisterTask: Expected `int` <= 65536": p.RegisterTask(1, "t", None, 20_000_000),
    "call of Cancel: Expected `int` <= 9223372036854775807": p.Cancel(1, 2**63),
    "id of Cancel: Expected `int` >= 0": p.Cancel(-1, 1),
    "wait_s of ListUnits: Expected `float` <= 1000000000.0": p.ListUnits(1, 1, float("inf")),
    "partition of SealPartition: Expected `str`, got `int`": p.SealPartition(1, 3),
    "batch_size of Fetch: Expected `int`, got `float`": p.Fetch(1, "p", "t", ["x"], 1.5),
    "fields[1] of Fetch: Expected `str`, got `int`": p.Fetch(1, "p", "t", ["x", 2], 1),
    "tags[...] of Put: Expected `object`, got `int`": p.Put(1, p.Reserve(1, "p", 1), {0: 1}),
    f"keys of ResolveKeys: Expected `array` of length <= {p.MOST_ROWS}": p.ResolveKeys(1, "p", ["k"] * (MANY + 1)),
    f"tags[...] of SetTags: Expected `object` of length <= {p.MOST_ROWS}": p.SetTags(1, {"p": TOO_MANY_TAGS}),
    f"tags of Publish: Expected `object` of length <= {p.MOST_ROWS}": p.Publish(1, "p", b"", {}, TOO_MANY_TAGS),
    f"indexes of ClearSamples: Expected `bytes` of length <= {8 * p.MOST_ROWS}": p.ClearSamples(
        1, "p", bytes(8 * MANY + 8)
    ),
}


@pytest.mark.parametrize("text", BOUNDED)
def test_a_value_of_the_wrong_type_or_out_of_range_is_told_by_its_name(text):
    with pytest.raises(InvalidRequestError) as caught:
        sent(BOUNDED[text])
    assert str(caught.value) == text


def nested(depth):
    value = 1
    for level in range(depth):
        value = [value] if level % 2 else {"in": value}
    return value


FREE = [
    lambda value: p.SetTags(1, {"p": {0: {"a": value}}}),
    lambda value: p.Publish(1, "p", b"", {}, {0: {"a": value}}),
    lambda value: p.Put(1, p.Reserve(1, "p", 1), {0: {"a": value}}),
    lambda value: p.Fetch(1, "p", "t", ["x"], 1, sampler_args={"a": value}),
    lambda value: p.RegisterTask(1, "t", {"class": "X", "args": [value]}),
]


@pytest.mark.parametrize("make", FREE)
def test_what_is_nested_too_deep_is_refused_by_its_sender_and_by_its_receiver(make):
    assert sent(make(nested(p.MAX_DEPTH - 3))).request == make(nested(p.MAX_DEPTH - 3))
    for depth in (p.MAX_DEPTH, 990, 5000):
        with pytest.raises(UnsupportedValueError, match="nested deeper than 64 levels"):
            p.encode_request(make(nested(depth)))
    for depth in (p.MAX_DEPTH, 300):
        with pytest.raises(ProtocolError, match="nested deeper than 64 levels"):
            decode_message(p.encode(p.ClientMessage([], make(nested(depth)))))


def test_a_tag_that_holds_itself_is_refused():
    loop = []
    loop.append(loop)
    with pytest.raises(UnsupportedValueError, match="nested deeper"):
        p.encode_request(p.SetTags(1, {"p": {0: {"a": loop}}}))


def test_a_message_nested_deeper_than_the_interpreter_allows_is_a_protocol_error():
    head = msgspec.msgpack.encode([[], ["Fetch", 1, "p", "t", ["x"], 1, None, None, None, 0.0, False, {}]])
    assert head.endswith(b"\x80")
    for depth in (990, 100_000):
        with pytest.raises(ProtocolError, match="nested deeper"):
            decode_message(head[:-1] + b"\x81\xa1a" + b"\x91" * depth + b"\x01")


@pytest.mark.parametrize("value", [2**64, -(2**63) - 1])
def test_an_integer_that_no_message_can_hold_is_refused_by_its_sender(value):
    with pytest.raises(UnsupportedValueError, match="64 bits"):
        p.encode_request(p.SetTags(1, {"p": {0: {"a": value}}}))


@pytest.mark.parametrize("request_", [p.ClearPartition(1, "\ud800"), p.SetTags(1, {"p": {0: {"a": "\udfff"}}})])
def test_a_text_that_is_no_unicode_is_refused_by_its_sender(request_):
    with pytest.raises(UnsupportedValueError, match="no valid Unicode"):
        p.encode_request(request_)


def test_a_hello_of_another_version_is_refused_with_both_versions():
    p.check_version(p.Hello(1, 99, p.PROTOCOL_VERSION))
    with pytest.raises(ProtocolError, match=f"version 0 of the protocol, this server version {p.PROTOCOL_VERSION}"):
        p.check_version(p.Hello(1, 99))
