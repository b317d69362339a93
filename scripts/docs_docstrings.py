# SPDX-License-Identifier: Apache-2.0
"""An extension of griffe, which reads the docstrings for the site: a section of ours needs no blank line before it."""

from __future__ import annotations

import re
from typing import Any

import griffe

_SECTION = re.compile(r"(?<!\n)\n(?=[ ]*(?:Args|Returns|Yields|Raises|Examples):\n)")


class Sections(griffe.Extension):
    def on_object(self, *, obj: griffe.Object, **_: Any) -> None:
        if obj.docstring is not None:
            obj.docstring.value = _SECTION.sub("\n\n", obj.docstring.value)
