# SPDX-License-Identifier: Apache-2.0
"""What a draw takes is what a sampler would take that sees every ready sample each time, after any history."""

from __future__ import annotations

import itertools
from typing import Any

import pytest
from control_kit import (
    ACTOR,
    INT,
    REWARDER,
    ROLLOUT,
    batch,
    clear,
    fetch,
    grpo,
    new_plane,
    publish,
    put,
    register,
    rest,
)
from hypothesis import given, settings
from hypothesis import strategies as st

from transfer_queue import (
    BaseSampler,
    GRPOGroupNSampler,
    RankAwareSampler,
    SeqlenBalancedSampler,
    SequentialSampler,
    TokenBudgetSampler,
)
from transfer_queue import protocol as p

# ---- the definition of a group ----


def groups_among(ready: list[int], size: int, puts: list[list[int]]) -> list[list[int]]:
    """Whole groups by the definition: of large puts, and of chains of small ones."""
    groups, chain = [], []
    for own in puts:
        if len(own) >= size:
            parts = [own[at : at + size] for at in range(0, len(own) - size + 1, size)]
            groups += [part for part in parts if set(part) <= set(ready)]
        elif set(own) <= set(ready):
            follows = chain[-1:] == [own[0] - 1] and len(chain) + len(own) <= size
            chain = chain + own if follows else own
            if len(chain) == size:
                groups, chain = [*groups, chain], []
    return groups


def put_parts(plane: Any, n: int) -> None:
    """Samples of groups that stay incomplete, so that enough are ready for tries of ten groups."""
    for own in [put(plane, n, "prompt") for _ in range(30)]:
        publish(plane, own[1:], "x")


@pytest.mark.parametrize(
    ("n", "sizes", "ready", "expected"),
    [
        pytest.param(4, [12], range(1, 12), [[4, 5, 6, 7], [8, 9, 10, 11]], id="a missing sample shifts no group"),
        pytest.param(4, [12], range(1, 5), [], id="no group spans two of a put"),
        pytest.param(4, [6, 6], range(12), [[0, 1, 2, 3], [6, 7, 8, 9]], id="a group lies within one put"),
        pytest.param(4, [4, 4], [0, 1, 6, 7], [], id="halves of two equally large puts are no group"),
        pytest.param(4, [1, 1, 1, 1, 2, 2], range(8), [[0, 1, 2, 3], [4, 5, 6, 7]], id="small puts make a group"),
        pytest.param(4, [1] * 8, [0, 1, 2, 4, 5, 6, 7], [[4, 5, 6, 7]], id="a gap ends a chain"),
        pytest.param(4, [3, 2, 2], range(7), [[3, 4, 5, 6]], id="a chain that would be too long starts anew"),
        pytest.param(4, [3, 3], range(6), [], id="two chains that are too long together"),
        pytest.param(4, [2, 2, 2, 2], [0, 1, 2, 4, 5, 6, 7], [[4, 5, 6, 7]], id="a part of a put ends a chain"),
        pytest.param(4, [2, 2, 2], [0, 1, 3, 4, 5], [], id="the rest of a put joins no chain"),
        pytest.param(4, [6, 2], range(8), [[0, 1, 2, 3]], id="the rest of a large put joins no chain"),
        pytest.param(8, [6, 2], range(8), [list(range(8))], id="puts of different sizes make a group"),
    ],
)
@pytest.mark.parametrize("order", [1, -1])
def test_which_samples_are_a_group(plane, n, sizes, ready, expected, order):
    puts = [put(plane, size, "prompt") for size in sizes]
    assert groups_among(list(ready), n, puts) == expected
    put_parts(plane, n)
    grpo(plane, n)
    for index in list(ready)[::order]:
        publish(plane, [index], "x")
        assert isinstance(fetch(plane, 10 * n), p.NotReady)
    assert [batch(plane, n) for _ in expected] == expected
    assert isinstance(fetch(plane, n), p.NotReady)


def test_a_chain_changes_when_a_put_in_front_of_it_becomes_whole(plane):
    first, *_ = [put(plane, size, "prompt") for size in (1, 3, 1, 3)]
    put_parts(plane, 4)
    grpo(plane, 4)
    publish(plane, [1, 2, 3, 4, 5, 6, 7], "x")
    assert isinstance(fetch(plane, 12), p.NotReady)
    publish(plane, first, "x")
    assert batch(plane, 8) == list(range(8))


def test_a_chain_changes_when_a_put_within_it_is_cleared(plane):
    for _ in range(9):
        put(plane, 1)
    grpo(plane, 3)
    assert batch(plane, 3) == [0, 1, 2]
    clear(plane, [4])
    assert batch(plane, 3) == [5, 6, 7]
    assert isinstance(fetch(plane, 3), p.NotReady)


def test_a_chain_ends_where_another_partition_took_an_index(plane):
    first, _, second = put(plane, 2, "prompt"), put(plane, 1, partition="other"), put(plane, 2, "prompt")
    put_parts(plane, 4)
    grpo(plane, 4)
    for own in (second, first):
        publish(plane, own, "x")
        assert isinstance(fetch(plane, 4), p.NotReady)


@pytest.mark.parametrize(
    ("sizes", "gone"),
    [
        pytest.param([4, 4], [1, 2, 3, 4], id="the first of a put and the others of the next"),
        pytest.param([8], [1, 2, 3, 4], id="the first of a group and the others of the next"),
        pytest.param([1, 2, 3], [1], id="a put behind the rest of another"),
    ],
)
def test_what_is_left_of_groups_makes_no_group_once_the_table_is_compact(plane, sizes, gone):
    for _ in range(4):
        samples = list(itertools.chain.from_iterable([put(plane, size) for size in sizes]))
        clear(plane, [samples[at] for at in gone])
        put(plane, 1, partition="other")
    clear(plane, put(plane, 1000))
    grpo(plane, 4)
    assert isinstance(fetch(plane, 4), p.NotReady)


def test_groups_of_another_size_are_found_once_the_task_has_another_sampler(plane):
    put(plane, 6)
    grpo(plane, 4)
    assert batch(plane, 4) == [0, 1, 2, 3]
    grpo(plane, 2)
    assert batch(plane, 2) == [4, 5]


def test_a_round_may_need_all_that_is_ready(plane):
    puts = [put(plane, 4) for _ in range(1000)]
    clear(plane, [own[0] for own in puts[:-2]])
    grpo(plane, 4)
    assert batch(plane, 8) == puts[-2] + puts[-1]


@pytest.mark.parametrize("sampler", ["ranks", "pairs", "balanced", "budget"])
def test_what_a_sampler_remembers_from_a_checkpoint_is_drawn_first(make_plane, sampler):
    kind, _, kwargs = SAMPLERS[sampler]
    plane = make_plane(sampler=(made := kind(**kwargs)))
    samples = put(plane, 6, lengths=[1] * 6)
    shares = [samples[4:], samples[2:4]]
    pair = (lambda share: share) if sampler == "ranks" else (lambda share: (share, share))
    ranks = {rank: {0: pair(share)} for rank, share in enumerate(shares)}
    made.load_checkpoint({"_states": {"p": {"train": ranks}}, "_balanced_cache": {("p", "train", 0): shares}})
    register(plane, dp_size=2)
    assert [batch(plane, 2, rank, 0) for rank in range(2)] == shares
    assert made.save_checkpoint()["_states"] == {"p": {"train": {}}}


# ---- two planes, one of which rescans ----


class Rescans:
    """A sampler of another package, so it sees a list of all ready samples, one rank after the other."""

    puts: list[list[int]]

    def _groups(self, ready_indexes: Any, num_samples: int, view: Any) -> list[list[int]]:
        size = self.n_samples_per_prompt
        groups = groups_among(list(ready_indexes), size, self.puts)[: num_samples // size]
        return groups if len(groups) * size == num_samples else []

    def tail(self, ready_indexes: Any, batch_size: int, *, partition: Any = None) -> list[int]:
        groups = groups_among(list(ready_indexes), self.n_samples_per_prompt, self.puts)
        return list(itertools.chain.from_iterable(groups))


class SlowSequential(SequentialSampler):
    pass


class SlowRankAware(RankAwareSampler):
    pass


class SlowGroups(Rescans, GRPOGroupNSampler):
    pass


class SlowBalanced(Rescans, SeqlenBalancedSampler):
    pass


class SlowBudget(TokenBudgetSampler):
    pass


SAMPLERS: dict[str, tuple[type[BaseSampler], type[BaseSampler], dict[str, Any]]] = {
    "oldest": (SequentialSampler, SlowSequential, {}),
    "ranks": (RankAwareSampler, SlowRankAware, {}),
    "groups": (GRPOGroupNSampler, SlowGroups, {"n_samples_per_prompt": 4}),
    "pairs": (GRPOGroupNSampler, SlowGroups, {"n_samples_per_prompt": 2}),
    "balanced": (SeqlenBalancedSampler, SlowBalanced, {"n_samples_per_prompt": 2, "dp_size": 2}),
    "budget": (TokenBudgetSampler, SlowBudget, {"max_tokens": 9}),
}
FIELDS = (("x",), ("y",), ("x", "y"))
FILTERS = (None, None, "kind == 1", "total_lengths < 4")


class Twins:
    """Two planes that get the same requests: one draws as the queue does, one by samplers that see everything."""

    def __init__(self, sampler: str, dp_size: int | None, tail: str | None, preallocate: int) -> None:
        *kinds, kwargs = SAMPLERS[sampler]
        samplers = [kind(**kwargs) for kind in kinds]
        self.planes = [new_plane(preallocate=preallocate, sampler=sampler) for sampler in samplers]
        self.puts = samplers[1].puts = []
        self.dp_size = kwargs.get("dp_size", dp_size)
        for task, plane in itertools.product("ab", self.planes):
            register(plane, task, dp_size=self.dp_size, tail=tail)
        self.ids = itertools.count(1)
        self.next: dict[tuple[str, int], int] = {}
        self.taken: list[int] = []

    def ask(self, client: str, verb: Any, *args: Any, **kwargs: Any) -> list[Any]:
        request = verb(next(self.ids), *args, **kwargs)
        replies, slow = ([*plane.handle(client, request, 0.0), *rest(plane)] for plane in self.planes)
        assert [texts(to) for to in replies] == [texts(to) for to in slow]
        return replies

    def step(self, kind: str, a: int, b: int, c: int) -> None:
        samples = list(itertools.chain.from_iterable(self.puts))
        some = samples[a % len(samples) :: 1 + b][: 1 + c] if samples else []
        if kind == "put":
            self.put((1, 1, 1, 2, 3, 4, 9)[a % 7], ("x", "xy", "xy", "y", "z", "x")[b], c)
        elif kind == "publish" and some:
            specs = dict.fromkeys(("x", "y", "xy")[b % 3], INT)
            self.ask(REWARDER, p.Publish, "p", p.pack_indexes(sorted(some)), specs)
        elif kind == "tag" and some:
            self.ask(REWARDER, p.SetTags, {"p": {index: {"kind": b % 2} for index in some}})
        elif kind == "clear" and some:
            self.ask(ACTOR, p.ClearSamples, "p", p.pack_indexes(some))
        elif kind == "clear many":
            self.ask(ACTOR, p.ClearSamples, "p", p.pack_indexes(samples[: len(samples) // 2 + 1 : 1 + a % 2]))
        elif kind == "reset":
            self.ask(ACTOR, p.ResetConsumption, "p", "ab"[a % 2])
        elif kind == "cancel" and self.taken:
            self.ask(ACTOR, p.Cancel, self.taken.pop())
        elif kind == "seal":
            self.ask(ROLLOUT, p.SealPartition, "p")
        elif kind == "fetch":
            self.fetch("ab"[a % 2], FIELDS[b % 3], FILTERS[c % 4], 4 * (1 + a % 2), wait_s=10.0 * (b % 2))

    def put(self, count: int, names: str, tagged: int) -> None:
        if tagged % 4 == 0:  # another partition takes indexes, so that puts have gaps
            self.ask(ROLLOUT, p.Reserve, "other", 1)
        (reserved,) = self.ask(ROLLOUT, p.Reserve, "p", count)
        if not isinstance(reserved.reply, p.Reserved):
            return
        indexes = p.unpack_indexes(reserved.reply.indexes).tolist()
        self.puts.append(indexes)
        tags = {index: {"total_lengths": 1 + (index + tagged) % 5, "kind": index % 2} for index in indexes}
        specs, done = dict.fromkeys(names, INT), reserved.reply.id
        self.ask(ROLLOUT, p.Publish, "p", reserved.reply.indexes, specs, tags, completes=done)

    def fetch(self, task: str, names: tuple[str, ...], where: str | None, size: int, wait_s: float) -> None:
        rank = min(range(self.dp_size or 1), key=lambda rank: self.next.get((task, rank), 0))
        index = self.next.get((task, rank), 0)
        at = {} if self.dp_size is None and task == "b" else {"dp_rank": rank, "batch_index": index}
        replies = self.ask(ACTOR, p.Fetch, "p", task, list(names), size, wait_s=wait_s, where=where, **at)
        if at and replies and isinstance(replies[0].reply, p.Batch):
            self.next[task, rank] = index + 1
        self.taken += [to.reply.id for to in replies if isinstance(to.reply, p.Batch)]


def texts(to: Any) -> str:
    return repr(to).replace("Slow", "").replace("Groups", "GRPOGroupNSampler")


KINDS = ["put", "put", "put", "publish", "publish", "publish", "publish", "tag", "clear", "clear many", "reset"]
KINDS += ["cancel", "seal", *["fetch"] * 8]


@settings(max_examples=120, deadline=None, print_blob=True)
@given(
    sampler=st.sampled_from(list(SAMPLERS)),
    dp_size=st.sampled_from([None, 1, 2, 3]),
    tail=st.sampled_from([None, "drop", "pad", "uneven_ok"]),
    preallocate=st.sampled_from([1, 1, 6]),
    sizes=st.lists(st.sampled_from([1, 1, 2, 3, 5]), max_size=99),
    steps=st.lists(
        st.tuples(st.sampled_from(KINDS), st.integers(0, 40), st.integers(0, 5), st.integers(0, 12)),
        min_size=30,
        max_size=120,
    ),
)
def test_the_queue_draws_what_a_sampler_draws_that_sees_everything(sampler, dp_size, tail, preallocate, sizes, steps):
    twins = Twins(sampler, dp_size, tail, preallocate)
    for size in sizes:
        twins.put(size, "x", size)
    for kind, a, b, c in steps:
        if kind != "seal" or a == 0:
            twins.step(kind, a, b, c)
    for plane in twins.planes:
        plane.check_invariants()
