# SPDX-License-Identifier: Apache-2.0
"""Findings: what waits in a queue and for what, who holds it up and what to do; and what went wrong."""

# Numbers in, findings out. Error texts, wait reports, the hints of a run, `status` and the dashboard render these.

from __future__ import annotations

import math
import shlex
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import replace
from itertools import islice
from typing import Any

import msgspec

from transfer_queue.finding import Finding, age, counted, in_bytes, states_of
from transfer_queue.protocol import NotReady

Numbers = Mapping[str, Any]
CLEAR = "clear consumed samples or partitions"
TOTAL, MEMORY = "total_storage_size", "memory"
"""Settings that bound a queue."""
_RESTART: tuple[str, ...] = ("look at their output", "restart them")
_CLEARED = "cleared (clear_consumed, clear_partition)"
_FULL_FROM = 0.95
"""Share of the memory."""
_IDLE_FROM_S = 10.0
_MOST_LISTED = 4
_MOST_OWING = 5
"""Writers that a reply names."""


def diagnose(stats: Numbers, units: Sequence[Numbers] = (), units_error: str | None = None) -> list[Finding]:
    """What went wrong in the queue, then what waits in it, in the order of ``stats["waiting"]``.

    Args:
        stats: ``client.get_stats()``.
        units: ``client.get_storage_stats()``, if it is known.
        units_error: Why that is not known.
    Examples:
        >>> meta = client.put({"x": torch.arange(4)}, partition_id="train")
        >>> tq.diagnose(client.get_stats(), client.get_storage_stats())
        []
    """
    shown = {name: each for name, each in stats["partitions"].items() if not is_internal(name)}
    waiting = [each for each in stats["waiting"] if each["writer"] or not is_internal(each.get("partition"))]
    if not any(each.get("wanted_nbytes") for each in waiting):  # of units in processes of their own only this is known
        waiting += [
            {"writer": True, "client": f"{parked} clients at {unit['unit']}", "wanted_nbytes": unit["parked_nbytes"]}
            for unit in units if (parked := unit["parked"])
        ]  # fmt: skip
    keeping = keepers((each["samples"], _kept(each)) for each in shown.values())
    used = sum(each["samples"] + each["held"] for each in stats["partitions"].values())
    followers = {name for each in shown.values() for name, own in each["tasks"].items() if "follows" in own}
    known = {
        **stats, "partitions": shown, "units": units, "keepers": keeping, "used": used,
        "to_acknowledge": tuple(to_acknowledge(keeping, followers)),
    }  # fmt: skip
    waits = [_wait(known, each) for each in waiting]
    return [*_wrong(known, units_error), *_full(known, [each for each in waits if each.kind == "put"]), *waits]


def is_internal(name: str | None) -> bool:
    """Whether this partition or task is the queue's own, such as that of the weights: no report shows those.

    Their names begin with "_".

    Examples:
        >>> [name for name in ("_weights", "train@0") if not tq.is_internal(name)]
        ['train@0']
    """
    return name is not None and name.startswith("_")


def not_ready(reply: NotReady, task: str, partition: str, fields: Iterable[str], waited_s: float) -> Finding:
    """A fetch that got no batch."""
    asked = {"task": task, "partition": partition, "fields": list(fields), "waited_s": waited_s}
    facts = {name: value for name, value in msgspec.structs.asdict(reply).items() if value or name != "elsewhere"}
    return _fetch({**facts, **asked})


def keepers(partitions: Iterable[tuple[int, Mapping[str, tuple[int, int]]]]) -> tuple[str, ...]:
    """Who keeps a queue full: the tasks that keep most samples from being cleared, and how many no task keeps.

    Args:
        partitions: The samples of each, and by task how many it has not consumed, and has not acknowledged.
    """
    kept: dict[str, Counter[str]] = {"consumed": Counter(), "acknowledged": Counter()}
    unread = done = 0
    for samples, tasks in partitions:
        for task, (unconsumed, unacked) in tasks.items():
            kept["consumed"][task] += unconsumed
            kept["acknowledged"][task] += unacked
        unread += 0 if tasks else samples
        done += max(0, samples - sum(map(sum, tasks.values()))) if tasks else 0  # or more: tasks may keep the same ones
    clauses = [
        f"task {task!r} has not {done_with} {counted(count)}"
        for done_with, counter in kept.items() for task, count in counter.most_common(2) if count
    ]  # fmt: skip
    clauses += [f"no task reads {counted(unread)}"] if unread else []
    clauses += [f"at least {counted(done)} {_be(done)} consumed and not {_CLEARED}"] if done else []
    return tuple(clauses)


def _wrong(stats: Numbers, units_error: str | None) -> Iterator[Finding]:
    for name, partition in stats["partitions"].items():
        field = partition["abandoned"]
        end = stats.get("lost_producers", {}).get(field, {})
        if field and not end.get("planned"):
            yield _gone(name, field, partition, end)
        for field, count in partition["lost"].items():
            what, lost = f"{counted(count)} of {name!r}", (f"lost {field!r} with a storage unit",)
            yield Finding(kind="lost", names=(name, field), what=what, held_up_by=lost, to_do=put_again(name))
    for at, unit in enumerate(stats["lost_units"]):
        before = stats["lost_units"][:at].count(unit)  # a unit may come again under its name, and end again
        ended = ("ended, and its values with it",)
        yield Finding(kind="unit", names=(unit, before), what=f"storage unit {unit!r}", held_up_by=ended)
    if units_error:
        yield Finding(kind="storage", what="storage:", held_up_by=(units_error.rstrip("."),))
    for alarm in stats["alarms"]:
        number, age_s, held = alarm["number"], alarm["seen_s_ago"], f"held the server for {alarm['held_s']:.1f} s"
        facts = (held, "when nobody else was served", f"seen {age_s:.0f} s ago")
        yield Finding(kind="sampler", names=(number,), what=alarm["what"], age_s=age_s, held_up_by=facts)


def _full(stats: Numbers, puts: Sequence[Finding]) -> Iterator[Finding]:
    """The queue, while it is full or puts wait for room."""
    blocked = [each for each in puts if each.to_do]
    limits = [unit["capacity_bytes"] for unit in stats["units"]]
    most = sum(limits) if _all(limits) else 0
    held = sum(unit["held_nbytes"] - unit["spilled_nbytes"] for unit in stats["units"])  # what is on disk needs no room
    capacity, used = stats["capacity"], stats["used"]
    if not blocked and not (capacity and used >= capacity) and not (most and held >= _FULL_FROM * most):
        return
    holds = (
        f"{used:,} of {counted(capacity)}" if capacity else "",
        f"{in_bytes(held)} of {in_bytes(most)}" if most else "",
    )
    number = len(blocked)
    waits = _puts_wait(number) if number else ""
    to_do = blocked[0].to_do if blocked else (CLEAR,)
    yield Finding(
        kind="full", what="the queue", age_s=max((each.age_s or 0.0 for each in blocked), default=None), to_do=to_do,
        held_up_by=("is full", *filter(None, (*holds, waits)), *stats["keepers"], *_idle(stats)),
    )  # fmt: skip


def _all(limits: Sequence[int | None]) -> bool:
    return bool(limits) and all(limits)


def _idle(stats: Numbers) -> Iterator[str]:
    """Tasks that keep samples and don't read."""
    waiting = {each["task"] for each in stats["waiting"]}
    asked: dict[str, float] = {}
    for partition in stats["partitions"].values():
        for task, own in partition["tasks"].items():
            if own.get("asked_s_ago") is not None and partition["samples"] > own["consumed"]:
                asked[task] = min(asked.get(task, math.inf), own["asked_s_ago"])
    for task, age_s in sorted(asked.items()):
        if age_s >= _IDLE_FROM_S and task not in waiting:
            yield f"task {task!r} doesn't read, it asked last {age(age_s)} ago"


def _gone(name: str, field: str, partition: Numbers, end: Numbers) -> Finding:
    lacking = partition["samples"] - partition.get("produced", {}).get(field, partition["samples"])
    lack = (f"{counted(lacking)} of {name!r} lack{'s' * (lacking == 1)} it",) if lacking else ()
    what, died = f"all producers of {field!r}", ("have died", *_last(end), *lack, f"readers of {name!r} get an error")
    return Finding(kind="gone", names=(name,), what=what, held_up_by=died, to_do=_RESTART)


def without_producers(task: str, partition: str, field: str, facts: Numbers) -> Finding:
    """A fetch that got an error, because nobody produces this field any more.

    Args:
        facts: ``end`` of its last producer, if it is known; how many samples have ``lost`` fields with a storage unit;
            whether there are ``groups``, and how many of them are ``waiting`` for workers; ``grace_s``.
    """
    died, count, to_do = [f"all producers of {field!r} have died", *_last(facts["end"])], facts["waiting"], _RESTART
    if facts["lost"]:
        died += _losses(facts)
        to_do = (*put_again(partition), *["reject them, which frees their slots"] * facts["groups"])
    elif count:
        died.append(
            f"{count:,} group{'s wait' if count != 1 else ' waits'} for a worker and will not be lost: new workers may "
            f"lease from {partition!r} at any time"
        )
        longer = f"to have training wait longer for them, raise controller.producer_grace_s ({facts['grace_s']:g} s)"
        to_do = (*_RESTART, longer)
    return Finding(
        kind="gone", names=(partition,), what=f"task {task!r}", waits_for=f"samples of {partition!r}",
        held_up_by=tuple(died), to_do=to_do,
    )  # fmt: skip


def _last(end: Numbers) -> tuple[str, ...]:
    """What is known of the last producer to die: client, process and exit, the last line of its output."""
    line = end.get("last_line")
    known = (f"last client {end['client']}", end.get("how"), f"which said {line!r}" if line else "") if end else ()
    return tuple(filter(None, known))


def put_again(partition: str) -> tuple[str, ...]:
    """What to do about lost values."""
    return f"put the lost values again (client.get_lost_samples({partition!r}) names them)", "clear those samples"


# ---- what waits ----


def _wait(stats: Numbers, waiting: Numbers) -> Finding:
    """``stats``: those of the queue, and what the findings of all puts share."""
    client, name = waiting["client"], waiting.get("partition")
    if waiting["writer"]:
        return _put(stats, waiting)
    if "workers" in waiting:
        return _lease(stats, waiting)
    if "keys" in waiting:
        return no_keys(client, name, waiting["wanted"], waiting["keys"], waiting["waited_s"])
    partition = stats["partitions"].get(name)
    if partition is None:
        return _fetch({**waiting, "elsewhere": _held(stats)})
    own = {
        "given": _given(partition, waiting.get("lacking", ())),
        "known_fields": partition["fields"], "reserved": partition["held"], "sealed": partition["sealed"],
        "lost": {field: count for field, count in partition["lost"].items() if field in waiting["fields"]},
        "groups": partition.get("groups", {}), "producers": stats.get("producers", {}),
    }  # fmt: skip
    return _fetch({**waiting, **own, **({} if partition["put_total"] else {"last_published_s": None})})


def no_keys(client: str, partition: str | None, wanted: int | None, keys: str, waited_s: float) -> Finding:
    """A wait, or one in vain, for so many keys of a partition, or for changed ones. ``keys``: see ``keys_where``."""
    them = f"key{'s' * (wanted != 1)} of {partition!r}"
    return Finding(
        kind="keys", names=(client, partition), what=f"a wait for keys of {client}", age_s=waited_s, client=client,
        waits_for=f"{wanted or 'changed'} {keys.replace('keys', them, 1)}",
        to_do=("check the producers", "wait longer (timeout_s)"),
    )  # fmt: skip


def keys_where(where: str | None) -> str:
    """Keys that match this filter, in words."""
    return "keys" if where is None else f"keys where {where}"


def _given(partition: Numbers, lacking: Iterable[str]) -> list[str]:
    """The tasks that were given more samples than have each of these fields: they may be those that add one."""
    produced = partition.get("produced", {})
    least = min((produced.get(field, math.inf) for field in lacking), default=math.inf)
    done = {task: its["consumed"] - its.get("in_hand", 0) for task, its in partition["tasks"].items()}
    return [task for task, count in done.items() if count > least] if least < math.inf else []


def holds(partitions: Iterator[tuple[str, int, bool]]) -> str:
    """What is in the queue instead of a partition: names of others, their samples, and whether they are sealed."""
    first = islice(partitions, _MOST_LISTED)
    listed = [f"{name!r} ({counted(samples)}{', sealed' * sealed})" for name, samples, sealed in first]
    others = " and others" if next(partitions, None) is not None else ""
    return f"holds {', '.join(listed)}{others}" if listed else "is empty"


def _put(stats: Numbers, waiting: Numbers) -> Finding:
    client, nbytes = waiting["client"], waiting.get("wanted_nbytes")
    if nbytes is None:
        what, size, setting = samples_of(waiting.get("wanted"), waiting["partition"]), stats["capacity"], TOTAL
    else:
        limits = [unit["capacity_bytes"] for unit in stats["units"]]
        what, size, setting = in_bytes(nbytes), in_bytes(sum(limits)) if _all(limits) else None, MEMORY
    room = what if size is None else f"{what} in a queue of {size}"
    found = no_room(client, room, setting, waiting.get("waited_s"), stats["keepers"])
    savers = tuple(f"client {name} saves one" for name, held in stats["clients"].items() if held.get("freezes"))
    if savers and nbytes is None and (size is None or stats["used"] + (waiting["wanted"] or 0) <= size):
        return replace(found, waits_for=f"a checkpoint, before it replaces {what}", held_up_by=savers, to_do=())
    return replace(found, to_do=(*stats["to_acknowledge"], *found.to_do))


def no_room(client: str, what: str, setting: str, waited_s: float | None, held_up_by: Iterable[str]) -> Finding:
    """A put that waits, or waited in vain, for room for ``what``, which the setting bounds."""
    return Finding(
        kind="put", names=(client,), what=f"a put of {client}", waits_for=f"room for {what}", age_s=waited_s,
        held_up_by=tuple(held_up_by), client=client, to_do=(CLEAR, f"raise {setting}", "raise put_timeout_s"),
    )  # fmt: skip


def _lease(stats: Numbers, waiting: Numbers) -> Finding:
    """Workers without work. That is usual where training is slower, so there is nothing to do."""
    count, where, names = waiting["workers"], waiting["where"], waiting["partitions"]
    groups = {name: stats["partitions"].get(name, {}).get("groups") or {} for name in names}
    why = why_no_work(where, groups, "" if groups else _held(stats))
    found = no_work(waiting["client"], waiting["partition"], where, waiting["waited_s"], why)
    return replace(found, what=f"{count:,} worker{'s' * (count != 1)}", to_do=())


def no_work(client: str, names: str, where: str | None, waited_s: float, held_up_by: Iterable[str]) -> Finding:
    """A worker that waits, or waited in vain, for a group of these partitions to lease."""
    return Finding(
        kind="lease", names=(names, client), what=f"worker {client}", age_s=waited_s, client=client,
        waits_for=f"a group of {names!r}{f' where {where}' if where else ''} to work on",
        held_up_by=tuple(dict.fromkeys(held_up_by)),
        to_do=("add groups", "look at the trainer", "wait longer (timeout_s)"),
    )  # fmt: skip


def why_no_work(where: str | None, of_partitions: Mapping[str, Numbers], held: str) -> Iterator[str]:
    """Why none of their groups can be leased.

    Args:
        of_partitions: Numbers of the groups of each partition that is there.
        held: What the queue holds instead, if none is.
    """
    if not of_partitions:
        yield f"there is no such partition in the queue, which {held}"
    for partition, groups in of_partitions.items():
        if not groups or not groups["states"].get("waiting"):
            yield f"{partition!r} has none that waits"
            yield from states_of(groups) if groups else ()
            continue
        yield from _held_back({"groups": groups})
        full = [(task, own) for task, own in groups["slots"].items() if own["used"] >= own["budget"] > 0]
        for task, own in full:
            yield f"task {task!r} has {own['used']:,} of {own['budget']:,} slots in use"
        if where and not full:
            yield f"none of {partition!r} that waits matches the filter"


def _held(stats: Numbers) -> str:
    return holds((name, own["samples"], own["sealed"]) for name, own in sorted(stats["partitions"].items()))


def to_acknowledge(keeping: Iterable[str], followers: Iterable[str]) -> Iterator[str]:
    """What makes consumed samples fit to be cleared, if it is those that keep a queue full: they wait for their ack.

    Args:
        keeping: See ``keepers``.
        followers: Tasks that follow others, such as those of recorders.
    """
    first = next(iter(keeping), "")
    behind = [name for name in followers if first.startswith(f"task {name!r} has not acknowledged ")]
    if behind:
        yield f"start the reader of task {behind[0]!r} again if it has ended"
        yield f"forget that task (lightning-tq forget-task {shlex.quote(behind[0])})"
    elif "has not acknowledged" in first:
        yield "let the trainer acknowledge sooner (checkpoints more often, or ack='step')"


def _kept(partition: Numbers) -> dict[str, tuple[int, int]]:
    tasks, samples = partition["tasks"].items(), partition["samples"]
    return {name: (samples - own["consumed"], own["in_flight_samples"]) for name, own in tasks}


def _fetch(facts: Numbers) -> Finding:
    """``facts``: one of ``get_stats()["waiting"]`` and those of its partition, or a reply and what was asked."""
    task, partition = facts["task"], facts["partition"]
    waits_for, causes, remedies = samples_of(facts.get("wanted"), partition), _causes, _remedies
    count = facts["groups"]["slots"].get(task, {}).get("per_step", 0) if facts.get("groups") else 0
    if count and not facts.get("refused"):
        waits_for, causes, remedies = f"{count:,} group{'s' * (count != 1)} of {partition!r}", _of_groups, _for_groups
    held_up_by, to_do = tuple(causes(facts)), tuple(remedies(facts))
    if number := facts.get("parked_puts"):
        held_up_by += (f"the queue is full, and {_puts_wait(number)}",)
        to_do = (CLEAR, *to_do)
    return Finding(
        kind="fetch",
        names=(task, partition),
        what=f"task {task!r}",
        waits_for=waits_for,
        age_s=facts["waited_s"],
        held_up_by=held_up_by,
        to_do=to_do,
        client=facts.get("client", ""),
    )


def _causes(facts: Numbers) -> Iterator[str]:
    """Why a fetch waits."""
    if facts.get("refused"):
        yield facts["refused"].rstrip(".")
    if "elsewhere" in facts:
        yield f"the partition is not in the queue, which {facts['elsewhere']}"
        return
    if facts.get("ready") is not None:
        yield f"{facts['ready']:,} ready"
    yield from _lacking(facts)
    for client, count in facts.get("in_hand", {}).items():
        yield f"client {client} has taken {count:,} to add a field, and not put it yet"
    if count := facts.get("unmatched"):
        yield f"{count:,} do{'es' * (count == 1)}n't match the filter"
    if count := facts.get("reserved"):
        owed_by = facts.get("owed_by", ())
        others = " and maybe others" * (len(owed_by) >= _MOST_OWING)
        owing = f" by client{'s' * (len(owed_by) > 1)} {', '.join(owed_by)}{others}" if owed_by else ""
        yield f"{count:,} {_be(count)} reserved{owing} and not put yet"
    yield from _losses(facts)
    yield from _held_back(facts)
    yield from _about_the_partition(facts)


def _lacking(facts: Numbers, what: str = "") -> Iterator[str]:
    for name, count in facts.get("lacking", {}).items():
        rows = f" {what}{'s' * (count != 1)}" if what else ""
        yield f"{count:,}{rows} lack{'s' * (count == 1)} field {name!r}"


def _never_put(facts: Numbers) -> Iterator[str]:
    if unknown := _unknown(facts):
        known = ", ".join(map(repr, facts["known_fields"]))
        yield f"nobody has put field {' or '.join(map(repr, unknown))} so far (there are {known})"


def _losses(facts: Numbers) -> Iterator[str]:
    return (f"{counted(n)} lost {name!r} with a storage unit" for name, n in facts.get("lost", {}).items())


def _held_back(facts: Numbers) -> Iterator[str]:
    """Groups that no worker gets, because a task that is to train them draws none."""
    for task in _without_sampler(facts):
        count = facts["groups"]["states"]["waiting"]
        groups = f"{count:,} group{'s get' if count != 1 else ' gets'} no worker"
        yield f"{groups} while task {task!r}, which is to train them, has no GroupSampler"


def _without_sampler(facts: Numbers) -> list[str]:
    groups = facts.get("groups")
    if not groups or not groups["states"].get("waiting"):
        return []
    return [task for task, own in groups["slots"].items() if not own["budget"]]


def _about_the_partition(facts: Numbers) -> Iterator[str]:
    yield from _never_put(facts)
    if not _is_short(facts):
        yield "Sampler returned no samples of those that are ready, or earlier fetches of the task still wait"
    elif facts.get("sealed"):
        yield "the partition is sealed"
    else:
        yield from _idle_producers(facts)
    last = facts.get("last_published_s", "")
    if last != "":
        yield "nothing was published yet" if last is None else f"last published {last:.0f} s ago"


def _idle_producers(facts: Numbers) -> Iterator[str]:
    """The field that was put last the longest ago, of those that wait for living producers: one may hang."""
    producers, names = facts.get("producers", {}), facts.get("lacking") or facts["fields"]
    ages = {name: producers[name]["published_s_ago"] or 0.0 for name in names if name in producers}
    name = max(ages, key=lambda each: ages[each] if producers[each]["alive"] else -1.0, default="")
    own = producers.get(name, {"alive": 0})
    if own["alive"] and ages[name] >= _IDLE_FROM_S:
        living = ", ".join(own["clients"]) + " and others" * (own["alive"] > len(own["clients"]))
        yield f"nobody has put field {name!r} for {age(ages[name])}, though its producers live ({living})"


def _remedies(facts: Numbers) -> Iterator[str]:
    """What the one whose fetch waits may do."""
    partition, is_short = facts["partition"], _is_short(facts)
    is_expected = facts.get("lacking") or facts.get("reserved") or facts.get("last_published_s", 0.0) is None
    if facts.get("lost"):
        yield from put_again(partition)
    elif held_back := _without_sampler(facts):
        yield from _to_sample(held_back)
    elif held := facts.get("in_hand"):
        if _unknown(facts):
            yield "compare the names of the fields"
        yield f"end the session of one that hangs (client.evict_client({next(iter(held))!r}))"
    elif facts.get("sealed") and is_short:
        for given in facts.get("given", ()):  # it may have had samples in hand at a checkpoint, or when it died
            calls = f"client.reset_consumption({partition!r}, {given!r})"
            yield f"if the queue was restored and task {given!r} adds what is missing, give it all again ({calls})"
        yield from ("put what is missing", "clear those samples")
    else:
        yield "check the producers"
        if facts.get("ready") and "elsewhere" not in facts:
            yield "lower batch_size"
        if _unknown(facts) or "elsewhere" in facts:
            yield f"compare the names of the {'partitions' if 'elsewhere' in facts else 'fields'}"
        elif is_short and not is_expected:
            yield f"seal the partition if nothing more comes (client.seal_partition({partition!r}))"
    yield "wait longer (timeout_s)"


def _to_sample(tasks: Iterable[str]) -> Iterator[str]:
    for task in tasks:
        yield f"give task {task!r} a GroupSampler (Stream(sampler=...), or register_task)"
    yield "add groups without naming it (add_groups)"


def _is_short(facts: Numbers) -> bool:
    return facts.get("ready") is None or facts["wanted"] is None or facts["ready"] < facts["wanted"]


def _unknown(facts: Numbers) -> list[str]:
    """Fields that no sample has, where there are samples."""
    known = facts.get("known_fields")
    return [name for name in facts["fields"] if known and name not in known]


# ---- groups ----


def _of_groups(facts: Numbers) -> Iterator[str]:
    yield from states_of(facts["groups"]) or ("there are none",)
    slots = facts["groups"]["slots"].get(facts["task"])
    if facts["groups"]["states"].get("closed"):
        yield from (*_lacking(facts, "row"), *_never_put(facts))
        for tag in slots["untagged"] if slots is not None and "untagged" in slots else ():
            known = ", ".join(map(repr, slots["tagged"][:_MOST_LISTED]))
            yield f"some rows lack tag {tag!r} of the gate{known and f' (they have {known})'}"
    yield from _losses(facts)
    yield from _held_back(facts)
    if slots is not None and slots["used"] >= slots["budget"]:
        elsewhere = slots["used"] - slots["here"]
        others = f", {elsewhere:,} of them by groups of other partitions" if elsewhere > 0 else ""
        yield f"{slots['used']:,} of {slots['budget']:,} slots in use{others}"
    for other in _full_others(facts):
        own = facts["groups"]["slots"][other]
        yield f"task {other!r} has {own['used']:,} of {own['budget']:,} slots in use"
    if facts.get("sealed"):
        yield "the partition is sealed"


def _full_others(facts: Numbers) -> list[str]:
    """Other tasks whose slots are full, so that groups wait which they are to train, too."""
    if not facts["groups"]["states"].get("waiting"):
        return []
    slots = facts["groups"]["slots"].items()
    return [task for task, own in slots if task != facts["task"] and own["used"] >= own["budget"] > 0]


def _for_groups(facts: Numbers) -> Iterator[str]:
    """What may help a task that waits for groups, by what there is most of."""
    states, task = facts["groups"]["states"], facts["task"]
    slots = facts["groups"]["slots"].get(task, {"used": 0, "here": 0, "budget": 1})
    if facts.get("lost"):
        yield from put_again(facts["partition"])
    elif held_back := _without_sampler(facts):
        yield from _to_sample(held_back)
    elif states.get("running", 0) > states.get("closed", 0):
        yield from ("look at the worker of the oldest group", "set deadline_s (add_groups)")
    elif states.get("closed"):
        gate = f", and the tags of the gate {slots['gate']!r}," if slots.get("gate") else ""
        yield f"put the fields of the fetch{gate} for all rows of a group"
    elif states.get("waiting") and slots["used"] < slots["budget"]:
        full = [
            f"let task {other!r} train what it was given, or raise its {_limits(facts, other)}"
            for other in _full_others(facts)
        ]
        yield from (*full, "start workers that lease groups")
    elif slots["used"] >= slots["budget"] and slots["here"] < slots["used"]:
        yield "clear the partitions that the task reads no more, or say that it has gone on (client.move_on)"
    elif slots["used"] >= slots["budget"]:
        yield from (
            "let the trainer say what it has trained (client.advance)",
            f"raise {_limits(facts, task)} of {task!r}",
        )
    elif not states.get("waiting"):
        yield "add groups"
    if facts["groups"]["rejected"]:
        yield "loosen the gate"
    yield "wait longer (timeout_s)"


def _limits(facts: Numbers, task: str) -> str:
    """The options that bound a task's slots."""
    return " and ".join(facts["groups"]["slots"].get(task, {}).get("limits", ("ahead",)))


# ---- words ----


def samples_of(count: int | None, partition: str | None) -> str:
    """So many samples of this partition, in words. Names of the queue's own partitions are not shown."""
    samples = counted(count) if count else "samples"
    return samples if partition is None or is_internal(partition) else f"{samples} of {partition!r}"


def _puts_wait(count: int) -> str:
    return f"{count:,} put{'s' * (count != 1)} wait{'s' * (count == 1)} for room"


def _be(count: int) -> str:
    return "is" if count == 1 else "are"
