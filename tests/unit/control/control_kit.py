# SPDX-License-Identifier: Apache-2.0
"""Short words for planes, for requests to them and for their replies."""

from __future__ import annotations

import itertools
import math
from typing import Any

import msgspec

from tests.local_plane import LocalPlane, To
from transfer_queue import protocol as p
from transfer_queue.calls import Turn
from transfer_queue.calls.turn import TURN_S

ROLLOUT, REWARDER, ACTOR, CRITIC, SAVER = "rollout", "rewarder", "actor", "critic", "saver"
INT = p.FieldSpec("int64", (4,))
FLOAT = p.FieldSpec("float32", (1,))
_ids = itertools.count(1)
_unpublished: dict[tuple[str, int], int] = {}
"""By client and the first of the samples: the call that reserved them last."""


def new_plane(**config: Any) -> LocalPlane:
    """For tests that make one for each example; others take the fixture, which checks them at the end."""
    return LocalPlane(**config)


def short_turns(plane: LocalPlane, looks: int) -> None:
    """From now on a turn ends when it has looked at the time so often."""
    plane.calls.turn = Turn(itertools.count(step=TURN_S / looks).__next__)


def turns(plane: LocalPlane, now: float = 0.0) -> list[list[To]]:
    """The replies of each turn that is due."""
    found = []
    while (due := plane.next_deadline()) is not None and due <= now:
        found.append(plane.expire(now))
    return found


def rest(plane: LocalPlane, now: float = 0.0) -> list[To]:
    """The replies of all turns that are due at once; no deadline passes."""
    replies = []
    while plane.next_deadline() == -math.inf:
        replies += plane.expire(now)
    return replies


def fields(*names: str) -> dict[str, p.FieldSpec]:
    return dict.fromkeys(names, INT)


def send(plane: LocalPlane, client: str, verb: Any, *args: Any, now: float = 0.0, **kwargs: Any) -> list[To]:
    """All replies that the request brings about."""
    return plane.handle(client, verb(next(_ids), *args, **kwargs), now)


def ask(plane: LocalPlane, client: str, verb: Any, *args: Any, now: float = 0.0, **kwargs: Any) -> Any:
    """The request's own reply, which comes first; None while it is parked."""
    request = verb(next(_ids), *args, **kwargs)
    replies = plane.handle(client, request, now)
    return next((to.reply for to in replies if to.reply.id == request.id), None)


def indexes(reply: Any) -> list[int]:
    assert not isinstance(reply, p.Failed), reply
    return p.unpack_indexes(reply.indexes).tolist()


def reserve(plane: LocalPlane, count: int, partition: str = "p", client: str = ROLLOUT, **kwargs: Any) -> list[int]:
    reply = ask(plane, client, p.Reserve, partition, count, **kwargs)
    reserved = indexes(reply)
    if reserved:
        _unpublished[client, reserved[0]] = reply.id
    return reserved


def cancel(plane: LocalPlane, client: str, reply: Any, now: float = 0.0) -> tuple[str, list[To]]:
    """What became of the call that this answered, and the replies of others that the cancel brings about."""
    own, *others = send(plane, client, p.Cancel, reply.id, now=now)
    return own.reply.value, others


def chores(plane: LocalPlane) -> list[int]:
    """Samples whose values are to be deleted, since the last call of this."""
    return [index for unused in plane.take_unused() for index in unused.tolist()]


def publish(
    plane: LocalPlane, samples: list[int], *names: str, partition: str = "p", client: str = ROLLOUT, now: float = 0.0,
    tags: dict[int, dict[str, Any]] | None = None, **kwargs: Any,
) -> list[To]:  # fmt: skip
    """All replies; the publish's own comes first. It completes the reservation of its first sample."""
    kwargs.setdefault("completes", _unpublished.pop((client, samples[0]), 0) if samples else 0)
    packed = p.pack_indexes(samples)
    return send(plane, client, p.Publish, partition, packed, fields(*(names or ("x",))), tags or {}, now=now, **kwargs)


def put(
    plane: LocalPlane, count: int, *names: str, partition: str = "p", client: str = ROLLOUT, now: float = 0.0,
    lengths: list[int] | None = None,
) -> list[int]:  # fmt: skip
    """New samples with these fields (default "x"); ``lengths`` become their tag "total_lengths"."""
    samples = reserve(plane, count, partition, client, now=now)
    tags = {index: {"total_lengths": length} for index, length in zip(samples, lengths or [], strict=False)}
    (own, *_) = publish(plane, samples, *names, partition=partition, client=client, now=now, tags=tags)
    assert isinstance(own.reply, p.Published), own
    return samples


def fetch(
    plane: LocalPlane, batch_size: int, rank: int | None = None, batch_index: int | None = None, *,
    task: str = "train", names: tuple[str, ...] = ("x",), partition: str = "p", client: str = ACTOR, now: float = 0.0,
    **kwargs: Any,
) -> Any:  # fmt: skip
    """The reply, None while parked (with ``wait_s``)."""
    args = (partition, task, list(names), batch_size, rank, batch_index)
    return ask(plane, client, p.Fetch, *args, now=now, **kwargs)


def batch(*args: Any, **kwargs: Any) -> list[int]:
    """The samples of a fetch that must be answered with a batch; its client says to have it, and to have read it."""
    return received(args[0], kwargs.get("client", ACTOR), fetch(*args, **kwargs))


def received(plane: LocalPlane, client: str, reply: Any) -> list[int]:
    """The samples of a batch, whose client says to have its answer and to have read the values."""
    assert isinstance(reply, p.Batch), reply
    plane.received(client, [reply.id])
    plane.read(client, [reply.id])
    return indexes(reply)


def park(*args: Any, **kwargs: Any) -> None:
    """A fetch that must wait."""
    assert fetch(*args, wait_s=kwargs.pop("wait_s", 100.0), **kwargs) is None


def batches(replies: list[To]) -> list[tuple[str, list[int]]]:
    """(client, samples) of the batches among replies, in order."""
    return [(to.client, indexes(to.reply)) for to in replies if isinstance(to.reply, p.Batch)]


def refused(reply: Any, code: str, *parts: str) -> None:
    """The reply is this error, and its text has these parts."""
    assert isinstance(reply, p.Failed), reply
    assert reply.code == code, reply
    assert [part for part in parts if part not in reply.text] == [], reply.text


def register(plane: LocalPlane, task: str = "train", **kwargs: Any) -> None:
    reply = ask(plane, ACTOR, p.RegisterTask, task, **kwargs)
    assert isinstance(reply, p.Done), reply


def grpo(plane: LocalPlane, size: int, **kwargs: Any) -> None:
    """Task "train" gets whole groups of this size."""
    register(plane, sampler={"class": "GRPOGroupNSampler", "kwargs": {"n_samples_per_prompt": size}}, **kwargs)


def seal(plane: LocalPlane, partition: str = "p", now: float = 0.0) -> list[To]:
    return send(plane, ROLLOUT, p.SealPartition, partition, now=now)


def clear(plane: LocalPlane, samples: list[int], partition: str = "p") -> list[int]:
    return indexes(ask(plane, ACTOR, p.ClearSamples, partition, p.pack_indexes(samples)))


def clear_consumed(plane: LocalPlane, *tasks: str, partition: str = "p") -> list[int]:
    return indexes(ask(plane, ACTOR, p.ClearConsumed, partition, list(tasks)))


def ack(plane: LocalPlane, *tokens: str, partition: str = "p", task: str = "train", earlier: bool = False) -> int:
    settled: int = ask(plane, ACTOR, p.Ack, partition, task, list(tokens), earlier).value
    return settled


def not_ready(reply: Any) -> tuple[int, int, int, dict[str, int]]:
    """(wanted, ready, samples, lacking)"""
    assert isinstance(reply, p.NotReady), reply
    return reply.wanted, reply.ready, reply.samples, reply.lacking


# ---- saved and restored ----


def save(plane: LocalPlane, now: float = 0.0) -> bytes:
    frozen = ask(plane, SAVER, p.Freeze, now=now)
    assert isinstance(frozen, p.Frozen), frozen
    assert frozen.num_parts == 1, "a small state is one slice"
    assert indexes(ask(plane, SAVER, p.Thaw, frozen.id)) == []
    return frozen.state


def load(plane: LocalPlane, state: bytes, now: float = 0.0) -> Any:
    """The reply to Restore, after the indexes were staged as a client does it."""
    return ask(plane, SAVER, p.Restore, state, stage(plane, state, now), now=now)


def stage(plane: LocalPlane, state: bytes, now: float = 0.0) -> int:
    """How much greater the samples' indexes will be."""
    packed = b"".join(each["index"] for each in msgspec.msgpack.decode(state)["partitions"])
    shift: int = ask(plane, SAVER, p.Stage, packed, now=now).value
    return shift


def corrupted(state: bytes, change: Any) -> bytes:
    plain = msgspec.msgpack.decode(state)
    change(plain)
    return msgspec.msgpack.encode(plain)
