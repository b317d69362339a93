# SPDX-License-Identifier: Apache-2.0
"""Finding: something that waits in a queue, or that went wrong, as fields and as sentences."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

Numbers = Mapping[str, Any]
_TRAINING_BELOW, _GENERATION_FROM = 0.05, 0.2
"""Shares of the time that training waited. In between, neither side is called the bottleneck."""
_BOTH = "training and generation"
_STATES = {
    "ready": "ready", "running": "running", "waiting": "waiting for a worker", "closed": "without a tag or field",
    "drawn": "in training", "failed": "failed", "expired": "expired", "stale": "too old",
}  # fmt: skip


@dataclass(frozen=True, slots=True, kw_only=True)
class Finding:
    """Something that waits, or that went wrong. Tables show its fields; ``str`` makes sentences of them.

    Examples:
        >>> lacking = ("1 ready", "3 lack field 'reward'")
        >>> print(tq.Finding(kind="fetch", what="task 'ppo'", waits_for="4 samples of 'train'", held_up_by=lacking))
        task 'ppo' waits for 4 samples of 'train': 1 ready, 3 lack field 'reward'.
    """

    kind: str
    """A wait is a "fetch", "put", "keys" or "lease". What went wrong: "gone" (producers), "lost" (values), "unit",
    "storage", "sampler" or "full" (the queue). "training" says what limits a run, "groups" what became of those of a
    partition."""
    names: tuple[object, ...] = ()
    """Which one of its kind. They stay the same while numbers change."""
    what: str
    """Such as "task 'ppo'"."""
    waits_for: str = ""
    """Empty where nothing waits: then ``held_up_by`` says what became of it."""
    age_s: float | None = None
    """Seconds that it has waited, or since it was last seen."""
    held_up_by: tuple[str, ...] = ()
    to_do: tuple[str, ...] = ()
    """Each of these may help."""
    client: str = ""
    """Whose request waits."""

    @property
    def statement(self) -> str:
        """What is so, without what to do and without a full stop."""
        reasons = ", ".join(self.held_up_by)
        if not self.waits_for:
            return f"{self.what} {reasons}"
        waits = "waits" if self.age_s is None else f"waited {self.age_s:.1f} s"
        return f"{self.what} {waits} for {self.waits_for}{': ' * bool(reasons)}{reasons}"

    def __str__(self) -> str:
        advice = ", or ".join(filter(None, (", ".join(self.to_do[:-1]), *self.to_do[-1:])))
        return f"{self.statement}.{' ' * bool(advice)}{advice[:1].upper()}{advice[1:]}{'.' * bool(advice)}"

    @classmethod
    def of_training(cls, elapsed_s: float, waited_s: float, was_full: bool = False, ready: int = 0) -> Finding:
        """Which side limits a run whose training waited for so many of these seconds, and by how much.

        Args:
            was_full: Meanwhile, producers waited for room in the queue. So none of the sides was slow.
            ready: So many samples were ready at the end: enough for steps. They came in bursts, or reading is slow.
        """
        share = waited_s / elapsed_s
        what, waited = _side(share), f"samples in {share:.0%} of its time"
        if what == "training":
            waited = f"was the bottleneck: it waited for {waited}"
        elif what == _BOTH:
            waited = f"kept pace: training waited for {waited}"
        elif was_full:
            what, waited = "the full queue", f"was the bottleneck: producers waited for room, and training for {waited}"
        elif ready:
            what = "bursts or reading"
            waited = f"were the bottleneck: training waited for {waited}, and {ready:,} were ready at the end"
        else:
            times = elapsed_s / max(elapsed_s - waited_s, 1e-9)
            slower = f"took {times:.1f} times as long as" if times < 100 else "took far longer than"
            waited = f"was the bottleneck: it {slower} training, which waited for {waited}"
        return cls(kind="training", names=(what,), what=what, held_up_by=(waited,))

    @classmethod
    def of_a_look(cls, task: str | None, seconds: float, waited_share: float) -> Finding:
        """Which side limits a run now, from a look of so many seconds at its training task.

        Args:
            task: None: no task has asked for samples meanwhile.
            waited_share: Of the look, in which the task had a fetch that waited.
        """
        time = f"the last {seconds:.0f} s"
        if task is None:
            return cls(kind="training", what="nothing is read:", held_up_by=(f"no task has asked in {time}",))
        waited = f"task {task!r} waited for samples in {waited_share:.0%} of {time}"
        side = _side(waited_share)
        does = "keep pace" if side == _BOTH else "is the bottleneck"
        return cls(kind="training", names=(side,), what=side, held_up_by=(f"{does}: {waited}",))

    @classmethod
    def of_groups(cls, partition: str, groups: Numbers) -> Finding:
        """What became of a partition's groups.

        Args:
            groups: ``client.get_stats()["partitions"][partition]["groups"]``, which is there if it has any.
        """
        return cls(kind="groups", names=(partition,), what=f"groups of {partition!r}:", held_up_by=states_of(groups))


def _side(waited_share: float) -> str:
    """Which side limits a run whose training waits in so much of its time."""
    if waited_share < _TRAINING_BELOW:
        return "training"
    return _BOTH if waited_share < _GENERATION_FROM else "generation"


def states_of(groups: Numbers) -> tuple[str, ...]:
    """Such as ("12 ready", "3 running (oldest 41 min, worker-7)")."""
    states, oldest = groups["states"], groups["oldest"]
    clauses = {state: f"{states[state]:,} {word}" for state, word in _STATES.items() if states.get(state)}
    if "running" in clauses and oldest is not None:
        clauses["running"] += f" (oldest {age(oldest['age_s'])}, {oldest['worker']})"
    return *clauses.values(), *(f"{count:,} rejected by {gate}" for gate, count in groups["rejected"].items())


def age(seconds: float) -> str:
    for unit, size in (("h", 3600.0), ("min", 60.0)):
        if seconds >= size * (1 if unit == "min" else 2):
            return f"{seconds / size:.0f} {unit}"
    return f"{seconds:.0f} s"


def counted(samples: int) -> str:
    return f"{samples:,} sample{'s' * (samples != 1)}"


def in_bytes(count: int) -> str:
    """Such as "96 KiB"."""
    power = max(0, count.bit_length() - 1) // 10
    return f"{count / 1024**power:.4g} {('B', 'KiB', 'MiB', 'GiB', 'TiB', 'PiB')[power]}"
