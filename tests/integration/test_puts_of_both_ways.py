# SPDX-License-Identifier: Apache-2.0
"""Puts that the storage publishes on its way, and those that their client publishes itself: whole or not at all."""

from __future__ import annotations

import asyncio
import os
import signal
from collections.abc import Callable, Iterator
from typing import Any

import numpy as np
import pytest
import torch
from tensordict import TensorDict

import transfer_queue as tq
from tests.integration.noticing import ended, until
from transfer_queue.errors import InvalidRequestError, QueueUnreachableError, UnknownPartitionError
from transfer_queue.interface import connect
from transfer_queue.transport.modes import run_blocking

WAIT_S = 20.0
STEADY = 4
"""So many puts of one size, and the next one has its indexes already."""


@pytest.fixture(scope="module", params=["one", "each"])
def queue(request: pytest.FixtureRequest) -> Iterator[Any]:
    """In one process a unit tells the controller what it keeps; in processes of their own the client does.

    A limit that is never reached spreads every 64 samples over the units, also where they share a process.
    """
    limited = {"SimpleStorage": {"num_data_storage_units": 2, "capacity_bytes": 1 << 30}}
    yield tq.init({"server_processes": request.param, "controller": {"producer_grace_s": 0.2}, "backend": limited})
    tq.close()


@pytest.fixture
def other(queue: Any) -> Iterator[tq.TransferQueueClient]:
    client = connect("other", queue)
    yield client
    client.close()


def rows(**columns: Any) -> TensorDict:
    return TensorDict(columns, batch_size=[len(next(iter(columns.values())))])


def values(client: tq.TransferQueueClient) -> int:
    """That all units hold."""
    return sum(unit["values"] for unit in client.get_storage_stats())


def held(client: tq.TransferQueueClient, partition: str) -> int:
    """Samples that are reserved, and neither published nor given back."""
    return int(client.get_stats()["partitions"].get(partition, {}).get("held", 0))


@pytest.fixture
def nothing_more(client, name) -> Iterator[None]:
    """The test leaves as many values as there were, and nothing reserved."""
    before = values(client)
    yield
    assert (values(client), held(client, name)) == (before, 0)


def everything(client: tq.TransferQueueClient, partition: str) -> tq.BatchMeta:
    return client.get_meta(partition_id=partition, mode="force_fetch")


def stored(client: tq.TransferQueueClient, partition: str, field: str) -> list[Any]:
    """The values of all samples of a partition."""
    return client.get_data(everything(client, partition).select_fields(field))[field].tolist()


def just_before(monkeypatch: Any, client: Any, write: str, act: Callable[[], Any]) -> None:
    """``act`` once all is reserved or checked, and before any value is sent."""
    put = getattr(client.storage_manager, write)

    async def later(*args: Any, **kwargs: Any) -> Any:
        monkeypatch.undo()
        act()
        return await put(*args, **kwargs)

    monkeypatch.setattr(client.storage_manager, write, later)


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

    steady(client, name)  # so that there is a reservation, which such a put must not try
    meta = client.put({"a": torch.tensor([1, 2])}, partition_id=name, data_parser=doubled, tags=[{"x": 1}, {}])
    assert (len(runs), meta.custom_meta, client.get_data(meta)["a"].tolist()) == (1, [{"x": 1}, {}], [2, 4])
    client.put({"b": torch.tensor([3, 4])}, metadata=meta, data_parser=lambda columns: {"b": columns["b"] + 1})
    assert client.get_data(meta)["b"].tolist() == [4, 5]


@pytest.mark.parametrize("numbers", [1, 1000], ids=["inline", "in the arena"])
def test_puts_over_two_units_are_published_whole(client, other, name, numbers):
    meta = client.put(rows(a=torch.arange(1500 * numbers).view(1500, numbers)), partition_id=name)
    assert all(unit["values"] for unit in client.get_storage_stats()), "or it wasn't over both"
    client.put(rows(b=torch.arange(1500)), metadata=meta)
    client.put(rows(a=-torch.arange(1500 * numbers).view(1500, numbers)), metadata=meta)
    found = other.get_data(other.get_meta(["a", "b"], 1500, name, task_name="t"))
    assert (-found["a"].values().view(1500, numbers)).equal(torch.arange(1500 * numbers).view(1500, numbers))
    assert found["b"].tolist() == list(range(1500))
    client.clear_partition(name)


def test_a_put_under_way_when_its_partition_is_sealed_still_arrives(client, other, name, monkeypatch):
    just_before(monkeypatch, client, "put_and_tell", lambda: other.seal_partition(name))
    client.put(rows(a=torch.tensor([1, 2])), partition_id=name)
    assert (stored(other, name, "a"), held(other, name)) == ([1, 2], 0)


# ---- refused at the publish ----


@pytest.mark.usefixtures("nothing_more")
def test_a_put_whose_partition_is_cleared_before_its_values_come_is_refused(client, other, name, monkeypatch):
    just_before(monkeypatch, client, "put_and_tell", lambda: other.clear_partition(name))
    with pytest.raises(UnknownPartitionError):
        client.put(rows(a=torch.arange(2)), partition_id=name)
    assert name not in other.get_partition_list()


def test_a_put_with_a_reservation_of_a_cleared_partition_begins_it_anew(client, other, name):
    before = values(other)
    steady(client, name)
    other.clear_partition(name)
    meta = client.put(rows(a=torch.tensor([7, 8])), partition_id=name)
    assert (stored(other, name, "a"), values(other), held(other, name)) == ([7, 8], before + 2, 0)
    assert everything(other, name).global_indexes == meta.global_indexes


def test_a_put_with_a_reservation_of_a_sealed_partition_is_refused(client, other, name):
    steady(client, name)
    other.seal_partition(name)
    before = values(other)
    with pytest.raises(InvalidRequestError, match="is sealed after 8 samples, 2 more were put"):
        client.put(rows(a=torch.tensor([7, 8])), partition_id=name)
    assert (stored(other, name, "a"), values(other), held(other, name)) == ([0, 1] * STEADY, before, 0)


def test_a_put_with_a_reservation_and_another_dtype_is_refused(client, other, name):
    steady(client, name)
    before = values(other)
    with pytest.raises(tq.SchemaConflictError, match="holds dtype int64, this put brings dtype float32"):
        client.put(rows(a=torch.zeros(2)), partition_id=name)
    assert (stored(other, name, "a"), values(other), held(other, name)) == ([0, 1] * STEADY, before, 0)


@pytest.mark.parametrize("count", [2, 1500], ids=["one unit", "two units"])
def test_new_samples_whose_field_got_another_dtype_meanwhile_are_refused(client, other, name, monkeypatch, count):
    before = values(other)
    just_before(monkeypatch, client, "put_and_tell", lambda: other.put(rows(a=torch.tensor([0.5])), partition_id=name))
    with pytest.raises(tq.SchemaConflictError, match="holds dtype float32, this put brings dtype int64"):
        client.put(rows(a=torch.arange(count)), partition_id=name)
    assert (stored(other, name, "a"), values(other), held(other, name)) == ([0.5], before + 1, 0)


@pytest.mark.parametrize("count", [2, 1500], ids=["one unit", "two units"])
def test_a_new_field_of_another_dtype_than_other_samples_have_is_refused(client, other, name, count):
    meta = client.put(rows(a=torch.arange(count)), partition_id=name)
    other.put(rows(b=torch.tensor([0.5])), partition_id=name)
    before = values(other)
    with pytest.raises(tq.SchemaConflictError, match="holds dtype float32, this put brings dtype int64"):
        client.put(rows(b=torch.arange(count)), metadata=meta)
    assert (values(other), held(other, name), meta.field_names) == (before, 0, ["a"])
    client.put(rows(b=torch.arange(count) / 2), metadata=meta)
    assert other.get_data(meta)["b"].tolist() == (torch.arange(count) / 2).tolist()
    client.clear_partition(name)


@pytest.mark.usefixtures("nothing_more")
@pytest.mark.parametrize("count", [2, 1500], ids=["one unit", "two units"])
def test_a_new_field_of_samples_that_are_cleared_meanwhile_is_refused(client, other, name, monkeypatch, count):
    meta = client.put(rows(a=torch.arange(count)), partition_id=name)
    gone = meta[:]
    just_before(monkeypatch, client, "update_data", lambda: other.clear_samples(gone))
    with pytest.raises(tq.SampleClearedError):
        client.put(rows(b=torch.arange(count)), metadata=meta)


@pytest.mark.usefixtures("nothing_more")
def test_a_new_field_of_samples_whose_partition_is_cleared_meanwhile_is_refused(client, other, name, monkeypatch):
    meta = client.put(rows(a=torch.arange(2)), partition_id=name)
    just_before(monkeypatch, client, "update_data", lambda: other.clear_partition(name))
    with pytest.raises(UnknownPartitionError):
        client.put(rows(b=torch.arange(2)), metadata=meta)


def test_of_two_that_put_the_same_new_field_both_are_published_and_one_s_values_stay(client, other, name, monkeypatch):
    meta = client.put(rows(a=torch.arange(2)), partition_id=name)
    same, before = meta[:], values(other)
    just_before(monkeypatch, client, "update_data", lambda: other.put(rows(b=torch.tensor([1, 1])), metadata=same))
    client.put(rows(b=torch.tensor([2, 2])), metadata=meta)
    assert (stored(other, name, "b"), values(other)) == ([2, 2], before + 2)


# ---- writers that give up ----


class LosesAnswers:
    """A caller whose next calls to units get no answer: ``error`` is raised instead. They arrive at once, before the
    next call that isn't a withdrawal, or with ``deliver``."""

    def __init__(self, call_many: Any, error: BaseException, arrive: str) -> None:
        self._call_many, self._error, self._arrive = call_many, error, arrive
        self._lost: list[Any] = []
        self._done = False

    async def __call__(self, calls: Any, timeout_s: float) -> Any:
        made = list(calls)
        if not self._done and "unit" in made[0].peer.name:
            self._done, self._lost = True, made
            if self._arrive == "at once":
                self.deliver()
            raise self._error
        if self._arrive == "next" and b"Withdraw" not in made[0].header:
            self.deliver()
        return await self._call_many(made, timeout_s)

    def deliver(self) -> None:
        lost, self._lost = self._lost, []
        run_blocking(self._call_many(lost, 10.0))


ERRORS = {"cancelled": asyncio.CancelledError, "interrupted": KeyboardInterrupt, "no answer": QueueUnreachableError}


@pytest.fixture(params=ERRORS.values(), ids=ERRORS)
def error(request: pytest.FixtureRequest) -> BaseException:
    made: BaseException = request.param("given up")
    return made


@pytest.fixture(params=["at once", "next", "at last"])
def loses_answers(request, client, monkeypatch, error) -> Callable[[], LosesAnswers]:
    """From the call of this on."""
    caller = client.session.caller

    def lose() -> LosesAnswers:
        lossy = LosesAnswers(caller.call_many, error, request.param)
        monkeypatch.setattr(caller, "call_many", lossy)
        return lossy

    return lose


def check_whole_or_not_at_all(
    client: tq.TransferQueueClient, partition: str, field: str, old: list[Any], new: list[Any], count: int
) -> None:
    """``count``: of the values before."""
    meta = everything(client, partition)
    seen = client.get_data(meta.select_fields(field))[field].tolist() if field in meta.field_names else []
    assert seen in (old, old + new)
    assert (values(client), held(client, partition)) == (count + len(seen) - len(old), 0)


@pytest.mark.parametrize("stream", [True, False], ids=["in a stream", "alone"])
def test_new_samples_whose_put_missed_its_answer(client, other, name, monkeypatch, loses_answers, error, stream):
    old = [0, 1] * STEADY if stream else [9]
    if stream:
        steady(client, name)
    else:
        other.put(rows(a=torch.tensor([9])), partition_id=name)
    count = values(other)
    lossy = loses_answers()
    with pytest.raises(type(error)):
        client.put(rows(a=torch.tensor([7, 8])), partition_id=name)
    monkeypatch.undo()
    lossy.deliver()
    check_whole_or_not_at_all(other, name, "a", old, [7, 8], count)
    client.put(rows(a=torch.tensor([5, 6])), partition_id=name)
    assert stored(other, name, "a")[-2:] == [5, 6]


def test_a_new_field_whose_put_missed_its_answer(client, other, name, monkeypatch, loses_answers, error):
    meta = client.put(rows(a=torch.arange(2)), partition_id=name)
    count = values(other)
    lossy = loses_answers()
    with pytest.raises(type(error)):
        client.put(rows(b=torch.tensor([7, 8])), metadata=meta[:])
    monkeypatch.undo()
    lossy.deliver()
    check_whole_or_not_at_all(other, name, "b", [], [7, 8], count)
    client.put(rows(b=torch.tensor([5, 6])), metadata=meta)
    assert (stored(other, name, "b"), values(other)) == ([5, 6], count + 2)


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


def die(*_: Any, **__: Any) -> Any:
    os.kill(os.getpid(), signal.SIGKILL)


def put_and_die(partition: str, indexes: list[int], sent: int) -> None:
    """Killed when so many messages to units were sent: while the next is made, or as soon as the last is out."""
    client = tq.get_client()
    client.get_stats()
    caller = client.session.caller
    ask = caller.call_many

    async def call_many(calls: Any, timeout_s: float) -> Any:
        return await ask(dying(calls), timeout_s)

    def dying(calls: Any) -> Iterator[Any]:
        nonlocal sent
        for call in calls:
            if "unit" in call.peer.name:
                if not sent:
                    die()
                sent -= 1
            yield call
            if not sent and "unit" in call.peer.name:
                die()

    caller.call_many = call_many
    column = torch.from_numpy(np.arange(1500))
    if indexes:
        client.put(rows(b=column), metadata=tq.BatchMeta(indexes, [partition] * len(indexes)))
    else:
        client.put(rows(a=column[:2]), partition_id=partition)


@pytest.mark.parametrize("sent", [0, 1], ids=["before it wrote", "when it wrote"])
def test_new_samples_of_a_killed_writer_are_there_whole_or_not_at_all(client, name, fork, sent):
    client.put(rows(a=torch.tensor([9])), partition_id=name)
    count = values(client)
    assert ended(fork(put_and_die, name, [], sent)) == -signal.SIGKILL
    assert until(lambda: held(client, name) == 0)
    check_whole_or_not_at_all(client, name, "a", [9], [0, 1], count)
    client.seal_partition(name)
    assert client.get_meta(["a"], 1, name, task_name="t", timeout_s=WAIT_S).size == 1


@pytest.mark.parametrize("sent", [0, 1, 2], ids=["before it wrote", "when it wrote half", "when it wrote"])
def test_a_new_field_of_a_killed_writer_is_there_whole_or_not_at_all(client, name, fork, sent):
    meta = client.put(rows(a=torch.arange(1500)), partition_id=name)
    count = values(client)
    assert ended(fork(put_and_die, name, meta.global_indexes, sent)) == -signal.SIGKILL
    assert until(lambda: values(client) == count), "two units: nobody published it"
    check_whole_or_not_at_all(client, name, "b", [], list(range(1500)), count)
    client.clear_partition(name)


def put_a_new_field_and_end(partition: str, indexes: list[int]) -> None:
    column = torch.from_numpy(np.arange(len(indexes)))
    tq.get_client().put(rows(b=column), metadata=tq.BatchMeta(indexes, [partition] * len(indexes)))
    die()


def test_a_process_that_did_nothing_but_put_a_new_field_is_known_and_missed_when_it_is_killed(client, name, fork):
    meta = client.put(rows(a=torch.arange(2)), partition_id=name)
    assert ended(fork(put_a_new_field_and_end, name, meta.global_indexes)) == -signal.SIGKILL
    assert client.get_data(client.get_meta(["b"], 2, name, task_name="t"))["b"].tolist() == [0, 1]
    with pytest.raises(tq.ProducersGoneError, match="every producer of field 'b' has died"):
        client.get_meta(["b"], 1, name, task_name="t", timeout_s=WAIT_S)
