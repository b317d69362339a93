# SPDX-License-Identifier: Apache-2.0
"""The shape of the code: who may import whom, how long a file may be, what a light import loads."""

from __future__ import annotations

import ast
import re
import subprocess
import sys
from collections import Counter
from collections.abc import Iterator
from pathlib import Path

import pytest

from scripts.price import circles

ROOT = Path(__file__).resolve().parents[1]
PACKAGES = ("transfer_queue", "lightning_tq")
MAX_LINES = 600

# A module may import its own group and every group of a lower rank. The longest prefix names a module's group.
GROUPS = {
    "transfer_queue": ("root", 0),
    "transfer_queue.version": ("root", 0),
    "transfer_queue.own_files": ("root", 0),
    "transfer_queue.errors": ("errors", 1),
    "transfer_queue.utils": ("utils", 2),
    "transfer_queue.protocol": ("protocol", 3),
    "transfer_queue.config": ("config", 3),
    "transfer_queue.metadata": ("metadata", 3),
    "transfer_queue.utils.logging_utils": ("logging", 4),
    "transfer_queue.utils.common": ("logging", 4),
    "transfer_queue.sampler": ("sampler", 4),
    "transfer_queue.calls": ("calls", 4),
    "transfer_queue.diagnosis": ("diagnosis", 4),
    "transfer_queue.finding": ("diagnosis", 4),
    "transfer_queue.environment": ("environment", 4),
    "transfer_queue.control": ("control", 5),
    "transfer_queue.transport": ("transport", 5),
    "transfer_queue.utils.zmq_utils": ("addresses", 6),
    "transfer_queue.storage": ("storage", 7),
    "transfer_queue.checkpoint": ("client", 8),
    "transfer_queue.client": ("client", 8),
    "transfer_queue.server": ("server", 8),
    "transfer_queue.launch": ("launch", 9),
    "transfer_queue.controller": ("launch", 9),
    "transfer_queue.interface": ("interface", 10),
    "transfer_queue.dataloader": ("dataloader", 11),
    "transfer_queue.contrib": ("contrib", 12),
    "lightning_tq": ("lightning_tq", 13),
}
# Files and folders of lightning_tq. Each may import those in lines above its own: annotations and functions count, too.
LIGHTNING_RANKS = """
    checks
    progress prompts queue_room stream topology
    device_copies queue_config queue_report queue_picture rank_watchdog dashboard_process
    batch trainer_compat queue_connection
    loader producers run_members
    wait_hints
    run
    callbacks
    datamodule fabric
    dashboard
    cli
    __main__
"""
SERVER_SIDE = (
    "transfer_queue.server.main",
    "transfer_queue.server.orders",
    "transfer_queue.server.front",
    "transfer_queue.server.janitor",
    "transfer_queue.server.watchdog",
    "transfer_queue.control.plane",
    "transfer_queue.transport.server",
    "transfer_queue.transport.session",
    "transfer_queue.storage.unit.lend",
    "transfer_queue.storage.unit.unit",
    "transfer_queue.storage.shm.shared_memory",
)
HEAVY = ("torch", "tensordict", "lightning", "ray", "pytorch_lightning")
SAME_ROLE = {"__init__.py", "__main__.py", "base.py"}
SHARED_NAMES = {"schema.py"}
"""Names of two files of different folders. No more of these: rename the new one."""
SHARED_CLASSES: set[str] = set()
"""Names of two public classes. No more of these, either."""
FOR_OTHER_HOSTS = ("zmq",)
"""A server of one host has no use for it."""


TEMPLATES = ROOT / "lightning_tq" / "templates"
"""Files that ``lightning-tq new`` copies: a user's, which nothing here imports."""


def python_files() -> list[Path]:
    found = [path for package in PACKAGES for path in sorted((ROOT / package).rglob("*.py"))]
    return [path for path in found if not path.is_relative_to(TEMPLATES)]


def module_name(path: Path) -> str:
    parts = path.relative_to(ROOT).with_suffix("").parts
    return ".".join(parts[:-1] if parts[-1] == "__init__" else parts)


def group_of(module: str) -> tuple[str, int]:
    parts = module.split(".")
    for length in range(len(parts), 0, -1):
        prefix = ".".join(parts[:length])
        if prefix in GROUPS:
            return GROUPS[prefix]
    raise AssertionError(f"{module} has no group")


def imports(tree: ast.AST) -> Iterator[str]:
    """Modules that are imported at run time, wherever in the file; not those for annotations only."""
    for node in ast.iter_child_nodes(tree):
        if isinstance(node, ast.If) and "TYPE_CHECKING" in ast.dump(node.test):
            continue
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom) and node.module and not node.level:
            yield node.module
            package = (ROOT / node.module.replace(".", "/")).is_dir()
            yield from (f"{node.module}.{alias.name}" for alias in node.names if package)
        yield from imports(node)


def is_module(name: str) -> bool:
    path = ROOT / name.replace(".", "/")
    return path.is_dir() or path.with_suffix(".py").exists()


@pytest.mark.parametrize("path", python_files(), ids=lambda path: str(path.relative_to(ROOT)))
def test_imports_point_down(path: Path) -> None:
    module = module_name(path)
    group, rank = group_of(module)
    for name in imports(ast.parse(path.read_text())):
        if name.split(".")[0] not in PACKAGES or not is_module(name) or name == "transfer_queue":
            continue
        other, other_rank = group_of(name)
        assert other == group or other_rank < rank, f"{module} ({group}) may not import {name} ({other})"


def test_parts_of_the_lightning_package_import_lower_ones_only() -> None:
    rank = {part: at for at, line in enumerate(LIGHTNING_RANKS.strip().splitlines()) for part in line.split()}
    for path in [path for path in python_files() if path.is_relative_to(ROOT / "lightning_tq")]:
        part, *_ = [*module_name(path).split(".")[1:], "__init__"]
        for node in ast.walk(ast.parse(path.read_text())):
            if isinstance(node, ast.Import):
                names = [alias.name for alias in node.names]
            elif isinstance(node, ast.ImportFrom):
                assert not node.level, f"{path.name} imports relatively"
                names = [f"{node.module}.{alias.name}" for alias in node.names]
            else:
                continue
            for other in [name.split(".")[1] for name in names if name.startswith("lightning_tq.")]:
                assert other == part or rank[other] < rank[part], f"{module_name(path)} may not import {other}"


@pytest.mark.parametrize("package", PACKAGES)
def test_modules_do_not_import_each_other_in_circles(package: str) -> None:
    assert not circles(package), "break these circles: move what both sides need below them"


@pytest.mark.parametrize("package", ["storage", "transport"])
def test_the_first_line_of_a_file_says_in_which_process_it_runs(package: str) -> None:
    rooms = {"unit": "server", "shm": "client"}
    for path in sorted((ROOT / "transfer_queue" / package).rglob("*.py")):
        first = (ast.get_docstring(ast.parse(path.read_text())) or "").splitlines()[0]
        wanted = rooms.get(path.parent.name, "client|server")
        assert re.search(rf"\b({wanted})s?\b", first), f"{path}: in the client, in the server, or in both?"


def test_the_lightning_package_uses_public_names_only() -> None:
    import transfer_queue

    allowed_modules = {"transfer_queue", "transfer_queue.errors", "transfer_queue.environment"}
    for path in sorted((ROOT / "lightning_tq").rglob("*.py")):
        for node in ast.walk(ast.parse(path.read_text())):
            if isinstance(node, ast.ImportFrom) and (node.module or "").startswith("transfer_queue"):
                assert node.module in allowed_modules, f"{path.name} imports from {node.module}"
                if node.module == "transfer_queue":
                    assert {alias.name for alias in node.names} <= {*transfer_queue.__all__, "errors"}, path.name


def test_no_file_is_longer_than_the_cap() -> None:
    long = {str(path): count for path in python_files() if (count := len(path.read_text().splitlines())) > MAX_LINES}
    assert not long


def test_a_file_name_stands_for_one_thing() -> None:
    count = Counter(path.name for path in python_files())
    assert {name for name in count if count[name] > 1} <= SAME_ROLE | SHARED_NAMES


def test_a_class_name_stands_for_one_thing() -> None:
    nodes = (node for path in python_files() for node in ast.walk(ast.parse(path.read_text())))
    count = Counter(node.name for node in nodes if isinstance(node, ast.ClassDef) and not node.name.startswith("_"))
    assert {name for name in count if count[name] > 1} <= SHARED_CLASSES


def test_every_file_names_its_licence_and_its_noun() -> None:
    for path in python_files():
        text = path.read_text()
        assert text.startswith("# SPDX-License-Identifier: Apache-2.0\n"), path
        assert ast.get_docstring(ast.parse(text)), f"{path} doesn't say what it owns"


def test_every_test_module_has_a_name_of_its_own() -> None:
    names = [path.name for path in sorted((ROOT / "tests").rglob("test_*.py"))]  # pytest imports them by name alone
    assert sorted(set(names)) == sorted(names)


def test_helpers_of_tests_are_found_whatever_folders_pytest_is_given() -> None:
    paths = sorted((ROOT / "tests").rglob("*.py"))
    names = Counter(path.name for path in paths)
    assert {name for name in names if names[name] > 1} == {"conftest.py"}, "folders of tests share one list of modules"
    bare = [path.name for path in paths if "\nfrom conftest import" in path.read_text()]
    assert not bare, "this is the conftest of whichever folder came last: from tests.<folder>.conftest import"


def test_nothing_sleeps() -> None:
    assert not [str(path) for path in python_files() if "time.sleep" in path.read_text()]


def test_decisions_know_no_socket_clock_thread_or_torch() -> None:
    forbidden = {"torch", "tensordict", "zmq", "socket", "time", "threading", "asyncio", "multiprocessing", "os"}
    paths = [
        path for each in ("control", "sampler", "calls") for path in (ROOT / "transfer_queue" / each).rglob("*.py")
    ]
    for path in [
        *sorted(paths),
        ROOT / "transfer_queue" / "diagnosis.py",
        ROOT / "transfer_queue" / "finding.py",
        ROOT / "lightning_tq" / "progress.py",
    ]:
        found = {name.split(".")[0] for name in imports(ast.parse(path.read_text()))} & {*forbidden, "lightning"}
        assert not found, f"{path.name} imports {found}"


def test_tests_begin_with_what_the_readme_installs() -> None:
    """That is the extra "test". A test that needs more imports it itself, and is skipped without."""
    of_developers = {"build", "material", "mkdocs", "mkdocstrings", "mypy", "nbclient", "nbformat", "ruff"}
    tests = {path: imported_first(path) for path in (ROOT / "tests").rglob("*.py")}
    for path, names in tests.items():
        scripts = [ROOT / f"{name.replace('.', '/')}.py" for name in names if name.startswith("scripts.")]
        found = names.union(*(imported_first(script) for script in scripts if script.exists()))
        assert not {name.split(".")[0] for name in found} & of_developers, path


def imported_first(path: Path) -> set[str]:
    """What a module imports before it runs."""
    tree = ast.parse(path.read_text())
    body = [node for node in tree.body if isinstance(node, ast.Import | ast.ImportFrom)]
    return set(imports(ast.Module(body, [])))


def loaded_after(code: str) -> set[str]:
    program = f"{code}\nimport sys; print('\\n'.join(sys.modules))"
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=True, cwd=ROOT)
    return {name.split(".")[0] for name in done.stdout.split()}


@pytest.mark.parametrize("code", ["import transfer_queue", "import transfer_queue; transfer_queue.BatchMeta"])
def test_importing_the_queue_loads_nothing_heavy(code: str) -> None:
    assert not loaded_after(code) & {*HEAVY, "omegaconf", "zmq"}


COMMAND = "import contextlib; from lightning_tq.cli import main\nwith contextlib.suppress(SystemExit): main({})"


@pytest.mark.parametrize(
    "words",
    [
        ["--help"], [], ["--hlep"], ["fti"], ["fit", "--confg", "run.yaml"], ["status", "--wacth"], ["serve", "--help"],
        ["demo", "--help"], ["new", "--help"], ["keys", "--help"],
    ],
    ids=" ".join,
)  # fmt: skip
def test_help_and_mistakes_of_the_command_load_nothing_heavy(words: list[str]) -> None:
    assert not loaded_after(COMMAND.format(words)) & {*HEAVY, "omegaconf", "jsonargparse", "zmq", "numpy"}


def test_servers_load_nothing_heavy() -> None:
    assert not loaded_after(f"import {', '.join(SERVER_SIDE)}") & {*HEAVY, *FOR_OTHER_HOSTS}
