# SPDX-License-Identifier: Apache-2.0
"""The subcommand ``demo``: the template "grpo", run for a minute, with its live page, a picture and a verdict."""

from __future__ import annotations

import contextlib
import csv
import os
import re
import signal
import subprocess
import sys
import tempfile
import time
import webbrowser
from collections import deque
from collections.abc import Iterator, Sequence
from importlib.util import find_spec
from pathlib import Path
from typing import NamedTuple

from lightning_tq.cli import INTERRUPTED
from lightning_tq.cli.new_command import write_template
from lightning_tq.cli.parser import Parser
from lightning_tq.cli.queue_commands import seconds

_FAILED = 1
_LINES_EVERY_S = 3.0
_MOST_S = 3600
_LEARNED = 20
"""Percentage points. Fewer than these are chance."""
_PAGE = re.compile(r"^Dashboard: (\S+)")
_STEP = re.compile(r"^step (\d+): (\d+)% ")
_LIMIT = re.compile(r"; ((?:generation|training) was the bottleneck|training and generation kept pace)")


class _Learned(NamedTuple):
    at_s: float
    """Seconds since the start of the demo."""
    step: int
    percent: int
    """Of the held-out prompts that were answered right."""


def main(args: Sequence[str]) -> int:
    """Learn for about a minute on two cores: a small policy writes digits backwards, by GRPO on its own answers.

    Its files are those of "lightning-tq new grpo". The live page needs aiohttp, and the picture matplotlib. Exit codes:
    0, 1 if the training failed, 2 if the directory isn't empty.
    """
    parser = Parser("demo", main)
    where = "Where its files and the picture go: a new or an empty directory. Default: a temporary one."
    parser.add_argument("directory", nargs="?", metavar="DIR", help=where)
    length = f"Seconds of training, at most {_MOST_S}. Processes take about ten more to start. Default: 45."
    parser.add_argument("--seconds", type=whole_seconds, default=45, metavar="N", help=length)
    parser.add_argument("--no-browser", action="store_true", help="Print the page's address, and don't open it.")
    options = parser.parse_args(args)
    directory = Path(options.directory or tempfile.mkdtemp(prefix="lightning-tq-demo-"))
    write_template("grpo", directory)
    print(
        f"The demo's files are in {directory}. Trainer, queue and workers start, which takes some seconds.", flush=True
    )
    _name_what_lacks()
    demo = _Demo(not options.no_browser)
    code = demo.run(directory, options.seconds)
    if code and code != INTERRUPTED:
        sys.stderr.write("".join(demo.hidden) + "error: the training failed; its last lines are above.\n")
        return _FAILED
    demo.conclude(directory)
    return code


def whole_seconds(text: str) -> int:
    """The type of an option."""
    return int(seconds(text, 1, _MOST_S))


def _name_what_lacks() -> None:
    for package, part in (("aiohttp", "live page"), ("matplotlib", "picture")):
        if find_spec(package) is None:
            print(f"The {part} needs {package}, so there is none: pip install {package}", flush=True)


class _Demo:
    """A run of the training in a process of its own, and what it printed."""

    def __init__(self, opens_page: bool) -> None:
        self.hidden: deque[str] = deque(maxlen=40)
        self._opens_page = opens_page
        self._learned: list[_Learned] = []
        self._limit = ""
        self._started = time.monotonic()
        self._shown_at = -_LINES_EVERY_S

    def run(self, directory: Path, seconds: int) -> int:
        """Returns the training's exit code; Ctrl-C ends the training early."""
        limit = f"00:00:{seconds // 60:02}:{seconds % 60:02}"
        options = {
            "config": directory / "run.yaml", "trainer.max_epochs": -1, "trainer.max_time": limit,
            "trainer.enable_progress_bar": "false",
            "data.queue.dashboard": "true" if find_spec("aiohttp") else "false",
        }  # fmt: skip
        command = [sys.executable, "-m", "lightning_tq", "fit", *(f"--{name}={options[name]}" for name in options)]
        environment = {name: value for name, value in os.environ.items() if not name.startswith("TQ_")}  # its own queue
        with subprocess.Popen(
            command, env=environment, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True
        ) as process:
            assert process.stdout is not None

            def end_as_by_ctrl_c(*_: object) -> None:
                process.send_signal(signal.SIGINT)
                raise KeyboardInterrupt

            before = signal.signal(signal.SIGTERM, end_as_by_ctrl_c)
            interrupted = False
            while True:
                try:
                    for line in process.stdout:
                        self._take(line)
                    break
                except KeyboardInterrupt:  # the training gets it, too, and ends by itself
                    interrupted = True
        signal.signal(signal.SIGTERM, before)
        return INTERRUPTED if interrupted else process.returncode

    def _take(self, line: str) -> None:
        now = time.monotonic() - self._started
        if page := _PAGE.match(line):
            print(f"Watch it live: {page[1]}", flush=True)
            if self._opens_page and (os.environ.get("DISPLAY") or os.environ.get("WAYLAND_DISPLAY")):
                with contextlib.suppress(webbrowser.Error):
                    webbrowser.open(page[1])
        elif step := _STEP.match(line):
            self._learned.append(_Learned(now, int(step[1]), int(step[2])))
            if now - self._shown_at >= _LINES_EVERY_S:
                print(f"{now:3.0f} s, {line}", end="", flush=True)
                self._shown_at = now
        else:
            self.hidden.append(line)
            if limit := _LIMIT.search(line):
                self._limit = f"; {limit[1]}"

    def conclude(self, directory: Path) -> None:
        """Draw the picture, and say what was learned."""
        if self._learned:
            if find_spec("matplotlib") is not None:
                picture = directory / "demo.png"
                _draw(self._learned, list(_waits(directory)), picture)
                print(f"Picture: {picture}")
            first, last = self._learned[0], self._learned[-1]
            print(
                f"Accuracy {first.percent}% → {last.percent}% in {last.at_s:.0f} s and {last.step} steps{self._limit}."
            )
            if last.percent < first.percent + _LEARNED:
                print("It has not learned in this time, as on a busy machine: give it more, such as --seconds 180.")
        print("A run of your own: lightning-tq new grpo DIR", flush=True)


def _waits(directory: Path) -> Iterator[tuple[int, float]]:
    """(step, percent of its time that training waited for samples), as QueueMonitor logged them."""
    for path in directory.glob("runs/*/metrics.csv"):
        with path.open(newline="") as file:
            for row in csv.DictReader(file):
                if row.get("queue/starved"):
                    yield int(row["step"]), 100 * float(row["queue/starved"])


def _draw(learned: Sequence[_Learned], waits: Sequence[tuple[int, float]], path: Path) -> None:
    from lightning_tq.queue_picture import BLUE, ORANGE, Panel, draw_panels

    panels = [
        Panel("accuracy (%)", [each.step for each in learned], [each.percent for each in learned], BLUE, 102),
        Panel("time waiting for\nsamples (%)", [at for at, _ in waits], [share for _, share in waits], ORANGE, 102),
    ]
    title = "GRPO on one machine: held-out prompts that are answered right"
    draw_panels(panels, title, "optimizer step", path)
