# SPDX-License-Identifier: Apache-2.0
"""Streams of groups of which some leave after they were drawn: nothing else is skipped, and ranks keep step."""

from __future__ import annotations

from itertools import islice
from typing import Any

import pytest
import torch

import transfer_queue as tq


def drawn_by(client: Any, task: str, partition: str, sizes: list[int], **terms: Any) -> None:
    """Closed groups of so many rows each, which have the number of their group."""
    client.add_groups({"number": torch.arange(len(sizes))}, partition, tasks=[task], **terms)
    client.seal_partition(partition)
    for lease in client.lease(partition, len(sizes)):
        number = int(lease.head["number"][0])
        lease.close({"answer": torch.full((sizes[number],), number)})


def stream(task: str, partition: str, micro: int | None, state: Any = None, **options: Any) -> tq.StreamingDataset:
    options = {"dp_rank": 0, "prefetch": False, "timeout_s": 20.0, **options}
    made = tq.StreamingDataset(None, None, micro, ["answer"], partition, task, **options)
    if state is not None:
        made.load_state_dict(state)
    return made


def numbers(item: Any) -> list[int]:
    return item[0]["answer"].tolist()


def take(dataset: tq.StreamingDataset, count: int | None = None) -> tuple[list[list[int]], dict[str, Any]]:
    """The next micro-batches, all if ``count`` is None, and the position after them."""
    items = iter(dataset)
    found = [numbers(item) for item in islice(items, count)]
    state = dataset.state_dict()
    items.close()  # type: ignore[attr-defined]
    dataset.close()
    return found, state


def reject(client: Any, task: str, partition: str, number: int, batch: int = 0, rank: int = 0) -> None:
    """The group of this number, as a reader of the batch sees it."""
    position = {"dp_rank": rank, "batch_index": batch}
    meta = client.get_meta(["answer"], partition_id=partition, task_name=task, sampling_config=position)
    rows = [row for row, own in enumerate(client.get_data(meta)["answer"].tolist()) if own == number]
    client.reject(meta.select_samples(rows), "of no use")


@pytest.mark.parametrize("workers", [0, 2])
@pytest.mark.parametrize("gone", range(4))
def test_a_stream_that_goes_on_within_a_batch_skips_no_group_but_those_that_left(client, name, gone, workers):
    client.register_task(name, tq.GroupSampler(groups=4))
    drawn_by(client, name, name, [2] * 4)
    found, state = take(stream(name, name, 2), 2)
    assert found == [[0, 0], [1, 1]]
    reject(client, name, name, gone)
    rest = stream(name, name, 2, state)
    loaded = tq.StreamingDataLoader(rest, num_workers=workers, multiprocessing_context="fork" if workers else None)
    assert [numbers(item) for item in loaded] == [[number] * 2 for number in (2, 3) if number != gone]
    rest.close()


def test_micro_batches_lack_only_what_has_left_of_them_however_often_a_stream_goes_on(client, name):
    client.register_task(name, tq.GroupSampler(groups=4))
    drawn_by(client, name, name, [1, 3, 2, 3])  # cut as [0 1 1] [1 2 2] [3 3 3]
    assert take(stream(name, name, 3), 0)[0] == []
    reject(client, name, name, 1)
    found, state = take(stream(name, name, 3), 1)
    assert found == [[0]]
    reject(client, name, name, 0)
    found, state = take(stream(name, name, 3, state), 1)
    assert found == [[2, 2]]
    assert take(stream(name, name, 3, state))[0] == [[3, 3, 3]]
