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
from transfer_queue.errors import UnsupportedValueError

SPEC = {"x": p.FieldSpec("bfloat16", None, True, False, b"\1\0\0\0"), "y": p.FieldSpec(None, None, is_non_tensor=True)}
TAGS = {7: {"a": 1, "b": 2.5, "c": "text", "d": None, "e": [True, {"f": []}]}}
INDEXES = p.pack_indexes([0, 5, 2**40])

REQUESTS = [
    p.Hello(1, 99, 4026531836),
    p.Goodbye(2),
    p.CreatePartition(3, "train@3", 64),
    p.SealPartition(4, "p"),
    p.RegisterTask(5, "t", {"class": "GRPOGroupNSampler", "args": [4], "kwargs": {}}, 2, "pad"),
    p.Reserve(6, "p", 8, SPEC, 1.5),
    p.CheckFields(7, "p", INDEXES, SPEC),
    p.Cancel(8, "p", INDEXES),
    p.Publish(9, "p", INDEXES, SPEC, TAGS, 8, True),
    p.Insert(10, "p", 3, ["x"], 2.0),
    p.Fetch(11, "p", "t", ["x", "y"], 4, 1, 2, 8, 30.0, True, {"temperature": 0.5}, ["token"], 0, 2),
    p.Withdraw(12, 11),
    p.Ack(13, "p", "t", ["token"], True),
    p.Describe(14, "p", ["x"], INDEXES),
    p.ConsumptionStatus(15, "p", "t"),
    p.ProductionStatus(16, "p", ["x"]),
    p.ResetConsumption(17, "p", "t"),
    p.SetTags(18, {"p": TAGS}, True),
    p.ClearSamples(19, "p", INDEXES),
    p.ClearConsumed(26, "p", ["t"]),
    p.ClearPartition(20, "p"),
    p.ListPartitions(21),
    p.ResolveKeys(22, "p", ["k"], True, True, SPEC, 3.0),
    p.KeysOf(23, "p", INDEXES),
    p.ListKeys(24, "p"),
    p.GetStats(25),
    p.Freeze(26, 1, 5.0),
    p.Thaw(27, 1),
    p.Stage(28, p.pack_indexes([3, 4])),
    p.Restore(29, b"state", 7),
]
REPLIES = [
    p.Done(1, {"any": [1, "small", None]}),
    p.Failed(2, "SamplerError", "text"),
    p.Welcome(3, b"{}"),
    p.Reserved(4, INDEXES, {"x": "int64", "y": None}),
    p.Published(5, INDEXES),
    p.Batch(6, "p", INDEXES, SPEC, b"\1\1\0", TAGS, "token", 3, b"\0\0\1", ["k"]),
    p.NotReady(7, 8, 1, 3, {"x": 2}, 1.5, ["x"]),
    p.Ended(8, "sealed", 3),
    p.Status(9, True, INDEXES, b"\1\0\1", 1),
    p.Cleared(10, INDEXES),
    p.Names(11, ["a", None]),
    p.KeyList(12, {"p": {"k": {"a": 1}}}),
    p.Frozen(13, b"state"),
]


def of(verb, messages):
    return [message for message in messages if type(message) is verb]


@pytest.mark.parametrize("verb", p.AnyRequest.__args__, ids=lambda verb: verb.__name__)
def test_every_request_survives_the_trip(verb):
    (request,) = of(verb, REQUESTS)
    assert p.decode_request(p.encode(request)) == request
    assert p.decode_request(memoryview(p.encode(request))) == request


@pytest.mark.parametrize("verb", p.AnyReply.__args__, ids=lambda verb: verb.__name__)
def test_every_reply_survives_the_trip(verb):
    (reply,) = of(verb, REPLIES)
    assert p.decode_reply(p.encode(reply)) == reply


def test_requests_and_replies_are_told_apart():
    with pytest.raises(msgspec.DecodeError):
        p.decode_reply(p.encode(p.GetStats(1)))
    with pytest.raises(msgspec.DecodeError):
        p.decode_request(p.encode(p.Done(1)))


def test_fields_appended_since_may_be_missing_from_an_older_message():
    older = msgspec.msgpack.encode(["Fetch", 1, "p", "t", ["x"], 4])
    assert p.decode_request(older) == p.Fetch(1, "p", "t", ["x"], 4)


def test_fields_of_a_newer_message_are_ignored():
    newer = msgspec.msgpack.encode(["SealPartition", 1, "p", "new"])
    assert p.decode_request(newer) == p.SealPartition(1, "p")


@pytest.mark.parametrize(
    "data",
    [
        b"",
        b"\xc1",
        b"GET / HTTP/1.1\r\n\r\n",
        msgspec.msgpack.encode(["NoSuchVerb", 1]),
        msgspec.msgpack.encode(["GetStats"]),
        msgspec.msgpack.encode(["GetStats", "one"]),
        msgspec.msgpack.encode(["Ack", 1, "p", "t", "token"]),
        msgspec.msgpack.encode({"type": "GetStats", "id": 1}),
        p.encode(p.ClearPartition(1, "p"))[:-1],
        p.encode(p.GetStats(1)) + b"\0",
    ],
)
def test_what_is_no_request_of_ours_is_a_decode_error(data):
    with pytest.raises(msgspec.DecodeError):
        p.decode_request(data)


@settings(max_examples=300, deadline=None, print_blob=True)
@given(st.binary(max_size=60))
def test_random_bytes_are_a_request_or_a_decode_error_and_nothing_else(data):
    with suppress(msgspec.DecodeError, UnicodeDecodeError):
        assert isinstance(p.decode_request(data), p.Request)


def test_messages_cannot_be_changed():
    with pytest.raises(AttributeError):
        p.GetStats(1).id = 2


def test_numpy_scalars_in_tags_travel_as_plain_numbers():
    request = p.SetTags(1, {"p": {0: {"reward": np.float32(0.5), "n": np.int64(3), "flag": np.bool_(True)}}})
    assert p.decode_request(p.encode(request)) == p.SetTags(1, {"p": {0: {"reward": 0.5, "n": 3, "flag": True}}})


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


@pytest.mark.parametrize(
    ("request_", "text"),
    [
        (p.SealPartition(1, 3), "partition of SealPartition: Expected `str`, got `int`"),
        (p.Fetch(1, "p", "t", ["x"], 1.5, None, None, None, 1.0), "batch_size of Fetch: Expected `int`, got `float`"),
        (p.Fetch(1, "p", "t", ["x", 2], 1, None, None, None, 1.0), "fields[1] of Fetch: Expected `str`, got `int`"),
    ],
)
def test_a_value_of_the_wrong_type_is_told_by_its_name(request_, text):
    with pytest.raises(msgspec.ValidationError) as caught:
        p.decode_request(p.encode(request_))
    assert str(caught.value) == text
