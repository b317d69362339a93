# SPDX-License-Identifier: Apache-2.0
"""The parser of a subcommand's words."""

from __future__ import annotations

import argparse
from collections.abc import Callable
from typing import Any, NoReturn

from lightning_tq.checks import did_you_mean


class Parser(argparse.ArgumentParser):
    """Its function's docstring says what it does. An unknown option is named with the one that was meant."""

    def __init__(self, name: str, act: Callable[..., Any]) -> None:
        super().__init__(f"lightning-tq {name}", description=act.__doc__, allow_abbrev=False)

    def error(self, message: str) -> NoReturn:
        unknown = message.partition("unrecognized arguments: ")[2].split("=")[0].split(" ")[0]
        super().error(message + did_you_mean(unknown, self._option_string_actions, ""))
