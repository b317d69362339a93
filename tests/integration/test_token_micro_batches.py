# SPDX-License-Identifier: Apache-2.0
"""Batches of groups that the queue cuts by tokens: equally many micro-batches on all ranks, the same after a resume."""

from __future__ import annotations

import random
from collections.abc import Iterator
from contextlib import ExitStack, closing
from itertools import islice
from pathlib import Path
from typing import Any

import pytest
import torch

import transfer_queue as tq
from transfer_queue.errors import InvalidRequestError, SamplerError

MOST = 100
Cut = list[list[tuple[int, int]]]
"""Micro-batches of (sample, tokens)."""


@pytest.fixture
def add(client: Any, name: str) -> Any:
    """Add a closed group whose rows have these lengths."""

    def added(*lengths: int) -> None:
        client.add_groups({"prompt": torch.zeros(1)}, name, tasks=[f"actor-{name}"])
        tags = [{"tokens": length} for length in lengths]
        client.lease(name)[0].close({"answer": torch.tensor(lengths)}, tags=tags)

    return added


def registered(client: Any, name: str, groups: int, **options: Any) -> None:
    sampler = tq.GroupSampler(groups=groups, ahead=9, balance="tokens", micro_batch_tokens=MOST, **options)
    client.register_task(f"actor-{name}", sampler)


def stream(stack: ExitStack, name: str, rank: int, **options: Any) -> tq.StreamingDataset:
    made = tq.StreamingDataset(None, None, None, ["answer"], name, f"actor-{name}", rank, **options)
    stack.callback(made.close)
    return made


def taken(items: Iterator[Any], count: int) -> Cut:
    cut = []
    for data, meta in islice(items, count):
        assert data["answer"].tolist() == [tags["tokens"] for tags in meta.custom_meta], "values stay with their tags"
        cut.append(list(zip(meta.global_indexes, data["answer"].tolist(), strict=True)))
        assert meta.micro_batch is not None
    return cut


@pytest.mark.parametrize("seed", range(8))
def test_each_rank_gets_whole_groups_in_equally_many_micro_batches_within_the_budget(client, name, add, seed):
    chance = random.Random(seed)
    registered(client, name, groups=4)
    lengths = [[chance.randrange(1, 60 + 60 * (seed % 2)) for _ in range(chance.randrange(2, 8))] for _ in range(4)]
    for own in lengths:
        add(*own)
    client.seal_partition(name)
    with ExitStack() as stack:
        ranks = [list(stream(stack, name, rank, dp_size=2)) for rank in range(2)]
    counts = {len(items) for items in ranks}
    assert len(counts) == 1, f"seed {seed}"
    (count,) = counts
    groups: list[list[int]] = []
    for items in ranks:
        assert [meta.micro_batch for _, meta in items] == [(number, count) for number in range(1, count + 1)]
        assert all(data["answer"].sum() <= MOST or len(data["answer"]) == 1 for data, _ in items), f"seed {seed}"
        by_group: dict[int, list[int]] = {}
        for data, meta in items:
            for head, length in zip(meta.heads or (), data["answer"].tolist(), strict=True):
                by_group.setdefault(head, []).append(length)
        groups += by_group.values()
    assert sorted(groups) == sorted(lengths), "each group is whole, and on one rank"


def test_no_more_micro_batches_are_made_than_the_longest_share_needs(client, name, add):
    registered(client, name, groups=2)
    for lengths in ((50, 50, 50, 50), (90, 60, 5, 5)):
        add(*lengths)
    client.seal_partition(name)
    with ExitStack() as stack:
        cut = [taken(iter(stream(stack, name, rank, dp_size=2)), 9) for rank in range(2)]
    sizes = sorted([length for _, length in part] for own in cut for part in own)
    assert sizes == [[50, 50], [50, 50], [60, 5, 5], [90]]


def test_a_stream_resumes_within_a_batch_although_tags_have_changed_and_the_queue_was_restored(
    client, name, add, tmp_path: Path
):
    registered(client, name, groups=2)
    add(60, 30, 20), add(70, 40, 90)
    add(10, 10), add(95, 4)
    client.seal_partition(name)
    with ExitStack() as stack:
        whole = taken(iter(stream(stack, name, 0)), 99)
    client.reset_consumption(name, f"actor-{name}")
    with ExitStack() as stack:
        first = stream(stack, name, 0)
        before, state = taken(iter(first), 2), first.state_dict()
    client.save_checkpoint(tmp_path / "saved")
    meta = client.get_meta(["answer"], None, name, mode="force_fetch")
    meta.update_custom_meta([{"tokens": 1}] * meta.size)
    client.set_custom_meta(meta)
    assert len(whole) > 4
    for restored in (False, True):
        if restored:
            client.clear_partition(name)
            client.load_checkpoint(tmp_path / "saved")
        with ExitStack() as stack:
            second = stream(stack, name, 0)
            second.load_state_dict(state)
            rest = [data["answer"].tolist() for data, _ in islice(second, len(cut_of_first_batch(whole)) - 2)]
        assert [*lengths_of(before), *rest] == lengths_of(cut_of_first_batch(whole))


def lengths_of(cut: Cut) -> list[list[int]]:
    return [[length for _, length in part] for part in cut]


def cut_of_first_batch(cut: Cut) -> Cut:
    """Its groups have 6 rows."""
    rows, found = 0, []
    for part in cut:
        if rows == 6:
            break
        rows += len(part)
        found.append(part)
    return found


def test_a_rank_that_resumes_within_a_batch_from_which_a_group_had_left_gets_each_row_once(client, name, add):
    registered(client, name, groups=4)
    client.register_task(f"judge-{name}", tq.GroupSampler(groups=1, ahead=9))
    for number in range(4):
        client.add_groups({"prompt": torch.zeros(1)}, name, tasks=[f"actor-{name}", f"judge-{name}"])
        rows = torch.arange(4) + 35 + 4 * number
        client.lease(name)[0].close({"answer": rows}, tags=[{"tokens": int(row)} for row in rows])
    client.seal_partition(name)
    with ExitStack() as stack:
        of_other = taken(iter(stream(stack, name, 0, dp_size=2)), 99)  # which draws the round of both
        judged = [client.get_meta(["answer"], None, name, task_name=f"judge-{name}") for _ in range(4)]
        seen = {sample for part in of_other for sample, _ in part}
        client.reject(next(meta for meta in judged if meta.global_indexes[0] not in seen), "no use")
        whole = taken(iter(stream(stack, name, 1, dp_size=2)), 99)
        assert len(whole) == len(of_other) == 4
        for count in range(1, 4):
            first, second = stream(stack, name, 1, dp_size=2), stream(stack, name, 1, dp_size=2)
            before, state = taken(iter(first), count), first.state_dict()
            second.load_state_dict(state)
            assert before + taken(iter(second), 99) == whole


def test_readers_of_one_rank_make_as_many_steps_although_a_group_leaves_in_between(client, name, add):
    registered(client, name, groups=2)
    add(50, 50, 50, 50), add(50)
    with ExitStack() as stack:
        before = list(islice(stream(stack, name, 0), 3))
        client.reject(before[-1][1], "no use")
        after = list(islice(stream(stack, name, 0), 3))
    assert [[meta.micro_batch for _, meta in items] for items in (before, after)] == [[(1, 3), (2, 3), (3, 3)]] * 2
    assert [meta.size for _, meta in after] == [2, 1, 1]


def test_rows_and_tokens_of_a_micro_batch_are_not_both_given(client, name, add):
    registered(client, name, groups=1)
    add(50, 50)
    made = tq.StreamingDataset(None, None, 1, ["answer"], name, f"actor-{name}", 0)
    with closing(made), pytest.raises(InvalidRequestError, match="Leave micro_batch_size out"):
        next(iter(made))


def test_a_rank_with_too_few_rows_for_the_micro_batches_of_another_is_an_error_that_says_what_to_do(client, name, add):
    registered(client, name, groups=2)
    add(90, 90, 90), add(10, 10)
    with (
        ExitStack() as stack,
        pytest.raises(SamplerError, match=r"got 2 rows .* another one cuts into 3 .* raise micro_batch_tokens"),
    ):
        taken(iter(stream(stack, name, 0, dp_size=2)), 1)


def test_tokens_are_those_of_the_tag_that_balances():
    with pytest.raises(SamplerError, match="micro_batch_tokens needs balance"):
        tq.GroupSampler(groups=1, micro_batch_tokens=5)
    with pytest.raises(SamplerError, match="micro_batch_tokens must be a whole number of at least 1"):
        tq.GroupSampler(groups=1, micro_batch_tokens=0, balance="tokens")
