# SPDX-License-Identifier: Apache-2.0
"""Rows of a data set become groups: in order, a bounded number ahead, and each once, also after a resume."""

from __future__ import annotations

import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

import transfer_queue as tq
from lightning_tq import Producer, ProducerGroup, TQDataModule, feed_groups
from lightning_tq.prompts import feed
from transfer_queue.errors import ConfigError, InvalidRequestError

Make = Callable[..., TQDataModule]


def prompts(count: int, epoch: int = 0) -> list[dict[str, Any]]:
    """What other processes feed, too."""
    return [{"prompt": f"prompt {number}", "level": epoch} for number in range(count)]


def keys_of(partition: str = "train") -> list[str]:
    return list(tq.get_client().kv_list(partition).get(partition, {}))


class MapStyle(torch.utils.data.Dataset[Any]):
    """Notes which rows are read."""

    def __init__(self) -> None:
        self.read: list[int] = []

    def __len__(self) -> int:
        return 6

    def __getitem__(self, number: int) -> dict[str, Any]:
        self.read.append(number)
        return {"x": torch.arange(number + 1)}


def test_each_row_becomes_a_group_with_its_fields_and_tags(data: Make) -> None:
    client = data().client
    feed_groups(prompts(3), "train", key="sum", tags=["level"], parts=2)
    leases = client.lease("train", 5)
    assert [(each.key, list(each.head["prompt"]), each.tags, each.parts) for each in leases] == [
        (f"sum/{number}", [f"prompt {number}"], {"level": 0}, [0, 1]) for number in range(3)
    ]


def test_tensors_of_different_lengths_are_fields_too(data: Make) -> None:
    client = data().client
    feed_groups(MapStyle(), "train")
    assert [each.head["x"].unbind()[0].tolist() for each in client.lease("train", 9)] == [
        list(range(number + 1)) for number in range(6)
    ]


def test_a_bounded_number_of_groups_waits_for_workers(data: Make) -> None:
    client = data().client
    most, rows = 0, prompts(40)
    feeder = threading.Thread(target=feed_groups, args=(rows, "train"), kwargs={"waiting": 4}, daemon=True)
    feeder.start()
    done = []
    for lease in client.leases("train"):
        waiting = client.get_stats()["partitions"]["train"]["groups"]["states"].get("waiting", 0)
        most = max(most, waiting)
        done.append(lease.key)
        lease.reject("seen")
    feeder.join(30)
    assert (done, most) == ([f"row/{number}" for number in range(40)], 4)


def test_a_feeder_goes_on_after_the_last_row_that_was_added(data: Make) -> None:
    client = data().client
    client.register_task("learn", tq.GroupSampler(groups=1))
    keys = [f"row/{number}" for number in range(4)]  # of a feeder that was killed after these
    client.add_groups({"x": torch.arange(4)}, "train", keys=keys, tasks=["learn"])
    for number in range(4):  # they are done, and deleted with their keys
        client.lease("train")[0].close({"y": torch.zeros(1)})
        batch = client.get_meta(["y"], None, "train", "fetch", "learn", {"dp_rank": 0, "batch_index": number})
        client.ack(batch, "learn")
    assert keys_of() == []
    feed_groups([{"x": number} for number in range(6)], "train", tasks=["learn"])
    assert [lease.key for lease in client.lease("train", 9)] == ["row/4", "row/5"]


def test_a_data_set_with_length_and_index_is_read_from_where_it_goes_on(data: Make) -> None:
    rows = MapStyle()
    data().client.add_groups({"x": torch.arange(4)}, "train", keys=[f"row/{number}" for number in range(4)])
    feed_groups(rows, "train")
    assert rows.read == [4, 5]


def test_a_restored_queue_is_fed_from_the_first_row_that_its_checkpoint_lacks(data: Make, tmp_path: Path) -> None:
    client = data().client
    client.create_partition("train")
    client.save_checkpoint(tmp_path / "queue")
    feed_groups(prompts(3), "train")
    client.clear_partition("train")
    client.load_checkpoint(tmp_path / "queue")
    feed_groups(prompts(3), "train")
    assert len(keys_of()) == 3


def test_the_next_epoch_is_there_before_the_last_one_ends(data: Make) -> None:
    client = data().client
    feeder = threading.Thread(
        target=feed_groups, args=(lambda epoch: prompts(2, epoch), "train@{epoch}"), daemon=True,
        kwargs={"epochs": 3, "waiting": 1},
    )  # fmt: skip
    feeder.start()
    seen = []
    for lease in client.leases("train@*", timeout_s=30):
        seen.append((lease.partition, lease.key, list(lease.head["level"])))
        lease.reject("seen")
    feeder.join(30)
    assert seen == [(f"train@{epoch}", f"row/{number}", [epoch]) for epoch in range(3) for number in range(2)]


def test_epochs_that_are_complete_are_not_fed_again(data: Make) -> None:
    client = data().client
    client.seal_partition("train@0")
    client.add_groups({"prompt": ["prompt 0"], "level": [1]}, "train@1", keys=["row/0"])
    feed_groups(lambda epoch: prompts(2, epoch), "train@{epoch}", epochs=3)
    assert {name: keys_of(name) for name in sorted(client.get_partition_list())} == {
        "train@0": [], "train@1": ["row/0", "row/1"], "train@2": ["row/0", "row/1"],
    }  # fmt: skip
    feed_groups(lambda epoch: prompts(2, epoch), "train@{epoch}", epochs=3)


@pytest.mark.programs
def test_a_producer_feeds_what_a_function_returns(data: Make) -> None:
    dm = data()
    args = {"rows": "test_prompts:prompts", "args": {"count": 2}, "partition": "train@{epoch}", "epochs": 2, "parts": 3}
    group = ProducerGroup([Producer(target="lightning_tq.prompts:feed", args=args)])
    group.start(dm.address)
    try:
        leases = []
        for lease in dm.client.leases("train@*", timeout_s=60):
            leases.append(lease)
            lease.reject("seen")
    finally:
        group.end()
    assert [(each.partition, list(each.head["level"])) for each in leases] == [
        (f"train@{epoch}", [epoch]) for epoch in (0, 0, 1, 1)
    ]


@pytest.mark.parametrize(
    ("rows", "options", "says"),
    [
        ([], {"epochs": 2}, "2 epochs need partitions of their own"),
        (iter([]), {"epochs": 2, "partition": "train@{epoch}"}, "can be read only once"),
        ([], {"waiting": 0}, "waiting must be an int of at least 1"),
        ([{"x": 1}, {"y": 1}], {}, r"row 1 has \['y'\], where others have \['x'\]"),
        ([{"x": 1}], {"tags": ["level"]}, r"tags are \['level'\]"),
        ([{"x": 1}], {"tags": ["x"]}, r"row 0 has no entry besides its tags \['x'\]"),
    ],
)
def test_what_cannot_be_fed_is_refused(data: Make, rows: Any, options: dict[str, Any], says: str) -> None:
    data()
    with pytest.raises(InvalidRequestError, match=says):
        feed_groups(rows, **{"partition": "train", **options})


def test_a_target_that_is_no_function_is_refused(data: Make) -> None:
    data()
    with pytest.raises(ConfigError, match="names no function that returns rows"):
        feed("test_prompts:nothing", "train")
