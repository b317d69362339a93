# SPDX-License-Identifier: Apache-2.0
"""The site builds without a warning, describes every public name, and loads nothing from elsewhere."""

from __future__ import annotations

import ast
import re
import subprocess
import sys
from pathlib import Path

import pytest

import lightning_tq
import transfer_queue
from tests.own_processes import SLOW

ROOT = Path(__file__).resolve().parents[2]
PUBLIC = [
    *(f"transfer_queue.{name}" for name in transfer_queue.__all__ if not name.startswith("async_")),
    *(f"lightning_tq.{name}" for name in lightning_tq.__all__),
]
_LOADED = re.compile(r"""<(?:script|img|link|iframe)[^>]+(?:src|href)=["']?(https?:)?//""")


@pytest.fixture(scope="module")
def site(tmp_path_factory: pytest.TempPathFactory) -> Path:
    pytest.importorskip("mkdocs", reason="the site needs pip install -e '.[docs]'")
    pytest.importorskip("material", reason="the site needs pip install -e '.[docs]'")
    directory = tmp_path_factory.mktemp("site")
    command = [sys.executable, "-m", "mkdocs", "build", "--quiet", "--strict", "--site-dir", str(directory)]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=110 * SLOW, check=False)
    assert done.returncode == 0, done.stdout + done.stderr
    return directory


@pytest.mark.programs
def test_every_public_name_is_in_the_reference(site: Path) -> None:
    pages = [(page, page.read_text()) for page in (site / "reference").rglob("*.html")]
    described = {
        name for _, text in pages for name in re.findall(r'id="((?:transfer_queue|lightning_tq)[\w.]*)"', text)
    }
    ends = {(name.split(".")[0], name.rsplit(".", 1)[1]) for name in described if "." in name}
    assert [name for name in PUBLIC if tuple(name.split(".")) not in ends] == []


def test_a_blocking_verb_is_shown_as_the_function_it_is(site: Path) -> None:
    names = {"keys": "transfer_queue.interface.kv_put", "client": "transfer_queue.client.TransferQueueClient.get_data"}
    for where, name in names.items():
        page = (site / "reference" / "transfer_queue" / where / "index.html").read_text()
        described = re.split("<h[23]", page[page.index(f'id="{name}"') :])[0]
        assert "Parameters:" in described, name


def test_no_page_loads_anything_from_elsewhere(site: Path) -> None:
    found = {
        str(page.relative_to(site)): match[0]
        for page in site.rglob("*.html")
        for match in _LOADED.finditer(page.read_text())
        if 'rel="canonical"' not in match[0]
    }
    assert found == {}


def test_a_long_signature_has_a_line_for_each_parameter(site: Path) -> None:
    page = (site / "reference" / "lightning_tq" / "datamodule" / "index.html").read_text()
    described = page[page.index('id="lightning_tq.datamodule.TQDataModule"') :].split("</pre>")[0]
    signature = re.sub(r"<[^>]+>", "", described)
    assert re.search(r"^ {4}keep_alive: bool = True,$", signature, re.M), signature
    (extra,) = re.findall(r"^docs = (.*)$", (ROOT / "pyproject.toml").read_text(), re.M)
    assert '"ruff' in extra, "it breaks the lines"


def test_the_site_has_code_on_its_first_page_and_names_changelog_and_contributing(site: Path) -> None:
    page = (site / "index.html").read_text()
    assert "tq.init()" in re.sub(r"<[^>]+>", "", page)
    for name in ("CHANGELOG", "CONTRIBUTING"):
        assert f'href="repository/{name}/"' in page


@pytest.mark.parametrize(
    ("origin", "address"),
    [
        ("git@host.org:owner/name.git", "https://host.org/owner/name"),
        ("https://host.org/owner/name/", "https://host.org/owner/name"),
        ("/home/me/name", None),
        ("", None),
    ],
)
def test_the_site_links_the_repository_that_it_is_built_from(origin: str, address: str | None) -> None:
    pytest.importorskip("mkdocs", reason="the site needs pip install -e '.[docs]'")
    from scripts.docs_links import repository

    assert repository(origin) == address


def constants() -> list[str]:
    """Every text that the packages may print, f-strings in parts."""
    texts = []
    for package in ("transfer_queue", "lightning_tq"):
        for path in (ROOT / package).rglob("*.py"):
            for node in ast.walk(ast.parse(path.read_text())):
                if isinstance(node, ast.JoinedStr):
                    parts = [part.value if isinstance(part, ast.Constant) else "\0" for part in node.values]
                    texts.append("".join(map(str, parts)))
                elif isinstance(node, ast.Constant) and isinstance(node.value, str):
                    texts.append(node.value)
    return texts


def test_the_texts_that_operations_explains_are_still_said() -> None:
    page = (ROOT / "docs" / "operations.md").read_text()
    table = page[page.index("## Errors, and what to do") :].split("\n## ")[0]
    fragments = re.findall(r"^\| `([^`]+)` \|", table, re.M)
    said = constants()
    assert len(fragments) > 10
    assert [fragment for fragment in fragments if not any(fragment in text for text in said)] == []
