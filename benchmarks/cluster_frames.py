# SPDX-License-Identifier: Apache-2.0
"""How long do a put and a get take where no memory can be shared, as between two hosts? Prints one JSON line."""

from __future__ import annotations

from collections.abc import Sequence
from importlib.resources import files
from typing import Any

import torch
from omegaconf import OmegaConf

from benchmarks.common import arguments, report
from benchmarks.put_get_bandwidth import all_cases

# Values as frames of messages, and servers in processes of their own: what is left when the arena can't be mapped.
FRAMES = {"backend.SimpleStorage.arena": False, "server_processes": "each"}


def known_settings() -> dict[str, Any]:
    """Those of ``FRAMES`` that this version's config.yaml has; the others name a path that it doesn't have either."""
    defaults = OmegaConf.create((files("transfer_queue") / "config.yaml").read_text())
    missing = object()
    return {key: value for key, value in FRAMES.items() if OmegaConf.select(defaults, key, default=missing) != missing}


def main(argv: Sequence[str] | None = None) -> None:
    args = arguments(__doc__).parse_args(argv)
    settings = known_settings()
    conf = OmegaConf.create()
    for key, value in settings.items():
        OmegaConf.update(conf, key, value)
    plain: dict[str, Any] = OmegaConf.to_container(conf)  # type: ignore[assignment]
    found = all_cases(plain, args.quick)
    report("put and get over frames", settings=settings, torch_threads=torch.get_num_threads(), cases=found)


if __name__ == "__main__":
    main()
