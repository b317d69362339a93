# SPDX-License-Identifier: Apache-2.0
"""An extension of griffe, which reads the docstrings for the site.

A section of ours needs no blank line before it. A blocking twin has parameters and docstring of its async method.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from typing import Any

import griffe

_SECTION = re.compile(r"(?<!\n)\n(?=[ ]*(?:Args|Returns|Yields|Raises|Examples):\n)")
_TWIN = re.compile(r"(?:blocking\()?(?:\w+\.)?(async_\w+)\)?")
"""``kv_put = blocking(async_kv_put)``, and ``kv_watch = async_kv_watch``, which waits for nothing itself."""


class Sections(griffe.Extension):
    def on_object(self, *, obj: griffe.Object, **_: Any) -> None:
        if obj.docstring is not None:
            obj.docstring.value = _SECTION.sub("\n\n", obj.docstring.value)

    def on_package(self, *, pkg: griffe.Module, **_: Any) -> None:
        if pkg.name == "transfer_queue":
            for owner in (pkg["interface"], pkg["client.TransferQueueClient"]):
                for name, method in list(_twins(owner)):
                    owner.set_member(name, _named(name, method, owner))


def _twins(owner: Any) -> Iterator[tuple[str, griffe.Function]]:
    for name, member in owner.members.items():
        match = _TWIN.fullmatch(str(member.value)) if isinstance(member, griffe.Attribute) else None
        if match is not None and match[1] == f"async_{name}":
            method = owner.all_members[match[1]]
            yield name, method.final_target if method.is_alias else method


def _named(name: str, method: griffe.Function, owner: Any) -> griffe.Function:
    return griffe.Function(
        name, parameters=method.parameters, returns=method.returns, docstring=method.docstring, parent=owner
    )
