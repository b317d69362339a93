# SPDX-License-Identifier: Apache-2.0
"""One process of the soak: actors in threads and on an event loop, a watch over their time, an ear for its end."""

from __future__ import annotations

import asyncio
import faulthandler
import gc
import os
import random
import sys
import threading
import time
import traceback
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch

import transfer_queue as tq
from tests.integration import soak_values as values
from tests.integration.soak_state import Share
from tests.integration.soak_work import Actor
from tests.own_processes import SLOW
from transfer_queue.transport.blocking import run_blocking

NUM_THREADS, NUM_TASKS = 2, 2
HANG_S = 40.0 * SLOW
"""No operation may take longer: the queue's own deadlines come to less."""
FAILED = 3


class Worker:
    def __init__(self, address: str, directory: Path, orders: dict[str, Any], ear: Any) -> None:
        self._directory = directory
        self._serial: int = orders["serial"]
        self._share = Share(directory, self._serial, orders["slot"], orders["limits"])
        self._ear = ear
        self._lock = threading.Lock()
        self._finished = threading.Event()
        tq.init(address)
        self._actors = []
        for number in range(NUM_THREADS + NUM_TASKS):
            rng = random.Random(f"{orders['seed']}/{self._serial}/{number}")
            actor = Actor(self._share, tq.get_client(), rng, number, number >= NUM_THREADS)
            actor.leave_out(orders["without"])
            self._actors.append(actor)

    def run(self) -> None:
        """Until told to stop; a failure of any part ends the process with ``FAILED``."""
        works: list[Callable[[], None]] = [
            lambda actor=actor: self._in_thread(actor) for actor in self._actors[:NUM_THREADS]
        ]
        threads = [threading.Thread(target=self._guarded, args=(work,)) for work in [*works, self._on_loop]]
        watches = [
            threading.Thread(target=self._guarded, args=(work,), daemon=True) for work in (self._watch, self._listen)
        ]
        for thread in [*threads, *watches]:
            thread.start()
        for thread in threads:
            thread.join()
        self._guarded(self._end)
        self._finished.set()
        watches[0].join()

    def _in_thread(self, actor: Actor) -> None:
        while not self._share.stop.is_set():
            run_blocking(actor.step())

    def _on_loop(self) -> None:
        async def work(actor: Actor) -> None:
            while not self._share.stop.is_set():
                await actor.step()

        async def together() -> None:
            await asyncio.gather(*(work(actor) for actor in self._actors[NUM_THREADS:]))

        asyncio.run(together())

    def _end(self) -> None:
        for actor in self._actors:
            actor.finish()
        self._actors.clear()
        gc.collect()
        tq.close()

    def _listen(self) -> None:
        while not self._share.stop.is_set():
            try:
                told = self._ear.recv()
            except EOFError:  # the parent is gone
                told = "stop"
            (self._share.doomed if told == "die" else self._share.stop).set()

    def _watch(self) -> None:
        while not self._finished.wait(1.0):
            late = [(at, what) for at, what in list(self._share.busy.items()) if time.monotonic() - what[1] > HANG_S]
            if late:
                raise values.WrongValueError(f"hangs: actor, operation and its begin: {late}")

    def _guarded(self, work: Callable[[], None]) -> None:
        try:
            work()
        except BaseException:
            with self._lock:  # the first failure is the one that counts
                self._report(traceback.format_exc())
                os._exit(FAILED)

    def _report(self, text: str) -> None:
        with (self._directory / f"failure-{self._serial}.txt").open("w") as file:
            file.write(f"{text}\n\n")
            file.flush()
            faulthandler.dump_traceback(file)


def main(address: str, directory: str, orders: dict[str, Any], ear: Any) -> None:
    """The program of a soaking process. ``ear``: a connection that says "die" or "stop"; told "ready"."""
    torch.set_num_threads(1)
    warnings.simplefilter("error")
    values.quiet()
    try:
        worker = Worker(address, Path(directory), orders, ear)
    except BaseException:
        Path(directory, f"failure-{orders['serial']}.txt").write_text(traceback.format_exc())
        sys.exit(FAILED)
    ear.send("ready")
    worker.run()
