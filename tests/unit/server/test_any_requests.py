# SPDX-License-Identifier: Apache-2.0
"""Whatever clients ask in whatever order, a server raises nothing, is consistent, and rests once they have gone."""

from __future__ import annotations

import types
import typing
from functools import cache
from typing import Any

import msgspec
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from tests.local_plane import LocalPlane
from tests.unit.server.front_kit import NBYTES, PAGE, Client, specs
from transfer_queue import protocol as p
from transfer_queue.calls import Turn
from transfer_queue.server.front import Front
from transfer_queue.storage import messages
from transfer_queue.storage.unit.arena import Arena
from transfer_queue.storage.unit.unit import StorageUnit
from transfer_queue.storage.wire import dense_layout

LATE_S = 100.0
"""Later than every deadline of these requests."""
MOST_TURNS = 2000
NAMES = st.sampled_from(
    ["p", "x", "t", "a", "b", "", "\0units", "\0writers", "fetches", "keys", "memory", "\0", "é💥", "n" * 300]
)
FEW = st.sampled_from([0, 1, 2, 3, 5, 8, -1, 2**31 - 1, 2**40, 2**53, 2**63 - 1])
TOKENS = st.sampled_from(["p:t:0:0", "1/0/0", "x"])
SAMPLES = st.lists(st.integers(-1, 9), max_size=5).map(p.pack_indexes)
FILTERS = st.sampled_from(["a > 1", "a == 'x'", "exists(`\0units`)", "not a in [1, 2]", "a >", ""])
VALUES = st.sampled_from([None, 1, 2, "x", 0.5, [1], {"a": {"b": 1}}])
SAMPLERS = st.sampled_from(
    ["SequentialSampler", "none", {"class": "GRPOGroupNSampler", "kwargs": {"n_samples_per_prompt": 2}},
     {"class": "RankAwareSampler"}, {"class": "TokenBudgetSampler", "kwargs": {"max_tokens": 3}}]
)  # fmt: skip
SPECS = st.sampled_from(
    [specs(), specs(PAGE), {"x": p.FieldSpec(None, None, is_non_tensor=True)}, {"y": p.FieldSpec("int64", ())}, {}]
)
SECONDS = st.sampled_from([0.0, 0.0, 1.0, 5.0])
OWN = {
    "partition": NAMES,
    "where": st.none() | FILTERS,
    "indexes": SAMPLES,
    "wait_s": SECONDS,
    "tokens": st.lists(TOKENS, max_size=2),
}
"""Fields of requests by name, where their types say too little."""
KINDS = [*typing.get_args(p.AnyRequest), *typing.get_args(messages.UnitRequest)]


def columns() -> st.SearchStrategy[messages.Columns]:
    def of(rows: int, lease: int, nbytes: int) -> messages.Columns:
        header = messages.ColumnHeader(
            "x",
            dense_layout("uint8", 1, (nbytes,)),
            rows,
            offset=0 if lease else -1,
            nbytes=rows * nbytes if lease else 0,
        )
        return messages.Columns([header], [], lease)

    return st.builds(of, st.integers(0, 3), st.integers(0, 4), st.sampled_from([NBYTES, PAGE]))


@cache
def fields_of(kind: Any) -> dict[str, Any]:
    """Strategies of the fields of this message."""
    hints = typing.get_type_hints(kind)
    names = [field.name for field in msgspec.structs.fields(kind)]
    return {name: OWN[name] if name in OWN else any_of(hints[name]) for name in names}


def any_of(hint: Any) -> st.SearchStrategy[Any]:
    """Values of this type, few of each, so that requests often mean the same things."""
    origin, args = typing.get_origin(hint), typing.get_args(hint)
    if hint is messages.Columns:
        return columns()
    if hint == dict[str, p.FieldSpec]:
        return SPECS
    if hint == str | dict[str, Any] | None:
        return SAMPLERS
    if origin is typing.Literal:
        return st.sampled_from(args)
    if origin in (types.UnionType, typing.Union):
        return st.one_of(*map(any_of, args))
    if origin is list:
        return st.lists(any_of(args[0]), max_size=3)
    if origin is dict:
        return st.dictionaries(any_of(args[0]), any_of(args[1]), max_size=3)
    if origin is tuple:
        items = args[:1] * 2 if args[-1] is Ellipsis else args
        return st.tuples(*map(any_of, items))
    if isinstance(hint, type) and issubclass(hint, msgspec.Struct):
        return st.builds(hint, **fields_of(hint))
    return PLAIN[hint]


PLAIN: dict[Any, st.SearchStrategy[Any]] = {
    type(None): st.none(), bool: st.booleans(), int: FEW, float: SECONDS, str: NAMES,
    bytes: SAMPLES | st.binary(max_size=9), Any: VALUES,
}  # fmt: skip

NUMBERS = st.integers(1, 12)
TASK = st.sampled_from([None, 0, 1])
TOKEN = st.integers(1, 6)
TERMS = st.builds(
    p.Terms,
    st.integers(1, 2),
    st.none() | st.just(1),
    st.none() | SECONDS.map(lambda seconds: seconds or 1.0),
    st.integers(1, 2),
    st.integers(1, 2),
    st.sampled_from([(), ("t",), ("t", "x")]),
)
GROUP_SAMPLERS = st.fixed_dictionaries(
    {
        "groups": st.integers(1, 2),
        "ahead": st.integers(0, 1),
        "order": st.sampled_from(["oldest", "newest", "arrival"]),
        "max_staleness": st.integers(0, 1),
        "stale": st.sampled_from(["train", "wait", "drop"]),
        "gate": st.sampled_from([None, "sum(a) > 0", "count() > 1", "any(a)"]),
        "balance": st.sampled_from([None, "a"]),
    }
).map(lambda kwargs: {"class": "GroupSampler", "kwargs": kwargs})
BEGINNINGS = st.one_of(
    st.builds(lambda count, wait_s: p.Reserve(1, "p", count, specs(), wait_s), st.integers(1, 3), SECONDS),
    st.builds(lambda first: p.CheckFields(1, "p", p.pack_indexes([first, first + 1]), specs(), 1.0), st.integers(0, 4)),
    st.builds(lambda keys: p.ResolveKeys(1, "p", keys, True, True, specs(), 1.0, ["x"]), st.lists(NAMES, max_size=3)),
    st.builds(
        lambda keys, terms: p.ResolveKeys(1, "p", keys, True, True, specs(), 1.0, ["x"], terms),
        st.lists(NAMES, min_size=1, max_size=3),
        TERMS,
    ),
)
PUTS = st.builds(
    lambda begin, tags: ("put", begin, tags), BEGINNINGS, st.sampled_from([{}, {0: {"a": 1}}, {0: {"a": "x"}}])
)
"""Requests that often have an effect."""
GROUPS = st.one_of(
    st.builds(p.RegisterTask, NUMBERS, st.just("t"), GROUP_SAMPLERS),
    st.builds(
        p.LeaseGroups,
        NUMBERS,
        st.sampled_from([["p"], ["p*"]]),
        st.integers(1, 3),
        st.booleans(),
        st.none() | FILTERS,
        st.sampled_from([1.0, 5.0]),
        st.sampled_from(["all", "closed", "none"]),
        SECONDS,
    ),
    st.builds(p.RenewLeases, NUMBERS, st.lists(TOKEN, max_size=3), SECONDS),
    st.builds(p.Advance, NUMBERS, st.sampled_from(["p", "p*"]), st.integers(0, 3), st.booleans()),
    st.builds(p.RetryGroups, NUMBERS, st.just("p"), st.none() | FILTERS),
    st.builds(p.RejectGroups, NUMBERS, st.just("p"), SAMPLES),
)
USUAL = st.one_of(
    PUTS,
    PUTS,
    GROUPS,
    GROUPS,
    st.builds(p.Fetch, NUMBERS, st.just("p"), st.just("t"), st.just(["x"]), st.integers(1, 3), TASK, TASK,
              wait_s=SECONDS, with_values=st.booleans(), where=st.none() | FILTERS),
    st.builds(p.ClearSamples, NUMBERS, st.just("p"), SAMPLES),
    st.builds(p.Cancel, NUMBERS, NUMBERS),
    st.builds(p.WaitKeys, NUMBERS, st.just("p"), st.none() | FILTERS, st.integers(1, 3), SECONDS),
    st.builds(messages.LeaseMemory, NUMBERS, st.sampled_from([1, PAGE, 3 * PAGE]), wait_s=SECONDS),
    st.builds(messages.Write, NUMBERS, SAMPLES, columns(), SECONDS, st.booleans()),
)  # fmt: skip
CLIENTS = st.sampled_from(["a", "b", "\0units"])
STEPS = ["any", "any", "usual", "usual", "usual", "work", "work", "time", "gone"]


def requests(front: Front) -> st.SearchStrategy[Any]:
    """Those that this server serves, and a few that it does not."""
    kinds = [*front.calls.verbs, p.Put]
    return st.sampled_from(kinds).flatmap(lambda kind: st.builds(kind, **{**fields_of(kind), "id": NUMBERS}))


class Fatal(list[BaseException]):
    """Nothing that a client asks is a fault of the server, but what only a bad type or value says."""

    def append(self, error: BaseException) -> None:
        if not isinstance(error, (ValueError, TypeError)):
            raise error


def a_server(parts: str) -> Front:
    turn = Turn()
    plane = LocalPlane(capacity=12) if "plane" in parts else None
    unit = StorageUnit("u", 4 * PAGE, Arena(8 * PAGE)) if "unit" in parts else None
    front = Front({}, plane, unit, turn=turn)
    front.calls.faults = Fatal()
    return front


def numbered(request: Any, number: int) -> Any:
    begin = {"begin": msgspec.structs.replace(request.begin, id=number)} if isinstance(request, p.Put) else {}
    return msgspec.structs.replace(request, id=number, **begin)


def put_of(client: Client, begin: Any, tags: Any) -> Any:
    rows = begin.count if isinstance(begin, p.Reserve) else len(begin.keys) if isinstance(begin, p.ResolveKeys) else 2
    return client.a_put([1] * rows, begin, tags)


def begun(front: Front, client: Client, data: st.DataObject) -> None:
    """A task that draws groups, three groups, and leases of some of them."""
    client.send(p.RegisterTask(client.number(), "t", data.draw(GROUP_SAMPLERS)))
    begin = p.ResolveKeys(client.number(), "p", ["a", "b", "x"], True, True, specs(), 0.0, ["x"], data.draw(TERMS))
    client.send(*put_of(client, begin, {0: {"a": 2}}))
    client.send(p.LeaseGroups(client.number(), ["p"], 2, data.draw(st.booleans())))


def work_of(front: Front, data: st.DataObject) -> Any:
    """What a worker, or a late one, does with a group that was leased: rows for it, or the end of its lease."""
    partition = None if front.plane is None else front.plane.state.partitions.get("p")
    groups = None if partition is None else partition.groups
    live = {} if groups is None else groups.live
    known = [(lease.token, head) for head, own in live.items() for lease in own.holders.values()]
    lease, head = data.draw(st.sampled_from(known or [(1, 0)]))
    parts = data.draw(st.sampled_from([[0], [1], [0, 1], []]))
    members = p.Members(lease, head, parts, data.draw(st.booleans()))
    how = data.draw(st.sampled_from(["put", "put", "close", "release", "reject"]))
    if how == "put":
        begin = p.Reserve(1, "p", data.draw(st.integers(1, 2)) * (len(parts) or 1), specs(), 0.0, members)
        return "put", begin, data.draw(st.sampled_from([{}, {0: {"a": 1}, 1: {"a": 0}}, {0: {"a": "x"}, 1: {"a": 1}}]))
    return p.EndLease(1, "p", members, how, "", data.draw(st.sampled_from(["worker", "sample"])))


def check(front: Front) -> None:
    front.calls.check_invariants()
    if front.plane is not None:
        front.plane.check_invariants()


def rest(front: Front, now: float) -> None:
    """The server comes to rest in a bounded number of turns."""
    for _ in range(MOST_TURNS):
        due = front.calls.next_deadline()
        if due is None or due > now:
            return
        front.expire(now)
    raise AssertionError("the server does not come to rest")


@pytest.mark.timeout(600)  # a failure is printed once it has been made small, which takes five minutes at most
@pytest.mark.parametrize("parts", ["plane and unit", "plane", "unit"])
@settings(max_examples=50, deadline=None, print_blob=True, suppress_health_check=list(HealthCheck))
@given(st.data())
def test_no_requests_break_a_server(parts, data):
    front, now, clients = a_server(parts), 0.0, {}
    any_request = requests(front)
    if parts == "plane and unit" and data.draw(st.booleans()):
        begun(front, clients.setdefault("a", Client(front, "a")), data)
    for step in data.draw(st.lists(st.sampled_from(STEPS), min_size=15, max_size=60)):
        if step == "time":
            now += data.draw(SECONDS)
            rest(front, now)
        elif step == "gone":
            list(front.client_gone(data.draw(CLIENTS), now))
        else:
            name = data.draw(CLIENTS)
            client = clients.setdefault(name, Client(front, name))
            request = work_of(front, data) if step == "work" else data.draw(any_request if step == "any" else USUAL)
            frames: list[bytes] = [bytes(NBYTES)]
            if isinstance(request, tuple):
                request, frames = put_of(client, *request[1:])
            if data.draw(st.sampled_from([True, True, True, False])):
                request = numbered(request, client.number())
            received = data.draw(st.lists(NUMBERS, max_size=1))
            client.send_raw(p.encode_request(request, received, received), frames, now, request.id)
        check(front)
    for name in clients:
        list(front.client_gone(name, now))
        check(front)
    rest(front, now + LATE_S)
    check(front)
    assert front.calls.waits.count == 0, "nothing waits for nobody"
