# SPDX-License-Identifier: Apache-2.0
"""Views of stored values: the same as copies, valid as long as anything points at them, nobody else's business."""

from __future__ import annotations

import gc
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest
import torch
from tensordict import TensorDict

from tests.contract.storage_kit import ARENAS, BACKENDS, Backend, assert_same, meta, rows, some, until
from transfer_queue.errors import StorageKeyNotFoundError
from transfer_queue.transport.modes import run_blocking

PAGE = 4096
COUNT = 192


@pytest.fixture(params=BACKENDS)
def storage(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[Backend]:
    with BACKENDS[request.param](tmp_path) as backend:
        yield backend
        run_blocking(backend.manager.close())


@pytest.fixture(params=ARENAS)
def arena(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[Backend]:
    with BACKENDS[request.param](tmp_path) as backend:
        yield backend


def views(storage: Backend, indexes, *fields: str, manager=None) -> TensorDict:
    return run_blocking((manager or storage.manager).get_views(meta(indexes, fields)))


def large(first: int = 0, count: int = COUNT) -> torch.Tensor:
    return torch.arange(first, first + count * PAGE // 8).view(count, PAGE // 8)


def pins(storage: Backend) -> int:
    return sum(unit.pins for unit in run_blocking(storage.manager.stats()))


def jagged(lengths: list[int], *inner: int) -> torch.Tensor:
    offsets = torch.tensor([0, *lengths]).cumsum(0)
    return torch.nested.nested_tensor_from_jagged(some(torch.float32, sum(lengths), *inner), offsets)


COLUMNS = {
    "dense": lambda: large(),
    "small rows": lambda: some(torch.int16, COUNT, 3),
    "numbers": lambda: torch.arange(COUNT),
    "bool": lambda: some(torch.bool, COUNT, PAGE),
    "no bytes": lambda: some(torch.int64, COUNT, 0),
    "odd rows": lambda: some(torch.uint8, COUNT, 4097),
    "jagged": lambda: jagged([(n * 37) % 2000 for n in range(COUNT)]),
    "jagged of whole pages": lambda: jagged([1024 * (n % 3) for n in range(COUNT)]),
    "jagged of one length": lambda: jagged([1024] * COUNT),
    "jagged with inner dims": lambda: jagged([n % 9 for n in range(COUNT)], 40, 3),
    "jagged without values": lambda: jagged([0] * COUNT),
    "strided nested": lambda: torch.nested.as_nested_tensor(
        [torch.full((1 + n % 30, 1 + n % 20), float(n)) for n in range(COUNT)], layout=torch.strided
    ),
    "objects": lambda: [{"n": n, "text": "x" * 900} for n in range(COUNT)],
}
ORDERS = {
    "all": list(range(COUNT)),
    "one run": list(range(10, 150)),
    "one unit's": list(range(64, 128)),
    "reversed": list(range(COUNT - 1, -1, -1)),
    "repeated": [n // 2 for n in range(60, 200)],
    "scattered": np.random.default_rng(3).permutation(COUNT).tolist(),
    "two runs": [*range(100, 160), *range(20, 80)],
    "one": [77],
    "no rows": [],
}


@pytest.mark.parametrize("kind", COLUMNS)
def test_views_equal_copies_of_any_rows_in_any_order(storage, kind):
    storage.put(TensorDict({"x": COLUMNS[kind](), "y": torch.arange(COUNT)}, batch_size=[COUNT]), range(COUNT))
    for layout in ("jagged", "dense"):
        manager = storage.another(layout=layout)
        for order in ORDERS.values():
            got, expected = (
                views(storage, order, "x", "y", manager=manager),
                storage.get(order, "x", "y", layout=layout),
            )
            assert (list(got.keys()), got.batch_size) == (list(expected.keys()), expected.batch_size)
            for name in expected.keys():  # noqa: SIM118 (iterating a TensorDict gives rows)
                mine, theirs = got.get(name), expected.get(name)
                assert type(mine) is type(theirs)
                assert getattr(mine, "layout", None) == getattr(theirs, "layout", None)
                assert_same(rows(mine), rows(theirs))
        run_blocking(manager.close())


def test_views_of_blocks_of_several_puts_equal_copies(storage):
    for start in range(0, COUNT, 32):
        storage.put({"x": large(start, 32)}, range(start, start + 32))
    storage.put({"x": large(1000, 16)}, range(40, 56))
    for order in ORDERS.values():
        got, expected = views(storage, order, "x"), storage.get(order, "x")
        assert not order or all(map(torch.equal, got["x"].unbind(), expected["x"].unbind()))


def test_a_view_of_what_was_cleared_is_an_error(storage):
    storage.put({"x": large()}, range(COUNT))
    run_blocking(storage.manager.clear_rows([7]))
    with pytest.raises(StorageKeyNotFoundError, match="field 'x' for sample 7"):
        views(storage, range(COUNT), "x")


def test_writing_into_a_view_changes_nothing_stored_and_no_other_view(storage):
    data = large()
    storage.put({"x": data, "j": jagged([1024] * COUNT)}, range(COUNT))
    before = storage.column(range(COUNT), "j").values().view(torch.int32).clone()
    mine, other = (views(storage, range(COUNT), "x", "j") for _ in range(2))
    mine["x"].values().fill_(-1)
    mine["j"].values().fill_(-1)
    assert torch.equal(other["x"].values().view_as(data), data)
    assert torch.equal(storage.column(range(COUNT), "x", "dense"), data)
    assert torch.equal(storage.column(range(COUNT), "j").values().view(torch.int32), before)
    assert int(mine["x"].values().max()) == -1


def overwrite_and_use_all_that_is_free(storage: Backend, manager) -> None:
    """Clear everything, then write much, so that whatever was recycled gets other bytes."""
    run_blocking(manager.put_data(TensorDict({"x": large() * 0 - 1}, batch_size=[COUNT]), meta(range(COUNT), ["x"])))
    run_blocking(manager.clear_rows(range(COUNT)))
    for n in range(1, 5):
        garbage = TensorDict({"x": large() * 0 - n}, batch_size=[COUNT])
        run_blocking(manager.put_data(garbage, meta(range(1000 * n, 1000 * n + COUNT), ["x"])))


def test_a_view_stays_as_it_was_when_its_samples_are_overwritten_and_cleared(storage):
    storage.put({"x": large()}, range(COUNT))
    view = views(storage, range(COUNT), "x")
    overwrite_and_use_all_that_is_free(storage, storage.manager)
    assert torch.equal(view["x"].values().view(COUNT, -1), large())


def test_a_view_stays_as_it_was_when_its_manager_is_closed(arena):
    arena.put({"x": large()}, range(COUNT))
    reader = arena.another()
    view = views(arena, range(COUNT), "x", manager=reader)
    run_blocking(reader.close())
    overwrite_and_use_all_that_is_free(arena, arena.manager)
    assert torch.equal(view["x"].values().view(COUNT, -1), large())
    assert pins(arena) > 0
    del view
    gc.collect()
    until(arena.manager, lambda stats: all((unit.pins, unit.attached) == (0, 1) for unit in stats))


def test_a_view_stays_as_it_was_when_the_units_have_ended(arena):
    arena.put({"x": large()}, range(COUNT))
    view = views(arena, range(COUNT), "x")
    arena.end()
    run_blocking(arena.manager.close())
    gc.collect()
    assert torch.equal(view["x"].values().view(COUNT, -1), large())


LAST_POINTERS = {
    "nested tensor": lambda view: view["x"],
    "one row": lambda view: view["x"].unbind()[COUNT // 2],
    "a slice of the values": lambda view: view["x"].values()[5:7, None],
    "an array": lambda view: view["x"].values().numpy()[3:],
}


@pytest.mark.parametrize("pointer", LAST_POINTERS.values(), ids=LAST_POINTERS)
def test_memory_is_recycled_when_the_last_view_of_it_is_gone_and_not_before(arena, pointer):
    arena.put({"x": large()}, range(COUNT))
    view = views(arena, range(COUNT), "x")
    run_blocking(arena.manager.clear_rows(range(COUNT)))
    last = pointer(view)
    del view
    gc.collect()
    stats = run_blocking(arena.manager.stats())
    assert ([unit.pins for unit in stats], sum(unit.arena_nbytes for unit in stats)) == ([1] * len(stats), COUNT * PAGE)
    del last
    gc.collect()
    until(arena.manager, lambda stats: not any(unit.pins or unit.arena_nbytes for unit in stats))


def test_runs_of_several_units_are_stitched_into_one_tensor_without_a_copy(arena):
    arena.put({"x": large()}, range(COUNT))
    view = views(arena, range(COUNT), "x")["x"].values()
    assert view.is_contiguous()
    assert torch.equal(view.view(COUNT, -1), large())
    stats = run_blocking(arena.manager.stats())
    assert [unit.pins for unit in stats] == [1] * len(stats), "the values are still where they were put"


def test_rows_that_can_not_be_stitched_are_copied_and_pinned_by_nobody(arena):
    arena.put({"x": large(), "y": some(torch.uint8, COUNT, 4097)}, range(COUNT))
    kept = [views(arena, range(COUNT - 1, -1, -1), "x"), views(arena, [0, 0, *range(64)], "x")]
    until(arena.manager, lambda stats: not any(unit.pins for unit in stats))
    assert [len(batch) for batch in kept] == [COUNT, 66]


def test_views_that_were_dropped_in_many_rounds_leave_nothing_mapped(arena):
    arena.put({"x": large()}, range(COUNT))
    for _ in range(3):
        views(arena, range(COUNT), "x")

    def mappings() -> int:
        return len(Path("/proc/self/maps").read_text().splitlines())

    before = mappings()
    for _ in range(50):
        views(arena, range(COUNT), "x")
    gc.collect()
    assert mappings() <= before + 5
    until(arena.manager, lambda stats: not any(unit.pins for unit in stats))
