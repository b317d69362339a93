# SPDX-License-Identifier: Apache-2.0
"""A record: the batches that a task was given, in directories that ``save_batches`` wrote, read without a queue."""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
from msgspec.structs import replace

from transfer_queue.calls import Calls
from transfer_queue.checkpoint.directory import is_checkpoint
from transfer_queue.checkpoint.opened import Opened, reading
from transfer_queue.client.base import to_meta
from transfer_queue.control.ledger import Entry
from transfer_queue.control.partition import Partition
from transfer_queue.control.restoring import Restored
from transfer_queue.control.serving import describe
from transfer_queue.control.state import PlaneConfig, PlaneState
from transfer_queue.errors import (
    CheckpointError,
    CheckpointNotFoundError,
    EndOfPartitionError,
    InvalidRequestError,
    SampleClearedError,
)
from transfer_queue.metadata import BatchMeta
from transfer_queue.metadata.field_schema import common_dtypes
from transfer_queue.protocol import Indexes
from transfer_queue.storage.unpack import relaid, unpack
from transfer_queue.storage.wire import PlacedColumns, WireColumn, select
from transfer_queue.utils.logging_utils import get_logger

if TYPE_CHECKING:
    from tensordict import TensorDict

    from transfer_queue.client import TransferQueueClient

_log = get_logger(__name__)


class _Directory:
    """One directory. A control plane of its own describes the batches, so metadata is as the queue gave it."""

    def __init__(self, path: Path) -> None:
        self.path = path
        opened, restored = Opened(path), Restored(PlaneState(PlaneConfig(), Calls()), 0, 0.0)
        if opened.values is None:
            raise CheckpointError(f"{path} has no values, so it is no part of a record.")
        opened.values.verify()
        for saved in opened.state.slices():
            restored.add(saved)
        self.partitions, self._blocks = restored.partitions, opened.values.blocks
        self._fields: dict[tuple[str, str], tuple[list[WireColumn], dict[int, tuple[int, int]]]] = {}

    def meta(
        self, partition: str, indexes: Indexes, fields: Sequence[str] | None, entry: Entry | None = None
    ) -> BatchMeta:
        """Metadata of these samples, or heads. ``entry``: the batch that they are."""
        own = self.partitions[partition]
        rows = own.rows_of(indexes)
        batch = describe(0, own, indexes, own.schema.fields_of(rows) if fields is None else list(fields), rows)
        if entry is not None:
            (task,) = own.consumers.values()
            most = task.ledger.most_rows(entry.key[1], entry.dp_size or 1)
            padding = None if entry.padding is None else entry.padding.tobytes()
            batch = replace(
                batch, token=entry.token, batch_index=entry.key[1], padding=padding, most_rows=most, cut=list(entry.cut)
            )
        return to_meta(batch)

    def values(self, meta: BatchMeta, layout: str, allow_pickle: bool) -> TensorDict:
        """As ``get_data`` gives them, where samples of different dtypes get a common one."""
        placed = {name: self._placed(meta, name) for name in meta.field_names}
        data = unpack(placed, meta.size, layout, allow_pickle)
        common = common_dtypes(meta.field_schema, meta.global_indexes)
        return relaid(data, layout, common) if common else data

    def _placed(self, meta: BatchMeta, name: str) -> PlacedColumns:
        key = (meta.partition_ids[0], name)
        if key not in self._fields:
            blocks = self._blocks.get(key, [])
            rows = [(at, row) for at, block in enumerate(blocks) for row in enumerate(block.samples.tolist())]
            self._fields[key] = [block.mapped() for block in blocks], {index: (at, row) for at, (row, index) in rows}
        columns, where = self._fields[key]
        try:
            found = np.array([where[index] for index in meta.global_indexes], np.int64)
        except KeyError as error:
            raise CheckpointError(f"sample {error} had no field {name!r} when it was recorded.") from None
        return select(columns, found[:, 0], found[:, 1])


class RecordedBatches:
    """The batches of a record. As ``fetch_batch_fn`` of a StreamingDataset it replays them, without a queue's samples.

    Examples:
        >>> client.register_task("copy", follows="sft")
        >>> meta = client.put({"x": torch.arange(4)}, partition_id="train")
        >>> first = {"dp_rank": 0, "batch_index": 0}
        >>> batch = client.get_meta(["x"], 2, "train", task_name="sft", sampling_config=first)
        >>> saved = client.save_batches("runs/record/000000", "copy")
        >>> data, meta = tq.RecordedBatches("runs/record").read("train", 0, 0)
        >>> data["x"]
        tensor([0, 1])
    """

    def __init__(self, directory: str | os.PathLike[str]) -> None:
        """Open a record, as far as it is written.

        Raises:
            CheckpointNotFoundError: there is none.
            CheckpointError: a file of it is damaged.
        """
        self.directory = Path(directory)
        self.rounds: dict[tuple[str, int], dict[int | None, Path]] = {}
        """By (partition, batch), in the order in which they were given, the ranks that got a share, and where it is."""
        self.begun_again: list[Path] = []
        """Parts that have batch 0 of the first partition anew: another run wrote them."""
        self.may_lack: dict[str, int] = {}
        """Partitions after whose last batch recording was interrupted, with the number of that batch."""
        self._open: _Directory | None = None
        self._dp_sizes: set[int] = set()
        self._batch_sizes: set[int | None] = set()
        self._layout, self._allow_pickle = "dense", False
        first = None  # what names the first partition
        ends, gaps = dict[str, int](), dict[str, tuple[int, Path]]()  # last batches of the part before; interruptions
        for path in sorted(path for path in self.directory.glob("[0-9]*") if is_checkpoint(path)):
            with reading(path):
                opened = Opened(path)
                if ends and opened.metadata.user_metadata.get("gap"):
                    interrupted, last = ends.popitem()
                    gaps[interrupted] = last, path
                ends.clear()
                for partition, batch in opened.state.batches():
                    # A run that resumed from a checkpoint was given a batch again: the last time counts.
                    self.rounds.setdefault((partition, batch.batch_index), {})[batch.rank] = path
                    ends[partition] = max(batch.batch_index, ends.get(partition, 0))
                    is_first = (partition, batch.batch_index) == (next(iter(self.rounds))[0], 0)
                    first = first or Partition.incarnation_of(batch.token)
                    if is_first and first != Partition.incarnation_of(batch.token):
                        self.begun_again.append(path)
                    self._dp_sizes.add(batch.dp_size or 0)
                    self._batch_sizes.add(batch.batch_size)
        if not self.rounds:
            raise CheckpointNotFoundError(f"no record at {directory}: lightning-tq record has written nothing there.")
        for partition, (last, gap) in gaps.items():
            later = [key for key in self.rounds if key[0] == partition and key[1] > last]
            if all(path < gap for key in later for path in self.rounds[key].values()):
                self.may_lack[partition] = last
                for key in later:  # a run that resumed left these, and what it was given instead was not recorded
                    del self.rounds[key]

    @property
    def partitions(self) -> list[str]:
        """Their names, in the order in which they were read."""
        return list(dict.fromkeys(partition for partition, _ in self.rounds))

    def check(
        self, fields: Sequence[str], dp_size: int, batch_size: int | None = None, head_fields: Sequence[str] = (),
        groups: int | None = None,
    ) -> None:  # fmt: skip
        """Whether a run with these fields, ranks, rows or groups per batch, and fields of heads can get these batches.

        Raises:
            InvalidRequestError: it can't; the text says what was recorded.
        """
        (partition, index), ranks = next(iter(self.rounds.items()))
        _, meta = self.read(partition, next(iter(ranks)), index)
        lacking = sorted(set(fields) - set(meta.field_names))
        of_heads = self._meta_of_heads(meta, None).field_names if meta.heads else []
        recorded, problem = len(set(meta.heads or ())) * dp_size, ""
        if self._dp_sizes - {0, dp_size}:
            problem = f"is of {max(self._dp_sizes)} data-parallel ranks, and this run has {dp_size}"
        elif lacking:
            problem = f"lacks the field {', '.join(lacking)}; it has {', '.join(meta.field_names)}"
        elif set(head_fields) - set(of_heads):
            unknown = ", ".join(sorted(set(head_fields) - set(of_heads)))
            problem = f"lacks the head field {unknown}; it has {', '.join(of_heads) or 'none, as it is of no groups'}"
        elif batch_size is not None and not self._batch_sizes & {None, batch_size}:
            drawn = " and ".join(sorted(str(size or None) for size in self._batch_sizes))  # None: of whole groups
            problem = f"is of batch_size={drawn}, and this stream has batch_size={batch_size}"
        elif batch_size is not None and meta.size > batch_size:
            problem = f"has batches of {meta.size} rows, and this stream has batch_size={batch_size}"
        elif groups is not None and groups != recorded and len(self.rounds) > 1:  # a last one may have fewer
            problem = f"has batches of {recorded} groups, and the GroupSampler of this stream draws {groups}"
        if problem:
            raise InvalidRequestError(f"the record {self.directory} {problem}. Replay it as it was recorded.")

    def read(
        self, partition: str, rank: int | None, batch_index: int, fields: Sequence[str] | None = None
    ) -> tuple[TensorDict, BatchMeta]:
        """Values and metadata of one rank's batch.

        Args:
            fields: Names; None: all that every sample of it has.
        Raises:
            EndOfPartitionError: the record of this partition ends before this batch.
            CheckpointError: the batch was not recorded, or its files are damaged.
        """
        path = self._path(partition, rank, batch_index)
        with reading(path):
            saved = self._saved(path)
            (task,) = saved.partitions[partition].consumers.values()
            entry = task.ledger.get((rank, batch_index))
            assert entry is not None, "it is listed"
            try:
                meta = saved.meta(partition, entry.indexes, fields, entry)
            except SampleClearedError as error:
                raise CheckpointError(f"batch {batch_index} was cleared before it was recorded: {error}") from error
            return saved.values(meta, self._layout, self._allow_pickle), meta

    def get_heads(self, meta: BatchMeta, fields: Sequence[str] | None = None, layout: str = "dense") -> TensorDict:
        """As the client's verb of this name, for a batch of this record."""
        found = self._meta_of_heads(meta, fields)
        return self._saved_with(meta).values(found, layout, self._allow_pickle)

    def _meta_of_heads(self, meta: BatchMeta, fields: Sequence[str] | None) -> BatchMeta:
        heads = np.array(list(dict.fromkeys(meta.heads or ())), np.int64)
        return self._saved_with(meta).meta(meta.partition_ids[0], heads, fields)

    def _saved_with(self, meta: BatchMeta) -> _Directory:
        """Where this batch is."""
        return self._saved(next(iter(self.rounds[meta.partition_ids[0], meta.batch_index or 0].values())))

    def __call__(
        self, tq_client: TransferQueueClient, data_fields: Sequence[str], partition_id: str,
        sampling_config: Mapping[str, Any], batch_index: int,
    ) -> tuple[TensorDict, BatchMeta]:  # fmt: skip
        """What ``StreamingDataset(fetch_batch_fn=...)`` calls."""
        storage = tq_client.storage_manager
        self._layout, self._allow_pickle = storage.layout, bool(storage.config.get("allow_pickle", False))
        return self.read(partition_id, sampling_config["dp_rank"], batch_index, data_fields)

    def _path(self, partition: str, rank: int | None, batch_index: int) -> Path:
        found = self.rounds.get((partition, batch_index), {}).get(rank)
        if found is not None:
            return found
        there = [index for (name, index), ranks in self.rounds.items() if name == partition and rank in ranks]
        if there and batch_index > max(there):
            if partition in self.may_lack:
                _log.warning(
                    f"the record {self.directory} ends batches of {partition!r} with number {max(there)}, and may lack "
                    f"later ones: recording stopped there, or samples were cleared before they were written."
                )
            raise EndOfPartitionError(f"the record {self.directory} of {partition!r} ends with batch {max(there)}.")
        if not there:
            raise CheckpointError(
                f"the record {self.directory} has nothing of partition {partition!r} for rank {rank}. It has the "
                f"partitions {self.partitions}."
            )
        raise CheckpointError(
            f"the record {self.directory} lacks batch {batch_index} of partition {partition!r} for rank {rank}. It has "
            f"batches of it from {min(there)} to {max(there)}. Where recording began later, resume the run from a "
            f"checkpoint of that step."
        )

    def _saved(self, path: Path) -> _Directory:
        if self._open is None or self._open.path != path:  # all ranks of a round are in one, and rounds in order
            self._open = _Directory(path)
        return self._open

    def __getstate__(self) -> dict[str, Any]:
        return {**self.__dict__, "_open": None}  # a worker process maps the files itself
