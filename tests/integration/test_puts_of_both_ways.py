# SPDX-License-Identifier: Apache-2.0
"""Puts of one message, and those whose client walks the same steps itself: whole or not at all."""

from __future__ import annotations

import asyncio
import signal
from collections.abc import Iterator
from contextlib import nullcontext
from typing import Any

import numpy as np
import pytest
import torch
from clients import connect
from plain_rows import rows

import transfer_queue as tq
from tests.integration.calls import before, die, giving_up, kind_of, put_by_key
from tests.integration.noticing import ended, until
from transfer_queue.errors import InvalidRequestError, QueueUnreachableError, UnknownPartitionError

WAIT_S = 20.0
STEADY = 4


@pytest.fixture(scope="module", params=["one", "each"])
def queue(request: pytest.FixtureRequest) -> Iterator[Any]:
    """In one process a put is one message; with a controller and two units apart its client walks the steps."""
    limited = {"SimpleStorage": {"num_data_storage_units": 2, "capacity_bytes": 1 << 30}}
    yield tq.init({"server_processes": request.param, "controller": {"producer_grace_s": 0.2}, "backend": limited})
    tq.close()


@pytest.fixture
def together(queue: Any) -> bool:
    """Is a put one message?"""
    return bool(queue.server_processes == "one")


@pytest.fixture
def writing(together: bool) -> str:
    """The message that brings the values."""
    return "Put" if together else "Write"


@pytest.fixture
def in_steps(together: bool) -> None:
    if together:
        pytest.skip("a put is one step where the servers share a process")


@pytest.fixture
def other(queue: Any) -> Iterator[tq.TransferQueueClient]:
    client = connect("other", queue)
    yield client
    client.close()


def values(client: tq.TransferQueueClient) -> int:
    """That all units hold."""
    return sum(unit["values"] for unit in client.get_storage_stats())


def uncommitted(client: tq.TransferQueueClient) -> int:
    """Bytes of writes that are stored and not yet published."""
    return sum(unit["uncommitted_nbytes"] for unit in client.get_storage_stats())


def held(client: tq.TransferQueueClient, partition: str) -> int:
    """Samples that are reserved, and neither published nor given back."""
    return int(client.get_stats()["partitions"].get(partition, {}).get("held", 0))


@pytest.fixture
def nothing_more(client, name) -> Iterator[None]:
    """The test leaves as many values as there were, and nothing reserved."""
    count = values(client)
    yield
    assert until(lambda: (values(client), held(client, name), uncommitted(client)) == (count, 0, 0))


def everything(client: tq.TransferQueueClient, partition: str) -> tq.BatchMeta:
    return client.get_meta(partition_id=partition, mode="force_fetch")


def stored(client: tq.TransferQueueClient, partition: str, field: str) -> list[Any]:
    """The values of all samples of a partition."""
    return client.get_data(everything(client, partition).select_fields(field))[field].tolist()


def steady(client: tq.TransferQueueClient, partition: str, count: int = 2) -> list[tq.BatchMeta]:
    return [client.put(rows(a=torch.arange(count)), partition_id=partition) for _ in range(STEADY)]


# ---- published ----


def test_new_samples_arrive_with_their_tags(client, other, name):
    for turn in range(STEADY + 2):
        client.put(rows(a=torch.arange(2)), partition_id=name, tags=[{"turn": turn}, {}])
    meta = other.get_meta(["a"], 2 * STEADY + 4, name, task_name="t")
    assert meta.custom_meta == [tag for turn in range(STEADY + 2) for tag in ({"turn": turn}, {})]
    assert other.get_data(meta)["a"].tolist() == [0, 1] * (STEADY + 2)


def test_a_new_field_arrives_with_its_tags(client, other, name):
    metas = steady(client, name)
    for turn, meta in enumerate(metas):
        client.put(rows(b=torch.tensor([turn, -turn])), metadata=meta, tags=[{}, {"turn": turn}])
    meta = other.get_meta(["b"], 2 * STEADY, name, task_name="t")
    assert meta.custom_meta == [tag for turn in range(STEADY) for tag in ({}, {"turn": turn})]
    assert other.get_data(meta)["b"].tolist() == [value for turn in range(STEADY) for value in (turn, -turn)]


def test_metadata_of_a_put_says_what_a_fetch_says(client, other, name):
    made = [client.put(rows(a=torch.zeros(2, 3)), partition_id=name, tags=[{"t": 1}, {}]) for _ in range(STEADY + 1)]
    for meta in made:
        client.put(rows(b=torch.arange(2)), metadata=meta)
    fetched = everything(other, name)
    for at, meta in enumerate(made):
        part = fetched[2 * at : 2 * at + 2]
        assert (meta.global_indexes, meta.field_names, meta.custom_meta) == (
            part.global_indexes,
            part.field_names,
            part.custom_meta,
        )
        assert [meta.get_dtypes(field) for field in "ab"] == [part.get_dtypes(field) for field in "ab"]


def test_a_fetch_that_waits_is_answered_by_the_put(client, name, fork):
    client.create_partition(name)
    reader = fork(fetch_and_note, name)
    while not any(parked["partition"] == name for parked in client.get_stats()["waiting"]):
        pass
    client.put(rows(a=torch.tensor([5, 6])), partition_id=name)
    assert ended(reader) == 0
    assert stored(client, f"{name}/seen", "a") == [5, 6]


def fetch_and_note(partition: str) -> None:
    client = tq.get_client()
    meta = client.get_meta(["a"], 2, partition, task_name="t", timeout_s=WAIT_S)
    client.put(rows(a=client.get_data(meta)["a"]), partition_id=f"{partition}/seen")


def test_a_parser_runs_once_per_put_and_what_it_makes_is_stored(client, name):
    runs: list[list[int]] = []

    def doubled(columns: dict[str, Any]) -> dict[str, Any]:
        runs.append(list(columns["a"]))
        return {"a": torch.tensor([2 * int(value) for value in columns["a"]])}

    steady(client, name)
    meta = client.put({"a": torch.tensor([1, 2])}, partition_id=name, data_parser=doubled, tags=[{"x": 1}, {}])
    assert (len(runs), meta.custom_meta, client.get_data(meta)["a"].tolist()) == (1, [{"x": 1}, {}], [2, 4])
    client.put({"b": torch.tensor([3, 4])}, metadata=meta, data_parser=lambda columns: {"b": columns["b"] + 1})
    assert client.get_data(meta)["b"].tolist() == [4, 5]


@pytest.mark.parametrize("numbers", [1, 1000], ids=["inline", "in the arena"])
def test_large_puts_are_published_whole(client, other, name, numbers):
    meta = client.put(rows(a=torch.arange(1500 * numbers).view(1500, numbers)), partition_id=name)
    assert all(unit["values"] for unit in client.get_storage_stats()), "or it wasn't over all units"
    client.put(rows(b=torch.arange(1500)), metadata=meta)
    client.put(rows(a=-torch.arange(1500 * numbers).view(1500, numbers)), metadata=meta)
    found = other.get_data(other.get_meta(["a", "b"], 1500, name, task_name="t"))
    assert (-found["a"].values().view(1500, numbers)).equal(torch.arange(1500 * numbers).view(1500, numbers))
    assert found["b"].tolist() == list(range(1500))
    client.clear_partition(name)


@pytest.mark.usefixtures("in_steps")
def test_a_put_under_way_when_its_partition_is_sealed_still_arrives(client, other, name, writing):
    with before(client, writing, lambda: other.seal_partition(name)):
        client.put(rows(a=torch.tensor([1, 2])), partition_id=name)
    assert (stored(other, name, "a"), held(other, name)) == ([1, 2], 0)


# ---- refused ----


@pytest.mark.usefixtures("in_steps", "nothing_more")
def test_a_put_whose_partition_is_cleared_before_its_values_come_is_refused(client, other, name, writing):
    with before(client, writing, lambda: other.clear_partition(name)), pytest.raises(UnknownPartitionError):
        client.put(rows(a=torch.arange(2)), partition_id=name)
    assert name not in other.get_partition_list()


def test_a_put_into_a_partition_that_another_client_cleared_begins_it_anew(client, other, name):
    num_values = values(other)
    steady(client, name)
    other.clear_partition(name)
    meta = client.put(rows(a=torch.tensor([7, 8])), partition_id=name)
    assert (stored(other, name, "a"), values(other), held(other, name)) == ([7, 8], num_values + 2, 0)
    assert everything(other, name).global_indexes == meta.global_indexes


def test_a_put_into_a_partition_that_another_client_sealed_is_refused(client, other, name):
    steady(client, name)
    other.seal_partition(name)
    num_values = values(other)
    with pytest.raises(InvalidRequestError, match="is sealed after 8 samples, 2 more were put"):
        client.put(rows(a=torch.tensor([7, 8])), partition_id=name)
    assert (stored(other, name, "a"), values(other), held(other, name)) == ([0, 1] * STEADY, num_values, 0)


def test_a_put_of_another_dtype_than_declared_is_refused(client, other, name):
    steady(client, name)
    client.create_partition(name, fields={"a": ("int64", None)})
    num_values = values(other)
    with pytest.raises(tq.SchemaConflictError, match="declared as dtype int64, this put brings dtype float32"):
        client.put(rows(a=torch.zeros(2)), partition_id=name)
    assert (stored(other, name, "a"), values(other), held(other, name)) == ([0, 1] * STEADY, num_values, 0)


@pytest.mark.parametrize("count", [2, 1500], ids=["one unit", "two units"])
def test_new_samples_whose_field_is_declared_otherwise_meanwhile_are_refused(client, other, name, writing, count):
    num_values = values(other)
    with (
        before(client, writing, lambda: other.create_partition(name, fields={"a": ("float32", None)})),
        pytest.raises(tq.SchemaConflictError, match="declared as dtype float32, this put brings dtype int64"),
    ):
        client.put(rows(a=torch.arange(count)), partition_id=name)
    nothing = (0, num_values, 0)
    assert until(
        lambda: (other.get_stats()["partitions"][name]["samples"], values(other), held(other, name)) == nothing
    )


@pytest.mark.parametrize("count", [2, 1500], ids=["one unit", "two units"])
def test_a_new_field_of_another_dtype_than_declared_is_refused(client, other, name, count):
    meta = client.put(rows(a=torch.arange(count)), partition_id=name)
    other.create_partition(name, fields={"b": ("float32", None)})
    num_values = values(other)
    with pytest.raises(tq.SchemaConflictError, match="declared as dtype float32, this put brings dtype int64"):
        client.put(rows(b=torch.arange(count)), metadata=meta)
    assert (values(other), held(other, name), meta.field_names) == (num_values, 0, ["a"])
    client.put(rows(b=torch.arange(count) / 2), metadata=meta)
    assert other.get_data(meta)["b"].tolist() == (torch.arange(count) / 2).tolist()
    client.clear_partition(name)


@pytest.mark.usefixtures("nothing_more")
@pytest.mark.parametrize("count", [2, 1500], ids=["one unit", "two units"])
def test_a_new_field_of_samples_that_are_cleared_meanwhile_is_refused(client, other, name, writing, count):
    meta = client.put(rows(a=torch.arange(count)), partition_id=name)
    gone = meta[:]
    with before(client, writing, lambda: other.clear_samples(gone)), pytest.raises(tq.SampleClearedError):
        client.put(rows(b=torch.arange(count)), metadata=meta)


@pytest.mark.usefixtures("nothing_more")
def test_a_new_field_of_samples_whose_partition_is_cleared_meanwhile_is_refused(client, other, name, writing):
    meta = client.put(rows(a=torch.arange(2)), partition_id=name)
    with before(client, writing, lambda: other.clear_partition(name)), pytest.raises(UnknownPartitionError):
        client.put(rows(b=torch.arange(2)), metadata=meta)


def test_of_two_that_put_the_same_new_field_both_are_published_and_one_s_values_stay(client, other, name, writing):
    meta = client.put(rows(a=torch.arange(2)), partition_id=name)
    same, num_values = meta[:], values(other)
    with before(client, writing, lambda: other.put(rows(b=torch.tensor([1, 1])), metadata=same)):
        client.put(rows(b=torch.tensor([2, 2])), metadata=meta)
    assert stored(other, name, "b") == [2, 2]
    assert values(other) - num_values in (2, 4), "the replaced ones may still lie in another unit"
    client.clear_partition(name)
    assert values(other) == num_values - 2


@pytest.mark.usefixtures("in_steps", "nothing_more")
def test_of_two_that_put_the_same_new_key_one_is_read_until_the_other_is_published(client, other, name):
    """The one that has made the key writes its values when those of the other are published already."""
    keys, read = list("abcdef"), []
    for key in keys:  # it may go to the same unit, or to another one
        first = before(client, "Write", lambda key=key: put_by_key(other, name, key, 1))
        with first, before(client, "Publish", lambda: read.append(stored(other, name, "a")[-1])):
            put_by_key(client, name, key, 2)
    assert read == [1] * len(keys)
    assert stored(other, name, "a") == [2] * len(keys)
    other.clear_partition(name)


# ---- writers that give up ----


ERRORS = {"cancelled": asyncio.CancelledError, "interrupted": KeyboardInterrupt, "no answer": QueueUnreachableError}
of_any_kind = pytest.mark.parametrize("error", ERRORS.values(), ids=ERRORS)


def check_whole_or_not_at_all(
    client: tq.TransferQueueClient, partition: str, field: str, old: list[Any], new: list[Any], count: int
) -> None:
    """``count``: of the values before."""

    def is_over() -> bool:
        return (held(client, partition), uncommitted(client)) == (0, 0)

    assert until(is_over), (held(client, partition), uncommitted(client))
    meta = everything(client, partition)
    seen = client.get_data(meta.select_fields(field))[field].tolist() if field in meta.field_names else []
    assert seen in (old, old + new)
    assert until(lambda: values(client) == count + len(seen) - len(old)), values(client)


def raises_unless(goes_on: bool, error: type[BaseException]) -> Any:
    return nullcontext() if goes_on and error is QueueUnreachableError else pytest.raises(error)


@of_any_kind
@pytest.mark.parametrize("stream", [True, False], ids=["in a stream", "alone"])
def test_new_samples_whose_put_was_given_up_when_it_was_answered(client, other, name, together, error, stream):
    """A write that a unit does not answer goes to another one. What is published is readable without a commit."""
    for at, step in enumerate(["Put"] if together else ["Reserve", "Write", "Publish"]):
        partition, old = f"{name}/{at}", [0, 1] * STEADY if stream else [9]
        if stream:
            steady(client, partition)
        else:
            other.put(rows(a=torch.tensor([9])), partition_id=partition)
        count = values(other)
        with giving_up(client, step, error("given up")) as given_up, raises_unless(step == "Write", error):
            client.put(rows(a=torch.tensor([7, 8])), partition_id=partition)
        assert given_up
        check_whole_or_not_at_all(other, partition, "a", old, [7, 8], count)
        client.put(rows(a=torch.tensor([5, 6])), partition_id=partition)
        assert stored(other, partition, "a")[-2:] == [5, 6]


@of_any_kind
def test_a_new_field_whose_put_was_given_up_when_it_was_answered(client, other, name, together, error):
    for at, step in enumerate(["Put"] if together else ["CheckFields", "Write", "Publish", "Commit"]):
        partition = f"{name}/{at}"
        meta = client.put(rows(a=torch.arange(2)), partition_id=partition)
        count = values(other)
        with giving_up(client, step, error("given up")) as given_up, raises_unless(step == "Write", error):
            client.put(rows(b=torch.tensor([7, 8])), metadata=meta[:])
        assert given_up
        check_whole_or_not_at_all(other, partition, "b", [], [7, 8], count)
        client.put(rows(b=torch.tensor([5, 6])), metadata=meta)
        assert stored(other, partition, "b") == [5, 6]
        assert values(other) - count in (2, 4), "the replaced ones may still lie in another unit"
        client.clear_partition(partition)
        assert values(other) == count - 2


async def cancelled_when_told(put: Any, other: tq.TransferQueueClient, turns: int) -> None:
    """Once a unit has dealt with the write, and the loop hasn't read its answer."""
    task = asyncio.create_task(put)
    for _ in range(turns):
        await asyncio.sleep(0)
    values(other)  # blocks the loop, and is answered after what was sent before it
    task.cancel()
    with pytest.raises(asyncio.CancelledError):
        await task


@pytest.mark.parametrize("turns", [1, 2, 3])
@pytest.mark.parametrize("field", ["a", "b"], ids=["new samples", "a new field"])
def test_a_put_that_is_cancelled_on_an_event_loop(client, other, name, field, turns):
    metas = steady(client, name)
    old, count = ([0, 1] * STEADY, values(other)) if field == "a" else ([], values(other))
    new, data = [7, 8] * (1 if field == "a" else STEADY), rows(**{field: torch.tensor([7, 8])})

    async def go() -> None:
        await client.async_put(rows(warm=torch.zeros(2)), partition_id=f"{name}/lines")  # the loop's own
        if field == "a":
            await cancelled_when_told(client.async_put(data, partition_id=name), other, turns)
        else:
            whole = rows(b=torch.tensor([7, 8] * STEADY))
            await cancelled_when_told(client.async_put(whole, metadata=tq.BatchMeta.concat(metas)), other, turns)

    asyncio.run(go())
    check_whole_or_not_at_all(other, name, field, old, new, count + 2)


# ---- writers that are killed ----


def put_and_die(partition: str, indexes: list[int], kind: str, sent: int) -> None:
    """Killed when so many of the put's messages of this kind were answered, and the others not even sent."""
    client = tq.get_client()
    client.get_stats()
    caller = client.session.caller
    ask = caller.call_many

    async def call_many(calls: Any, timeout_s: float) -> Any:
        made = list(calls)
        if kind_of(made[0]) == kind:
            await ask(made[:sent], timeout_s)
            die()
        return await ask(made, timeout_s)

    caller.call_many = call_many  # type: ignore[method-assign]
    column = torch.from_numpy(np.arange(1500))
    if indexes:
        client.put(rows(b=column), metadata=tq.BatchMeta(indexes, [partition] * len(indexes)))
    else:
        client.put(rows(a=column[:2]), partition_id=partition)


def deaths(together: bool, begin: str, units: int) -> list[tuple[str, int]]:
    """Every moment at which a writer may die: before and after each message."""
    if together:
        return [("Put", 0), ("Put", 1)]
    counts = {begin: 1, "Write": units, "Publish": 1}
    if begin == "CheckFields":  # values of new samples need no commit
        counts["Commit"] = units
    return [(kind, sent) for kind, count in counts.items() for sent in range(count + 1)]


def test_new_samples_of_a_killed_writer_are_there_whole_or_not_at_all(client, name, fork, together):
    for at, (kind, sent) in enumerate(deaths(together, "Reserve", 1)):
        partition = f"{name}/{at}"
        client.put(rows(a=torch.tensor([9])), partition_id=partition)
        count = values(client)
        assert ended(fork(put_and_die, partition, [], kind, sent)) == -signal.SIGKILL
        check_whole_or_not_at_all(client, partition, "a", [9], [0, 1], count)
        client.seal_partition(partition)
        assert client.get_meta(["a"], 1, partition, task_name="t", timeout_s=WAIT_S).size == 1


def test_a_new_field_of_a_killed_writer_is_there_whole_or_not_at_all(client, name, fork, together):
    for at, (kind, sent) in enumerate(deaths(together, "CheckFields", 2)):
        partition = f"{name}/{at}"
        meta = client.put(rows(a=torch.arange(1500)), partition_id=partition)
        count = values(client)
        assert ended(fork(put_and_die, partition, meta.global_indexes, kind, sent)) == -signal.SIGKILL
        check_whole_or_not_at_all(client, partition, "b", [], list(range(1500)), count)
        client.clear_partition(partition)


def put_a_new_field_and_end(partition: str, indexes: list[int]) -> None:
    column = torch.from_numpy(np.arange(len(indexes)))
    tq.get_client().put(rows(missed=column), metadata=tq.BatchMeta(indexes, [partition] * len(indexes)))
    die()


@pytest.mark.programs
def test_a_process_that_did_nothing_but_put_a_new_field_is_known_and_missed_when_it_is_killed(client, name, fork):
    meta = client.put(rows(a=torch.arange(2)), partition_id=name)
    assert ended(fork(put_a_new_field_and_end, name, meta.global_indexes)) == -signal.SIGKILL
    assert client.get_data(client.get_meta(["missed"], 2, name, task_name="t"))["missed"].tolist() == [0, 1]
    with pytest.raises(tq.ProducersGoneError, match="all producers of 'missed' have died"):
        client.get_meta(["missed"], 1, name, task_name="t", timeout_s=WAIT_S)
