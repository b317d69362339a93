# SPDX-License-Identifier: Apache-2.0
"""FabricLoader: a stream of a queue for a training loop of one's own, run by Lightning Fabric."""

from __future__ import annotations

import logging
from collections.abc import Iterator, Mapping, Sequence
from typing import TYPE_CHECKING, Any

from lightning_tq.batch import TQBatch
from lightning_tq.books import Ack, Books
from lightning_tq.connection import Connection
from lightning_tq.feed import Feed, Reading
from lightning_tq.loader import stream_loader
from lightning_tq.peers import peer_looks
from lightning_tq.producers import Producer, ProducerGroup
from lightning_tq.queue_config import QueueConfig, as_queue_config
from lightning_tq.ranks import on_first_rank
from lightning_tq.run import dropped_text, settled
from lightning_tq.stream import Stream, sampler_modules
from lightning_tq.topology import Rank, fabric_topology
from lightning_tq.watch import Watch
from transfer_queue import TransferQueueClient
from transfer_queue.errors import InvalidRequestError

if TYPE_CHECKING:
    from lightning.fabric import Fabric

logger = logging.getLogger(__name__)

_NEEDED = {"epoch", "position"}
_STATE = {*_NEEDED, "taken"}
"""``taken``, the micro-batches of that pass so far, was added later."""


class FabricLoader:
    """``for data, meta in loader``: micro-batches on Fabric's device. Each pass over it is an epoch, from 0 on.

    ``{epoch}`` in the stream's partition is the number of the pass. It has ``state_dict`` and ``load_state_dict``, so
    ``fabric.save(path, {"loader": loader, ...})`` notes where it stands. Use it as a context manager: leaving that ends
    the producers, and the queue if this loader started it, once all ranks are there. It needs no ``setup_dataloaders``.
    """

    def __init__(
        self,
        fabric: Fabric,
        stream: Stream,
        queue: QueueConfig | Mapping[str, Any] | str | None = None,
        producers: Sequence[Producer] = (),
        dp_rank: Rank | None = None,
        dp_size: int | None = None,
        ack: Ack = "auto",
    ) -> None:
        """Start or join the queue on the first rank, join it on the others. A collective, after ``fabric.launch()``.

        Args:
            stream: What to read.
            queue: As of a TQDataModule: how to start the queue, or where to join it.
            producers: Processes to run beside it, on the first rank, until the loader is closed.
            dp_rank: Data-parallel rank, or a function of the Fabric that tells it. Default: the strategy knows.
            dp_size: Data-parallel groups, for strategies that count every process as one.
            ack: When a batch is settled, so that the queue may let go of it: when the loop asks for the next one
                ("step"), once a ``state_dict`` holds it ("checkpoint"), or "never". "auto": the second from the first
                ``state_dict`` or ``load_state_dict`` on, the first until then.
        Raises:
            InvalidRequestError: a stream that can't be right, or ``launch()`` is still to come.
            TransferQueueError: no queue answers there, or it can't be started; the same error on every rank.
        """
        if not {"epoch", "stage"} >= set(stream.variables):
            raise InvalidRequestError(
                f"partition template {stream.partition!r} uses what Fabric doesn't count. Use {{epoch}}, the number of "
                f"the pass over the loader."
            )
        self.epoch = 0
        """Number of the pass that goes on, or of the last one."""
        self.topology = fabric_topology(fabric, dp_rank, dp_size)
        self._fabric = fabric
        self._next_epoch = 0
        self._held: list[str] = []
        self._connection = Connection()
        self._producers = ProducerGroup(producers)
        config = as_queue_config(queue)

        def prepare() -> str:
            self._connection.open(config, sampler_modules([stream]))
            stream.register(self.client, self.topology.dp_size)
            self._held = self.client.get_partition_list()
            self._producers.start(self.address)
            return self.address

        try:
            address = on_first_rank(fabric, prepare)
            self._connection.open(config, (), address)
        except BaseException:
            self._producers.end()
            self._connection.close()
            raise
        self._watch = Watch([self._producers.failure, *peer_looks(fabric)])
        self._feed = Feed(
            "train", "train", stream, self.topology, {}, self, self._watch.stopped.is_set, self._connection.conf
        )
        self._feed.held = self._held
        self._feed.is_over = lambda epochs_ahead: epochs_ahead > 0  # a pass is one epoch, empty or not
        self._feed.settled = lambda partition: settled(self.client, partition, stream.task)
        self._books = Books(self._feed, self.client, self.topology, ack == "checkpoint", ack == "never", ack == "auto")
        self._ack = ack
        self._loader = stream_loader(self._feed)
        self._watch.start()

    @property
    def client(self) -> TransferQueueClient:
        """This process' client of the queue."""
        return self._connection.client

    @property
    def address(self) -> str:
        """Where other processes join the queue."""
        return self._connection.address

    def __iter__(self) -> Iterator[TQBatch]:
        self.epoch, self._next_epoch = self._next_epoch, self._next_epoch + 1
        batches = iter(self._loader)
        batch = next(batches, None)
        # A rank begins behind what others have settled, so none may settle before all have begun.
        self._fabric.barrier("lightning_tq_begun")
        while batch is not None:
            self._books.trained(batch, stepped=True)  # nothing is fetched ahead of it: what the loop has, it trains
            yield batch.to(self._fabric.device)
            batch = next(batches, None)
            if self._fabric.world_size > self.topology.dp_size:
                self._fabric.barrier("lightning_tq_read")  # a peer may be behind: what it still reads isn't settled
            self._books.settle()

    def __len__(self) -> int:
        """Micro-batches of a whole pass. Raises TypeError where ``Stream.num_batches`` doesn't say it."""
        return len(self._loader)

    # ---- checkpoints ----

    def state_dict(self) -> dict[str, Any]:
        """Behind the batch that was handed out last. Plain data, the same on every rank."""
        if self._ack != "step":
            self._books.dumped()
        return {"epoch": self.epoch, "position": dict(self._feed.place or {}), "taken": self._feed.taken}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """The next pass goes on there, in that epoch; it is an empty one where that epoch was read to its end."""
        if not _NEEDED <= set(state) <= _STATE:
            raise InvalidRequestError(f"can't resume from {dict(state)!r}: not a FabricLoader's state.")
        self._books.keeps = self._ack != "step"
        self._next_epoch = self.epoch = int(state["epoch"])
        if state["position"]:
            self._feed.restore(state["position"], int(state.get("taken", 0)))

    # ---- what its feed asks (feed.Host) ----

    def partition_of(self, stage: str, stream: Stream, epochs_ahead: int = 0) -> str:
        return stream.partition_at(epoch=self.epoch, global_step=0, stage=stage)

    def replays(self, stage: str) -> bool:
        return False

    def check(self) -> None:
        self._watch.check()

    def stream_ended(self, feed: Feed, reading: Reading) -> None:
        told = dropped_text(self.client, feed) if self._fabric.is_global_zero else None
        if told is not None:
            logger.warning(told)

    # ---- ending ----

    def close(self) -> None:
        """End the stream and what was started here. Idempotent. Other ranks' loaders must be done: see ``__exit__``."""
        self._watch.stop()
        self._feed.close()
        self._producers.end()
        self._connection.close()

    def __enter__(self) -> FabricLoader:
        return self

    def __exit__(self, kind: type[BaseException] | None, *_: object) -> None:
        if kind is None:
            self._books.end(self._fabric)
            self._fabric.barrier("lightning_tq_close")  # the queue may end now: nobody must still be reading
        self.close()
