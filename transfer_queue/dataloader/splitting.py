# SPDX-License-Identifier: Apache-2.0
"""Cuts a batch into micro-batches: values and metadata by the same sizes."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any

import torch
from tensordict import TensorDict, TensorDictBase

from transfer_queue.client.given_rows import rows_at
from transfer_queue.errors import InvalidRequestError
from transfer_queue.metadata import BatchMeta
from transfer_queue.metadata.meta_rows import consecutive, even_sizes
from transfer_queue.sampler.micro_batches import spread

Pair = tuple[TensorDict, BatchMeta]


def chunk_batch_fn(td: TensorDict, batch_meta: BatchMeta, micro_batch_size: int = 1) -> list[Pair]:
    """Cut consecutive micro-batches of ``micro_batch_size`` rows; the last one may be shorter.

    Args:
        td: Values, of batch size [N].
        batch_meta: Metadata of the same N samples.
    Raises:
        TypeError: ``td`` is not a TensorDict.
        ValueError: the size is not a positive int or exceeds the batch, or there is no batch dimension.
    Returns:
        (values, metadata) of each micro-batch, with the same rows.
    Examples:
        >>> meta = client.put({"x": torch.arange(5)}, partition_id="train")
        >>> [data["x"].tolist() for data, part in tq.chunk_batch_fn(client.get_data(meta), meta, 2)]
        [[0, 1], [2, 3], [4]]
    """
    rows = _rows(td)
    if isinstance(micro_batch_size, bool) or not isinstance(micro_batch_size, int) or micro_batch_size < 1:
        raise InvalidRequestError(f"micro_batch_size must be a positive int, got {micro_batch_size!r}.")
    if micro_batch_size > rows:
        raise InvalidRequestError(f"micro_batch_size {micro_batch_size} is larger than the batch of {rows} rows.")
    return split(td, batch_meta, _sizes_of(rows, micro_batch_size))


def chunk_groups(
    td: TensorDict, meta: BatchMeta, micro_batch_size: int | None, taken: int = 0
) -> tuple[list[Pair], list[int]]:
    """Cut one rank's batch of whole groups into as many micro-batches as that of the rank with the most rows.

    Otherwise a rank would wait for ever in its next collective, because groups may have different numbers of rows.
    What the sampler says of the cut comes first. Rows of groups that have left are missing from their micro-batches.

    Args:
        taken: So many of the micro-batches were taken earlier, and aren't given.
    Returns:
        (values, metadata) of each micro-batch that has rows; and their numbers, from 1 on.
    """
    remains, cut = getattr(meta, "remains", None), getattr(meta, "cut", [])  # a user's function may give anything
    if remains is None and not cut and (micro_batch_size is None or not meta.size):
        return _numbered([(td, meta)], [1]), [1]
    if cut and micro_batch_size is not None:
        raise InvalidRequestError(
            f"the sampler of this batch has cut it by tokens (micro_batch_tokens), and micro_batch_size is "
            f"{micro_batch_size}. Leave micro_batch_size out."
        )
    remains = [True] * meta.size if remains is None else remains
    sizes = cut or _sizes_as_drawn(len(remains), meta.most_rows, micro_batch_size)
    left = [sum(remains[rows]) for rows in consecutive(sizes, len(remains))]
    before, left = sum(left[:taken]), left[taken:]
    if cut or meta.most_rows:  # else other ranks, and peers of this one, need not agree
        left = _filled(left, bool(meta.most_rows))
    numbers = [number for number, size in enumerate(left, taken + 1) if size]
    sizes = [size for size in left if size]
    if not sizes:
        return [], numbers
    pairs = split(td, meta, [before, *sizes])[1:] if before else split(td, meta, sizes)
    return _numbered(pairs, numbers), numbers


def _numbered(pairs: list[Pair], numbers: list[int]) -> list[Pair]:
    for number, (_, meta) in zip(numbers, pairs, strict=True):
        if isinstance(meta, BatchMeta):
            meta.micro_batch = (number, numbers[-1])
    return pairs


def _filled(sizes: list[int], ranks_must_agree: bool) -> list[int]:
    """None of them empty, if there are as many rows."""
    if sum(sizes) >= len(sizes):
        return spread(sizes)
    if ranks_must_agree:
        raise InvalidRequestError(
            f"{sum(sizes)} rows are left for {len(sizes)} micro-batches of this rank, because groups of its batch have "
            f"left since it was drawn. Ranks must make equally many steps, so go on at the next batch on all of them. "
            f"To avoid it, reject groups before they are drawn: by a gate of this task, or by lease.reject."
        )
    return sizes


def _sizes_as_drawn(rows: int, most_rows: int, micro_batch_size: int | None) -> list[int]:
    """``most_rows``: of any rank of the round."""
    if micro_batch_size is None or not rows:
        return [rows]
    count = -(-max(rows, most_rows) // micro_batch_size)
    if count > rows:
        raise InvalidRequestError(
            f"this rank got {rows} rows of a round in which another one got {most_rows}. They can't be cut into "
            f"as many micro-batches of {micro_batch_size}, and ranks must make equally many steps. Raise "
            f"micro_batch_size, or balance ranks by length (GroupSampler(balance=...))."
        )
    if count == -(-rows // micro_batch_size):
        return _sizes_of(rows, micro_batch_size)
    return even_sizes(rows, count)


def _sizes_of(rows: int, most: int) -> list[int]:
    return [min(most, rows - start) for start in range(0, rows, most)]


def with_heads(pairs: Iterable[Pair], whole: BatchMeta, heads: TensorDict) -> list[tuple[TensorDict, BatchMeta, Any]]:
    """Give each micro-batch the rows of its own groups. ``heads``: those of the whole batch."""
    numbers = {head: number for number, head in enumerate(dict.fromkeys(whole.heads or ()))}
    triples = []
    for td, meta in pairs:
        own = [numbers[head] for head in dict.fromkeys(meta.heads or ())]
        is_range = own == list(range(own[0], own[0] + len(own)))  # then no value is copied
        triples.append((td, meta, rows_at(heads, [slice(own[0], own[0] + len(own)) if is_range else own])[0]))
    return triples


def token_budget_batch_fn(
    td: TensorDict,
    batch_meta: BatchMeta,
    micro_batch_size: int | None = None,
    *,
    max_tokens: int,
    lengths: str = "total_lengths",
) -> list[Pair]:
    """Cut consecutive micro-batches of at most ``max_tokens`` tokens each: ``functools.partial(..., max_tokens=4096)``.

    Args:
        micro_batch_size: The most rows in one micro-batch; None: any number.
        lengths: Name of the tag that holds a sample's tokens, or of a field: numbers [N], or a jagged column.
    Raises:
        ValueError: one sample alone exceeds the budget or has no length, or a budget or size is below 1.
    Returns:
        (values, metadata) of each micro-batch, with the same rows.
    Examples:
        >>> tags = [{"total_lengths": tokens} for tokens in (60, 30, 50)]
        >>> meta = client.put({"x": torch.arange(3)}, partition_id="train", tags=tags)
        >>> parts = tq.token_budget_batch_fn(client.get_data(meta), meta, max_tokens=100)
        >>> [data["x"].tolist() for data, part in parts]
        [[0, 1], [2]]
    """
    if max_tokens < 1 or (micro_batch_size is not None and micro_batch_size < 1):
        raise InvalidRequestError(
            f"max_tokens and micro_batch_size must be at least 1, got {max_tokens} and {micro_batch_size}."
        )
    weights = _lengths(td, batch_meta, lengths)
    sizes: list[int] = []
    tokens = 0
    for position, weight in enumerate(weights):
        if weight > max_tokens:
            index = batch_meta.global_indexes[position]
            raise InvalidRequestError(f"sample {index} has {weight} tokens, more than max_tokens={max_tokens}.")
        if not sizes or tokens + weight > max_tokens or sizes[-1] == micro_batch_size:
            sizes.append(0)
            tokens = 0
        sizes[-1] += 1
        tokens += weight
    return split(td, batch_meta, sizes)


def split(td: TensorDict, batch_meta: BatchMeta, sizes: Sequence[int]) -> list[Pair]:
    """Cut both by these sizes, which must add up to the number of rows."""
    if _rows(td) != batch_meta.size:
        raise InvalidRequestError(f"data of {_rows(td)} rows came with metadata of {batch_meta.size} samples.")
    if len(sizes) == 1:
        return [(td, batch_meta)]
    parts = rows_at(td, consecutive(sizes, batch_meta.size))
    return list(zip(parts, batch_meta.chunk_by_size(list(sizes)), strict=True))


def _rows(td: Any) -> int:
    if not isinstance(td, TensorDictBase):
        raise TypeError(f"expected a TensorDict, got {type(td).__name__}.")
    if not len(td.batch_size):
        raise InvalidRequestError("the TensorDict has no batch dimension; make it with batch_size=[rows].")
    return int(td.batch_size[0])


def _lengths(td: TensorDict, meta: BatchMeta, name: str) -> list[int]:
    if name in td.keys():  # noqa: SIM118
        column = td.get(name)
        if not isinstance(column, torch.Tensor):
            raise InvalidRequestError(f"field {name!r} holds no numbers, so it can't be the samples' lengths.")
        if column.is_nested:
            return [len(row) for row in column.unbind()]
        return [int(value) for value in column.reshape(meta.size, -1).sum(dim=1).tolist()]
    missing = [index for index, tags in zip(meta.global_indexes, meta.custom_meta, strict=True) if name not in tags]
    if missing:
        raise InvalidRequestError(
            f"sample {missing[0]} has no tag {name!r}, and there is no such field: its number of tokens is unknown. "
            f"Producers set it as a tag, or name another with lengths=."
        )
    return [int(tags[name]) for tags in meta.custom_meta]
