# SPDX-License-Identifier: Apache-2.0
"""A hook of mkdocs: links from a page to a file of the repository lead to a copy of that file on the site.

So the same link works on the public host and on the site, and a link to a missing file fails the build.
"""

from __future__ import annotations

import os
import re
import subprocess
from pathlib import Path
from typing import Any

from mkdocs.structure.files import File, Files, InclusionLevel

ROOT = Path(__file__).resolve().parents[1]
_PAGES = ("CHANGELOG.md", "CONTRIBUTING.md", "SECURITY.md")
"""Files of the repository that the navigation names."""
_REMOTE = re.compile(r"(?:https://|git@|ssh://git@)(?P<host>[\w.-]+)[:/](?P<path>[\w./-]+?)(?:\.git)?/?")
FOLDER = "repository"
_LINK = re.compile(r"\]\((?P<path>(?:\.\./)+[^)#\s]+)(?P<anchor>#[^)\s]*)?\)")


def _outside(source: str, path: str) -> str | None:
    """The linked file's path in the repository; None for a page of the site."""
    target = os.path.normpath(os.path.join("docs", os.path.dirname(source), path))
    return None if target.startswith("docs" + os.sep) else target


def on_config(config: Any, **_: Any) -> Any:
    """The site links the repository that it is built from: the clone's origin."""
    command = ["git", "-C", str(ROOT), "config", "--get", "remote.origin.url"]
    asked = subprocess.run(command, capture_output=True, text=True, check=False)
    address = repository(asked.stdout.strip())
    if address is not None and not config.repo_url:
        config.repo_url, config.repo_name = address, address.rpartition("/")[2]
    return config


def repository(origin: str) -> str | None:
    """The web address of a clone's origin; None: it has none."""
    match = _REMOTE.fullmatch(origin)
    return f"https://{match['host']}/{match['path']}" if match else None


def on_files(files: Files, config: Any, **_: Any) -> Files:
    added = set(_PAGES)
    for target in _PAGES:
        files.append(_copy(target, config))
    for file in list(files.documentation_pages()):
        for link in _LINK.finditer(file.content_string):
            target = _outside(file.src_uri, link["path"])
            if target is not None and target not in added and (ROOT / target).is_file():
                added.add(target)
                files.append(_copy(target, config))
    return files


def _copy(target: str, config: Any) -> File:
    text = (ROOT / target).read_bytes()
    if not target.endswith(".md"):
        return File.generated(config, f"{FOLDER}/{target}{_shown_as_text(target)}", content=text)
    linked = _TO_A_PAGE.sub("](../", text.decode()) if target in _PAGES else text.decode()
    page = File.generated(config, f"{FOLDER}/{target}", content=_LINK_OF_A_COPY.sub(r"`\1`", linked))
    page.inclusion = InclusionLevel.INCLUDED if target in _PAGES else InclusionLevel.NOT_IN_NAV
    return page


_TO_A_PAGE = re.compile(r"\]\(docs/(?=[^)]*\.md)")
_LINK_OF_A_COPY = re.compile(r"\[([^\]]+)\]\((?!https?:|\.\./)[^)]*\)")
"""Other links of a copied page are relative to its place in the repository; their text stays."""


def _shown_as_text(target: str) -> str:
    """Browsers show .txt and images, and download .py and .yaml."""
    return "" if target.endswith((".txt", ".png", ".svg", ".json")) else ".txt"


def on_page_markdown(markdown: str, page: Any, **_: Any) -> str:
    def site_link(link: re.Match[str]) -> str:
        target = _outside(page.file.src_uri, link["path"])
        if target is None:
            return link[0]
        up = "../" * page.file.src_uri.count("/")
        suffix = "" if target.endswith(".md") or not (ROOT / target).is_file() else _shown_as_text(target)
        return f"]({up}{FOLDER}/{target}{suffix}{link['anchor'] or ''})"

    return markdown if page.file.src_uri.startswith(FOLDER) else _LINK.sub(site_link, markdown)
