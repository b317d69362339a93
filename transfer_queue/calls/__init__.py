# SPDX-License-Identifier: Apache-2.0
"""What the calls of a server's clients hold and wait for. Pure: no sockets, no clocks, no kinds of requests."""

from transfer_queue.calls.alarm import Alarm as Alarm
from transfer_queue.calls.call import Answer as Answer
from transfer_queue.calls.call import Call as Call
from transfer_queue.calls.call import Effect as Effect
from transfer_queue.calls.call import Holding as Holding
from transfer_queue.calls.call import Steps as Steps
from transfer_queue.calls.call import Until as Until
from transfer_queue.calls.room import Calls as Calls
from transfer_queue.calls.room import Verb as Verb
from transfer_queue.calls.room import replied as replied
from transfer_queue.calls.turn import PAGE as PAGE
from transfer_queue.calls.turn import PIECE as PIECE
from transfer_queue.calls.turn import PIECE_NBYTES as PIECE_NBYTES
from transfer_queue.calls.turn import Turn as Turn
from transfer_queue.calls.wait import MORE as MORE
from transfer_queue.calls.wait import More as More
from transfer_queue.calls.wait import Name as Name
from transfer_queue.calls.wait import Wait as Wait
