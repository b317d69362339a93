# SPDX-License-Identifier: Apache-2.0
"""Every code block of the documentation runs: Python as a program, YAML as a run, shell lines up to their options."""

from __future__ import annotations

import importlib.util
import re
import shlex
import sys
from pathlib import Path
from typing import NamedTuple

import pytest

from tests.console import lightning_tq
from tests.own_processes import SLOW
from tests.warm_python import run_python

pytestmark = pytest.mark.timeout(300)

ROOT = Path(__file__).resolve().parents[2]
PAGES = sorted([*(ROOT / "docs").rglob("*.md"), ROOT / "README.md", *(ROOT / "examples").rglob("README.md")])
NEEDS = {"ray.md": "ray", "metrics.md": "prometheus_client", "huggingface.md": "transformers"}
"""A package that a page is about, and that need not be installed."""
_BLOCK = re.compile(r"^(?P<indent> *)```(?P<language>\w+)?[^\n]*\n(?P<code>.*?)^(?P=indent)```$", re.M | re.S)
_HIDDEN = re.compile(r"<!-- (?P<language>python|yaml)\n(?P<code>.*?)-->", re.S)
"""Code that a page's blocks need and readers don't: a comment."""
_KNOWN = {"python", "yaml", "sh", "text", "json", "toml", None}


class Block(NamedTuple):
    at: int
    language: str | None
    code: str


def blocks(page: Path) -> list[Block]:
    """Not those that only show a file of the repository, which has its own tests."""
    text = page.read_text()
    found = [Block(match.start(), match["language"], match["code"]) for match in _BLOCK.finditer(text)]
    found += [Block(match.start(), match["language"], match["code"]) for match in _HIDDEN.finditer(text)]
    return sorted(block for block in found if not block.code.startswith("--8<--"))


def of(language: str) -> list[Path]:
    return [page for page in PAGES if any(block.language == language for block in blocks(page))]


def name(page: Path) -> str:
    return str(page.relative_to(ROOT))


_TITLED = re.compile(r'^ *```python title="(examples/[^"]+)"\n(.*?)^ *```$', re.M | re.S)


@pytest.mark.parametrize("page", PAGES, ids=name)
def test_a_block_that_names_an_example_shows_that_file(page: Path) -> None:
    for path, code in _TITLED.findall(page.read_text()):
        assert (ROOT / path).read_text().endswith(code), f"{path} differs from its block"


def run(directory: Path, *words: str) -> str:
    """What ``python WORDS...`` prints there. It must succeed."""
    environment = {
        "PYTHONPATH": str(ROOT),
        "PATH": f"{Path(sys.executable).parent}:/usr/bin:/bin",
        "HOME": str(directory),
        "HF_HUB_OFFLINE": "1",
    }
    done = run_python(*words, cwd=directory, env=environment, timeout=280 * SLOW)
    assert done.returncode == 0, f"{shlex.join(words)}\n{done.stdout}\n{done.stderr}"
    return done.stdout + done.stderr


@pytest.mark.parametrize("page", PAGES, ids=name)
def test_every_block_names_a_language_that_is_tried(page: Path) -> None:
    assert {block.language for block in blocks(page)} <= _KNOWN


@pytest.mark.programs
@pytest.mark.parametrize("page", of("python"), ids=name)
def test_the_python_blocks_of_a_page_are_a_program(page: Path, tmp_path: Path) -> None:
    needed = NEEDS.get(page.name)
    if needed is not None and importlib.util.find_spec(needed) is None:
        pytest.skip(f"{needed} is not installed")
    program = tmp_path / f"{page.stem.lower()}_page.py"
    program.write_text("\n".join(block.code for block in blocks(page) if block.language == "python"))
    run(tmp_path, str(program))


@pytest.mark.programs
@pytest.mark.parametrize("page", of("yaml"), ids=name)
def test_the_yaml_blocks_of_a_page_are_runs(page: Path, tmp_path: Path) -> None:
    for number, block in enumerate(block for block in blocks(page) if block.language == "yaml"):
        path = tmp_path / f"block{number}.yaml"
        path.write_text(block.code)
        said = run(tmp_path, "-m", "lightning_tq", "fit", "--config", str(path))
        assert "left over" not in said, "a run that is shown should train all of its samples"


def commands() -> list[tuple[str, str]]:
    """Each line of a shell block that calls a program of this project."""
    found = []
    for page in PAGES:
        for block in blocks(page):
            lines = block.code.replace("\\\n", " ").splitlines() if block.language == "sh" else []
            for line in lines:
                for part in line.split("#")[0].split("&&"):
                    part = part.strip()
                    if not part.startswith(("pip ", "git ")) and ("lightning-tq " in part or "python -m " in part):
                        found.append((name(page), part))
    return found


@pytest.mark.parametrize(("page", "line"), sorted(set(commands())))
def test_a_shell_line_names_a_program_and_options_that_exist(
    page: str, line: str, capsys: pytest.CaptureFixture[str]
) -> None:
    words = shlex.split(line)
    words = words[next(at for at, word in enumerate(words) if word in ("lightning-tq", "python")) :]
    for word in words:
        made_by_new = word == "DIR/run.yaml"
        assert not word.endswith(".yaml") or made_by_new or (ROOT / word).is_file(), f"{page}: no file {word}"
    if words[0] == "python":
        assert importlib.util.find_spec(words[2]) is not None, f"{page}: no module {words[2]}"
        return
    with pytest.raises(SystemExit, match="0"):
        lightning_tq([words[1], "--help"])
    shown = capsys.readouterr().out
    # Options of a model are those of the class that the configuration names.
    options = [word.split("=")[0] for word in words if word.startswith("--") and not word.startswith("--model.")]
    assert [option for option in options if option not in shown] == [], f"{page}: {line}"
