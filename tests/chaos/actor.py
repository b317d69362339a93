# SPDX-License-Identifier: Apache-2.0
"""One process of a world: it joins the queue, does its role's work, and ends at the first error that faults explain.

Whoever started it starts it again, as a cluster's scheduler would.
"""

from __future__ import annotations

import ctypes
import faulthandler
import os
import random
import signal
import sys
import threading
import time
import traceback
import warnings
from abc import ABC, abstractmethod
from pathlib import Path
from typing import Any, ClassVar

import torch

import transfer_queue as tq
from tests.chaos.ledger import Ledger
from transfer_queue.errors import ProtocolError

AGAIN, FAILED = 75, 3
"""Exit codes: an error that faults explain, and one that nothing does."""
_NEW_NETWORK = 0x40000000


class Role(ABC):
    """``shape``: numbers of the plan. ``number``: which one of its role. ``count``: how many there are."""

    watched: ClassVar[bool] = True
    """Whether the world waits for its end."""

    def __init__(self, client: Any, ledger: Ledger, orders: dict[str, Any], doom: Doom) -> None:
        self.client = client
        self.note = ledger.note
        self.shape: dict[str, Any] = orders["shape"]
        self.number: int = orders["number"]
        self.counts: dict[str, int] = orders["counts"]
        self.count = self.counts[orders["role"]]
        self.directory = Path(orders["directory"])
        self.before: list[int] = orders["before"]
        self.life: int = orders["life"]
        self.at_risk = doom.at_risk

    @abstractmethod
    def run(self) -> None:
        """Until there is nothing more to do."""

    def await_end_of_predecessors(self) -> None:
        """What they were doing is settled once the queue knows that they are gone."""
        while any(_is_of(name, pid) for name in self.client.get_stats()["clients"] for pid in self.before):
            time.sleep(0.05)


def lacks_memory(error: BaseException) -> bool:
    """Whether there was no memory for it, as Python, torch and the system say that."""
    said = ("can't allocate memory", "can't start new thread", "Cannot allocate memory", "bad_alloc")
    return isinstance(error, MemoryError) or any(each in str(error) for each in said)


def check_settled(error: tq.TransferQueueError) -> None:
    """A batch that was acknowledged is refused. Raises any other error."""
    if "settled" not in str(error):
        raise error


def _is_of(client: str, pid: int) -> bool:
    return f"_{pid}." in client or f".{pid}." in client


class Doom:
    """Told to die, a process kills itself a moment after its next step has begun."""

    def __init__(self, seed: str) -> None:
        self._rng = random.Random(seed)
        self._is_near = False
        signal.signal(signal.SIGUSR2, self._told)

    def _told(self, *_: Any) -> None:
        self._is_near = True

    def at_risk(self) -> None:
        """Called at the begin of a step."""
        if self._is_near:
            threading.Timer(self._rng.uniform(0.0, 0.01), os.kill, (os.getpid(), signal.SIGKILL)).start()


def enter_network(name: str) -> None:
    """Go into a network namespace; Python 3.12 has this as os.setns."""
    libc = ctypes.CDLL(None, use_errno=True)
    with open(f"/run/netns/{name}") as file:
        if libc.setns(file.fileno(), _NEW_NETWORK):
            raise OSError(ctypes.get_errno(), f"can't enter network {name}")


def main(role: type[Role], orders: dict[str, Any]) -> None:
    """The program of a process. It never returns."""
    torch.set_num_threads(1)
    warnings.simplefilter("error")
    warnings.filterwarnings("ignore", message="The PyTorch API of nested tensors is in prototype")
    directory = Path(orders["directory"])
    ledger = Ledger(directory, f"{orders['role']}-{orders['number']}", orders["serial"], orders["life"])
    with (directory / f"{orders['serial']:05d}.stacks").open("w") as stacks:
        faulthandler.register(signal.SIGUSR1, file=stacks)
        os._exit(_run(role, orders, ledger))


def _run(role: type[Role], orders: dict[str, Any], ledger: Ledger) -> int:
    try:
        if orders["network"]:
            enter_network(orders["network"])
        os.environ.update(orders["environment"])
        doom = Doom(f"{orders['seed']}/{orders['serial']}")
        tq.init()
        ledger.note("began", pid=os.getpid())
        role(tq.get_client(), ledger, orders, doom).run()
        tq.close()
        ledger.note("done")
        return 0
    except ProtocolError:  # no fault of a process or a network explains it
        ledger.note("failure", text=traceback.format_exc())
        return FAILED
    except tq.TransferQueueError as error:
        ledger.note("error", kind=type(error).__name__, text=str(error)[:500])
        return AGAIN
    except BaseException as error:
        if not lacks_memory(error):
            ledger.note("failure", text=traceback.format_exc())
            return FAILED
        ledger.note("error", kind="MemoryError", text=f"{type(error).__name__}: {error}")
        return AGAIN
    finally:
        sys.stdout.flush()
