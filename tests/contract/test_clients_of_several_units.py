# SPDX-License-Identifier: Apache-2.0
"""Clients of several storage units: values are read where the metadata say, also after a unit has ended."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest
import torch

from tests.contract.storage_kit import until
from tests.contract.units_kit import PAGE, ROOM, SmallQueue, freezing, held, key, pages, put_key, take
from transfer_queue import TransferQueueClient
from transfer_queue.errors import BatchTimeoutError, QueueUnreachableError, UnitLostError

KINDS: dict[str, Callable[[Path], SmallQueue]] = {
    "frames": lambda path: SmallQueue(None, 0),
    "arena": lambda path: SmallQueue(path, 0),
}


@pytest.fixture(params=KINDS.values(), ids=KINDS)
def queue(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[SmallQueue]:
    made = request.param(tmp_path)
    yield made
    made.close()


def manager_of(client: TransferQueueClient) -> Any:
    return client.storage_manager


def values_by_unit(client: TransferQueueClient) -> list[int]:
    return [values for values, _ in held(manager_of(client))]


def column(client: TransferQueueClient, meta: Any, field: str = "x") -> torch.Tensor:
    return torch.stack(list(client.get_data(meta)[field].unbind()))


def lost(client: TransferQueueClient) -> dict[str, int]:
    found: dict[str, int] = client.get_stats()["partitions"]["p"]["lost"]
    return found


# ---- rewrites ----


def test_a_field_that_was_put_again_into_another_unit_is_read_from_there(queue):
    client, other = queue.start(ROOM, ROOM).client(), queue.client()
    meta = client.put(pages(4), partition_id="p")
    for factor in (-1, 2, -3):
        client.put(factor * pages(4), metadata=meta)
        assert column(client, meta).equal(factor * pages(4)["x"])
        assert column(other, meta).equal(factor * pages(4)["x"])
    assert sorted(values_by_unit(client)) in ([0, 4], [4, 4]), "it moved once at most"
    part = meta.select_samples([1, 2])
    client.put(pages(2, first=70), metadata=part)
    assert 0 not in values_by_unit(client), "samples that are put by different puts are spread"
    assert column(other, meta)[1:3].equal(pages(2, first=70)["x"])
    assert column(other, meta)[::3].equal(-3 * pages(4)["x"][::3])
    client.clear_partition("p")
    assert values_by_unit(client) == [0, 0]


def holding_up(client: TransferQueueClient, monkeypatch: Any, then: Callable[[], object]) -> None:
    """Between the publish and the commit of each of its puts, do this."""
    commit = manager_of(client).commit

    async def later(*args: Any) -> None:
        then()
        await commit(*args)

    monkeypatch.setattr(manager_of(client), "commit", later)


def having_stored(client: TransferQueueClient, monkeypatch: Any, then: Callable[[], object]) -> None:
    """Between the write and the publish of each of its puts, do this."""
    write = manager_of(client).write

    async def stored(*args: Any) -> Any:
        units = await write(*args)
        then()
        return units

    monkeypatch.setattr(manager_of(client), "write", stored)


def cut_off_before_commits(client: TransferQueueClient, monkeypatch: Any) -> None:
    async def fails(*args: Any) -> None:
        raise QueueUnreachableError("cut off")

    monkeypatch.setattr(manager_of(client), "commit", fails)


def numbered(meta: Any, number: int) -> dict[str, torch.Tensor]:
    return {"x": torch.full((meta.size, PAGE // 8), number, dtype=torch.int64)}


@pytest.mark.parametrize("by", ["get_data", "fetch", "stream"])
def test_a_value_that_comes_back_to_a_unit_is_never_older_there_than_the_last_put(queue, monkeypatch, by):
    client, other = queue.start(ROOM, ROOM).client(), queue.client()
    meta = client.put(pages(4), partition_id="p")
    later, tasks, seen = meta.select_samples([1, 2, 3]), itertools.count(), list[tuple[int, int]]()

    def version() -> int:
        """Of the last sample."""
        if by == "get_data":
            return int(column(other, meta)[3, 0])
        if by == "stream":
            return int(take(other, 4, f"t{next(tasks)}")[3, 0])
        return int(column(other, other.get_meta(["x"], 4, "p", task_name=f"t{next(tasks)}"))[3, 0])

    holding_up(client, monkeypatch, lambda: seen.append((number, version())))
    for number in range(1, 9):
        put = (meta, later)[number % 2]
        client.put(numbered(put, number), metadata=put)
        assert version() == number
    assert 0 not in values_by_unit(client), "it moved"
    assert seen == [(number, number) for number in range(1, 9)], "whoever reads a published value has it committed"


def test_a_write_whose_commit_comes_late_does_not_undo_a_later_put(queue, monkeypatch):
    client, other = queue.start(ROOM).client(), queue.client()
    meta = client.put(pages(4), partition_id="p", tags=[{"v": 0}] * 4)
    holding_up(client, monkeypatch, lambda: other.put(numbered(meta, 3), metadata=meta, tags=[{"v": 3}] * 4) and None)
    client.put(numbered(meta, 2), metadata=meta, tags=[{"v": 2}] * 4)
    batch = other.get_meta(["x"], 4, "p", task_name="t")
    assert (column(other, batch)[:, 0].tolist(), [tag["v"] for tag in batch.custom_meta]) == ([3] * 4, [3] * 4)


def test_a_late_commit_of_the_first_value_of_a_key_does_not_undo_a_later_put(queue, monkeypatch):
    client, other = queue.start(ROOM).client(), queue.client()
    holding_up(client, monkeypatch, lambda: put_key(other, 2))
    put_key(client, 1)
    assert key(other) == (2, 2)


def test_a_reader_gets_no_value_that_is_not_published_and_the_put_that_is_published_last_stays(queue, monkeypatch):
    client, other, reader = queue.start(ROOM).client(), queue.client(), queue.client()
    seen: list[tuple[int, int]] = []
    holding_up(other, monkeypatch, lambda: seen.append(key(reader)))
    having_stored(client, monkeypatch, lambda: put_key(other, 4))
    put_key(client, 5)
    assert (seen, key(reader)) == ([(4, 4)], (5, 5))


@pytest.mark.parametrize("ends", ["its call is given up", "its session ends"])
def test_a_put_that_is_published_last_stays_although_its_writer_ends_before_an_earlier_one(queue, monkeypatch, ends):
    client, other, reader = queue.start(ROOM, ROOM).client(), queue.client(), queue.client()
    put_key(client, 1)
    seen: list[tuple[int, int]] = []

    def put_and_end() -> None:
        with pytest.raises(QueueUnreachableError):
            put_key(other, 3)
        if ends == "its session ends":
            other.close()
        seen.append(key(reader))

    cut_off_before_commits(other, monkeypatch)
    if ends == "its session ends":  # without a word of its calls
        monkeypatch.setattr(other.session, "cancel", nothing)
    holding_up(client, monkeypatch, put_and_end)
    put_key(client, 2)
    assert (seen, key(reader)) == ([(3, 3)], (3, 3))


async def nothing(*args: Any) -> None: ...


def test_a_put_beside_a_save_waits_for_it_also_where_it_could_go_through_the_controller(queue):
    client, other = queue.start(ROOM, own=ROOM).client(), queue.client()
    put_key(client, 1)
    with ThreadPoolExecutor() as pool:
        with freezing(other):
            put = pool.submit(put_key, client, 2)
            while not (any(each["writer"] for each in other.get_stats()["waiting"]) or put.done()):
                pass
        put.result()
    assert key(other) == (2, 2)


def test_a_put_of_a_writer_that_ends_before_its_commit_is_read_and_saved_whole(queue, monkeypatch, tmp_path):
    client, other = queue.start(ROOM, ROOM).client(), queue.client()
    meta = client.put(pages(4), partition_id="p")
    cut_off_before_commits(client, monkeypatch)
    with pytest.raises(QueueUnreachableError):
        client.put(numbered(meta, 2), metadata=meta, tags=[{"v": 2}] * 4)
    other.save_checkpoint(tmp_path / "saved")
    assert column(other, meta)[0, 0] == 2
    other.load_checkpoint(tmp_path / "saved")
    batch = other.get_meta(["x"], 4, "p", task_name="t")
    assert (column(other, batch)[:, 0].tolist(), [tag["v"] for tag in batch.custom_meta]) == ([2] * 4, [2] * 4)


def test_values_that_are_replaced_again_and_again_take_the_room_of_two_at_most(queue):
    client = queue.start(ROOM, ROOM, ROOM).client()
    metas = [client.put(pages(20, first=n), partition_id="p") for n in range(4)]
    for number in range(24):
        client.put(numbered(metas[number % 4], number), metadata=metas[number % 4])
    assert sum(values_by_unit(client)) <= 160


def test_fields_and_batches_that_lie_in_several_units_come_back_whole(queue):
    client = queue.start(ROOM, ROOM, ROOM).client()
    metas = [client.put(pages(2, first=n), partition_id="p") for n in range(6)]
    for n, meta in enumerate(metas):
        client.put(pages(2, "y", first=10 + n), metadata=meta)
    assert [count > 0 for count in values_by_unit(client)] == [True] * 3
    batch = client.get_meta(["x", "y"], 12, "p", task_name="t")
    for field, first in (("x", 0), ("y", 10)):
        expected = torch.cat([pages(2, field, first + n)[field] for n in range(6)])
        assert column(client, batch, field).equal(expected)


# ---- a unit in the controller's process, and others ----


def test_puts_go_to_the_controller_s_unit_and_to_those_that_joined_and_are_read_alike(queue):
    client = queue.start(ROOM, ROOM, own=ROOM).client()
    metas = [client.put(pages(20, first=n), partition_id="p") for n in range(14)]
    assert sum(values_by_unit(client)) == 280
    assert values_by_unit(client)[0] > 60
    for n, meta in enumerate(metas):
        assert column(client, meta).equal(pages(20, first=n)["x"])
    for n in range(14):
        batch = client.get_meta(["x"], 20, "p", task_name="t")
        assert column(client, batch).equal(pages(20, first=n)["x"])
    client.clear_partition("p")  # the controller has the values in the others deleted
    until(manager_of(client), lambda stats: not any(unit.values for unit in stats))


def test_a_put_larger_than_the_controller_s_unit_is_spread(queue):
    client = queue.start(ROOM, ROOM, own=ROOM).client()
    meta = client.put(pages(150), partition_id="p")
    assert column(client, meta).equal(pages(150)["x"])


# ---- units that end ----


def test_lost_values_are_told_and_not_given_to_anybody_until_they_are_put_again(queue):
    client = queue.start(ROOM, ROOM).client()
    metas = [client.put(pages(4, first=n), partition_id="p") for n in range(2)]
    assert values_by_unit(client) == [4, 4]
    queue.end(1)
    assert lost(client) == {"x": 4}
    intact = client.get_meta(["x"], 4, "p", task_name="t")
    gone = next(meta for meta in metas if meta.global_indexes != intact.global_indexes)
    assert column(client, intact).equal(pages(4, first=metas.index(gone) ^ 1)["x"])
    told = r"0 ready, 4 lack field 'x', .*4 samples lost 'x' with a storage unit.*get_lost_samples\('p'\)"
    with pytest.raises(BatchTimeoutError, match=told):
        client.get_meta(["x"], 1, "p", task_name="t", timeout_s=0.01)
    with pytest.raises(UnitLostError, match=r"field .x. of 4 samples"):
        client.get_data(gone)
    client.put(pages(4, first=7), metadata=gone)
    again = client.get_meta(["x"], 4, "p", task_name="t")
    assert (column(client, again).equal(pages(4, first=7)["x"]), lost(client)) == (True, {})


def ending(queue: SmallQueue, step: Any, when: str) -> Any:
    """The same step of a put; the first unit that it wrote to ends before it returns, or before it begins."""
    ended: list[int] = []

    async def stepped(call: int, *args: Any) -> Any:
        result = await step(call, *args) if when == "after" else None
        units = result if when == "after" else args[-1]
        if not ended:
            ended.append(units[0][0])
            queue.end(units[0][0])
        return result if when == "after" else await step(call, *args)

    return stepped


@pytest.mark.parametrize("count", [10, 60])
def test_a_put_whose_unit_ends_before_its_publish_is_put_elsewhere(queue, monkeypatch, count):
    client = queue.start(ROOM, ROOM, ROOM).client()
    manager = manager_of(client)
    monkeypatch.setattr(manager, "write", ending(queue, manager.write, "after"))
    meta = client.put(pages(count), partition_id="p")
    assert column(client, meta).equal(pages(count)["x"])
    assert (sum(values_by_unit(client)), client.get_stats()["partitions"]["p"]["samples"]) == (count, count)


@pytest.mark.parametrize("count", [10, 60])
def test_a_put_whose_unit_ends_when_it_is_published_has_one_effect_and_its_lost_values_are_told(
    queue, monkeypatch, count
):
    client = queue.start(ROOM, ROOM, ROOM).client()
    monkeypatch.setattr(manager_of(client), "written", lambda call, units: queue.end(units[0][0]))
    meta = client.put(pages(count), partition_id="p")
    survived = sum(values_by_unit(client))
    assert client.get_stats()["partitions"]["p"]["samples"] == count
    assert lost(client) == {"x": count - survived}
    if survived:
        intact = client.get_meta(["x"], survived, "p", task_name="t")
        chosen = [meta.global_indexes.index(index) for index in intact.global_indexes]
        assert column(client, intact).equal(pages(count)["x"][chosen])


def test_a_put_into_a_queue_without_units_is_refused_and_reserves_nothing(queue):
    client = queue.start(ROOM, ROOM).client()
    client.put(pages(1), partition_id="p")
    for number in (1, 2):
        queue.end(number)
    with pytest.raises(UnitLostError, match="no storage unit"):
        client.put(pages(1), partition_id="p")
    assert client.get_stats()["partitions"]["p"]["held"] == 0
    assert queue.join(ROOM) == 3
    meta = client.put(pages(1), partition_id="p")
    assert column(client, meta).nbytes == PAGE
