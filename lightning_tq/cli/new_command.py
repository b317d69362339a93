# SPDX-License-Identifier: Apache-2.0
"""The subcommand ``new``: writes a run of one's own to start from."""

from __future__ import annotations

import json
import shlex
from collections.abc import Sequence
from importlib.resources import files
from pathlib import Path

from lightning_tq.cli.parser import Parser
from transfer_queue.errors import ConfigError

KINDS = ("grpo", "sft", "stream")
_OUTPUT = "default_root_dir: runs"


def main(args: Sequence[str]) -> None:
    """Write model, workers and a YAML file with validation, checkpoint and resume. They run at once.

    grpo: workers lease prompts, and a policy learns from its own answers. sft: a model learns from samples that are
    made meanwhile, epoch by epoch. stream: it learns from an endless stream in a bounded queue. Exit codes: 0, 2 if
    the directory isn't empty or can't be written.
    """
    parser = Parser("new", main)
    parser.add_argument("kind", choices=KINDS, help="What to start from.")
    parser.add_argument("directory", metavar="DIR", help="Where to write it: a new or an empty directory.")
    options = parser.parse_args(args)
    names = write_template(options.kind, Path(options.directory))
    run = f"lightning-tq fit --config {shlex.quote(str(Path(options.directory) / 'run.yaml'))}"
    print(
        f"Wrote {', '.join(names)} to {options.directory}.\n"
        f"Run it:                  {run}\n"
        f"Go on after it was cut:  {run} --ckpt_path last\n"
        f"Watch it:                lightning-tq dashboard, with the address that the run prints"
    )


def write_template(kind: str, directory: Path) -> list[str]:
    """Write one of ``KINDS``. Returns the names of its files.

    Raises:
        ConfigError: there is something in the directory, or it can't be written.
    """
    sources = sorted(
        (each for each in (files("lightning_tq") / "templates" / kind).iterdir() if each.is_file()),
        key=lambda each: each.name,
    )
    # A run writes into its own directory, wherever it is started. A configuration would look up what follows "${".
    output = str(directory.resolve() / "runs").replace("${", "\\${")
    root = f"default_root_dir: {json.dumps(output, ensure_ascii=False)}"
    written: list[Path] = []
    try:
        if directory.exists() and (not directory.is_dir() or any(directory.iterdir())):
            raise ConfigError(f"{directory} isn't an empty directory. Name another one: nothing in it is replaced.")
        directory.mkdir(parents=True, exist_ok=True)
        for source in sources:
            written.append(directory / source.name)
            written[-1].write_text(source.read_text().replace(_OUTPUT, root), encoding="utf-8")
    except (OSError, UnicodeError) as error:
        for path in written:  # the disk may be full
            path.unlink(missing_ok=True)
        raise ConfigError(f"can't write to {directory}: {getattr(error, 'strerror', None) or error}.") from error
    return [source.name for source in sources]
