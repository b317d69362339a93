# SPDX-License-Identifier: Apache-2.0
"""Ctrl-C at every single step of a call: the connection stays, no answer is mixed up, and the call is cancelled."""

from __future__ import annotations

import sys
from collections.abc import Callable
from functools import partial
from pathlib import Path
from types import FrameType
from typing import Any

import pytest
from transport_kit import Desk, blocking, calls, make_caller, numbered, served_by_thread

import transfer_queue.transport

FILES = {
    str(Path(transfer_queue.transport.__file__).parent / name)
    for name in ("caller.py", "framing.py", "unix.py", "descriptors.py")
}

pytestmark = [
    pytest.mark.usefixtures("nothing_left"),
    pytest.mark.filterwarnings("ignore:coroutine .* was never awaited"),  # ended between being made and begun
]


def interrupted(step: int, act: Callable[[], Any]) -> bool:
    """Do it, with a KeyboardInterrupt before that bytecode of the transport. Returns False where it had fewer."""
    left = step

    def trace(frame: FrameType, event: str, arg: Any) -> Any:
        nonlocal left
        if frame.f_code.co_filename not in FILES:
            return None
        frame.f_trace_opcodes = True
        if event == "opcode":
            if left == 0:
                raise KeyboardInterrupt
            left -= 1
        return trace

    before = sys.gettrace()
    sys._getframe().f_trace_opcodes = True  # Python 3.12 looks only when tracing begins whether any frame has asked
    sys.settrace(trace)
    try:
        act()
    except KeyboardInterrupt:
        return True
    finally:
        sys.settrace(before)
    return False


@pytest.mark.programs
@pytest.mark.parametrize(
    "frames",
    [pytest.param([], id="small"), pytest.param([b"x" * 300_000, b"y"], id="large", marks=pytest.mark.slow)],
)
def test_a_ctrl_c_at_any_step_leaves_connections_that_can_be_used_and_cancels_what_it_ends(tmp_path, frames):
    served, caller = Desk(), make_caller("me")
    with served_by_thread(tmp_path, served) as (peer, server):
        blocking(caller.call_many(calls(peer, b"echo"), 10.0))
        step = 0
        while interrupted(step, partial(_call, caller, peer, step, frames)):
            ((_, header, found),) = blocking(caller.call_many([numbered(peer, b"after %d" % step, frames)], 10.0))
            assert (header, [bytes(frame) for frame in found]) == (b"after %d" % step, frames)
            step += 1
        assert step > 300, "it was interrupted nowhere"
        assert served.gone == []
        assert server.clients()["me"] < 0.2 * step, "only where it is being borrowed or given back it may be lost"
        caller.close()
    # Sent and not cancelled is only what ended within the last steps of a call: its answer had been returned.
    assert set(served.said) <= {b"cancel %d" % number for number in range(step)}
    assert len(served.said) > 0.5 * step


def _call(caller: Any, peer: Any, step: int, frames: list[bytes]) -> None:
    call = numbered(peer, b"call %d" % step, frames, b"cancel %d" % step)
    blocking(caller.call_many([call], 10.0))
