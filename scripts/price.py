# SPDX-License-Identifier: Apache-2.0
"""What do a put and a get cost in files, functions and calls, and what does the code? Each figure beside its goal.

Run ``python -m scripts.price`` from the root. It prints one JSON line, and a table on stderr.

A verb is about one sample of 1 KiB, between a warm client and a warm server: a put, or ``get_meta`` with ``get_data``.
A profiler runs in all threads of this process, the client, and of every process that it starts, the servers. There a
``sitecustomize`` module in a temporary folder on PYTHONPATH installs it. A byte of a shared file says which verb runs.

- **Calls** are the profiler's ``call`` events of one verb: each time that a Python function, generator, coroutine or
  comprehension with a frame of its own is entered or goes on. ``ours`` are those of the two packages, ``all`` include
  torch and the standard library. Both are medians over the rounds, and calls into C are none of them. Python 3.12 gives
  comprehensions no frame, so compare figures of one version.
- **Functions and files** are those of the two packages which most rounds of the verb enter. One that both processes
  enter counts once.
- **Circles** are groups of modules each of which imports all others of its group, at once or by way of the others.
  Imports inside functions and for annotations count. An imported submodule counts itself, and its package does not.
- **Code lines** are neither blank nor comments, docstrings or imports.
- **Internals**: lines of the test files that import a module of the packages other than ``errors``; and in all tests
  the attributes with a leading underscore of anything but ``self`` and ``cls``.
"""

from __future__ import annotations

import argparse
import ast
import json
import mmap
import os
import re
import statistics
import sys
import tempfile
import time
from collections import Counter, defaultdict
from collections.abc import Callable, Collection, Iterable, Iterator
from pathlib import Path
from typing import Any, NamedTuple

ROOT = Path(__file__).resolve().parents[1]
PACKAGES = ("transfer_queue", "lightning_tq")
FOLDER = "PRICE_FOLDER"
WARMUP, ROUNDS = 50, 9
AFTERWARDS_S = 0.05
"""What a server does after its answer, and what needs no answer, belongs to the verb."""
PARTITION, TASK = "price", "price"
MANY_PARAMETERS = 5
VERBS = ("put", "fetch", "get")
Function = tuple[str, str, int]
"""(file below the root, function, its first line)."""
HOOK = """
import sys
sys.path.insert(0, {root!r})
from scripts.price import install
install()
sys.path.remove({root!r})
"""


class Gate(NamedTuple):
    """A figure, and the most that it should be."""

    name: str
    value: int
    goal: int | None = None


# ---- what one verb calls ----


class Profiler:
    """Counts the calls of each phase in shared memory, and writes a line for each function when a phase first calls it.

    There is no exit hook: a process may be killed, and a short write to a file opened for appending is whole.
    """

    def __init__(self, folder: str) -> None:
        with open(os.path.join(folder, "phase"), "r+b") as file:
            self._phase = mmap.mmap(file.fileno(), 1)
        with open(os.path.join(folder, f"{os.getpid()}.counts"), "w+b") as file:
            file.truncate(256 * 2 * 8)
            self._counts = memoryview(mmap.mmap(file.fileno(), 0)).cast("Q")
        self._lines = os.open(os.path.join(folder, f"{os.getpid()}.calls"), os.O_CREAT | os.O_APPEND | os.O_WRONLY)
        self._ours = tuple(str(ROOT / package) + os.sep for package in PACKAGES)
        self._seen: set[tuple[int, Any]] = set()

    def __call__(self, frame: Any, event: str, _: Any) -> None:
        phase = self._phase[0]
        if not phase or event != "call" or frame.f_code.co_filename == __file__:
            return
        code = frame.f_code
        self._counts[2 * phase] += 1
        if not code.co_filename.startswith(self._ours):
            return
        self._counts[2 * phase + 1] += 1
        if (phase, code) not in self._seen:
            self._seen.add((phase, code))
            file = os.path.relpath(code.co_filename, ROOT)
            os.write(self._lines, f"{json.dumps([phase, file, code.co_name, code.co_firstlineno])}\n".encode())


def install() -> None:
    """Profile all threads of this process that begin from now on, and this one."""
    import threading

    profiler = Profiler(os.environ[FOLDER])
    threading.setprofile(profiler)
    sys.setprofile(profiler)


def run_verbs(folder: str) -> None:
    """Runs the verbs by turns, each in a phase of its own: phase 1 is the first put, 2 the first fetch, and so on."""
    import torch
    from tensordict import TensorDict

    import transfer_queue as tq

    with open(os.path.join(folder, "phase"), "r+b") as file:
        phase = mmap.mmap(file.fileno(), 1)
    tq.init()
    client = tq.get_client()
    data = TensorDict({"x": torch.zeros(1, 256)}, batch_size=[1])  # 1 KiB
    calls: list[Callable[[Any], Any]] = [
        lambda _: client.put(data, partition_id=PARTITION),
        lambda _: client.get_meta(["x"], 1, PARTITION, "fetch", TASK),
        lambda meta: client.get_data(meta),
    ]
    for number in range(-WARMUP, ROUNDS):
        result = None
        for place, call in enumerate(calls, start=1):
            phase[0] = number * len(VERBS) + place if number >= 0 else 0
            result = call(result)
            if phase[0]:
                time.sleep(AFTERWARDS_S)
                phase[0] = 0
    tq.close()


class Cost(NamedTuple):
    """Of one verb in one process, or several verbs and processes together."""

    functions: set[Function]
    ours: int
    all: int

    def __add__(self, other: Cost) -> Cost:  # type: ignore[override]
        return Cost(self.functions | other.functions, self.ours + other.ours, self.all + other.all)

    @property
    def files(self) -> set[str]:
        return {file for file, _, _ in self.functions}


def costs(folder: str) -> dict[str, dict[str, Cost]]:
    """Verb -> "client", "server" -> cost."""
    entered: dict[tuple[str, str], Counter[Function]] = defaultdict(Counter)
    counts: dict[tuple[str, str], list[list[int]]] = defaultdict(lambda: [[0] * ROUNDS, [0] * ROUNDS])
    for path in Path(folder).glob("*.calls"):
        process = "client" if path.stem == str(os.getpid()) else "server"
        for line in path.read_text().splitlines():
            phase, *function = json.loads(line)
            entered[VERBS[(phase - 1) % len(VERBS)], process][tuple(function)] += 1
        table = memoryview(path.with_suffix(".counts").read_bytes()).cast("Q")
        for phase in range(1, len(VERBS) * ROUNDS + 1):
            found, rounds = counts[VERBS[(phase - 1) % len(VERBS)], process], (phase - 1) // len(VERBS)
            found[0][rounds] += table[2 * phase + 1]
            found[1][rounds] += table[2 * phase]
    return {
        verb: {
            process: Cost(
                {function for function, rounds in entered[verb, process].items() if rounds > ROUNDS // 2},
                *(round(statistics.median(rounds)) for rounds in counts[verb, process]),
            )
            for process in ("client", "server")
        }
        for verb in VERBS
    }


def measured() -> dict[str, dict[str, Cost]]:
    """Like ``costs``, of a put and of a fetch with its get."""
    with tempfile.TemporaryDirectory() as folder:
        Path(folder, "phase").write_bytes(b"\0")
        Path(folder, "sitecustomize.py").write_text(HOOK.format(root=str(ROOT)))
        os.environ[FOLDER] = folder
        os.environ["PYTHONPATH"] = os.pathsep.join([folder, *filter(None, [os.environ.get("PYTHONPATH")])])
        install()
        run_verbs(folder)
        sys.setprofile(None)
        found = costs(folder)
    both = {process: found["fetch"][process] + found["get"][process] for process in found["get"]}
    return {"put": found["put"], "fetch + get": both}


def gates_of_verbs(found: dict[str, dict[str, Cost]]) -> Iterator[Gate]:
    goals = {"put": (285, 380, 45), "fetch + get": (280, 440, 50)}
    for verb, by_process in found.items():
        both = by_process["client"] + by_process["server"]
        functions, calls, files = goals[verb]
        yield Gate(f"{verb}: functions", len(both.functions), functions)
        yield Gate(f"{verb}: calls, ours", both.ours, calls)
        yield Gate(f"{verb}: files", len(both.files), files)
        yield Gate(f"{verb}: calls, all", both.all)
        for process, cost in by_process.items():
            yield Gate(f"{verb}: functions, {process}", len(cost.functions))
            yield Gate(f"{verb}: calls, ours, {process}", cost.ours)
            yield Gate(f"{verb}: calls, all, {process}", cost.all)
            yield Gate(f"{verb}: files, {process}", len(cost.files))


# ---- what the code is ----


def sources(*folders: str) -> dict[Path, str]:
    return {path: path.read_text() for folder in folders for path in sorted((ROOT / folder).rglob("*.py"))}


def module_name(path: Path) -> str:
    parts = path.relative_to(ROOT).with_suffix("").parts
    return ".".join(parts[:-1] if parts[-1] == "__init__" else parts)


def circles(package: str) -> list[list[str]]:
    """Groups of modules that import each other, sorted."""
    imported = imports_of(package)
    reached = {module: _reached(imported, module) for module in imported}
    groups = {tuple(sorted(other for other in reached[module] if module in reached[other])) for module in reached}
    return sorted(list(group) for group in groups if group)


def imports_of(package: str) -> dict[str, set[str]]:
    """Module -> those of its package that it imports, wherever the import stands."""
    trees = {module_name(path): ast.parse(text) for path, text in sources(package).items()}
    return {module: set(_imported(tree, trees.keys())) for module, tree in trees.items()}


def _imported(tree: ast.AST, modules: Collection[str]) -> Iterator[str]:
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names if alias.name in modules)
        elif isinstance(node, ast.ImportFrom) and node.module in modules:
            names = [f"{node.module}.{alias.name}" for alias in node.names]
            yield from (name if name in modules else node.module for name in names)


def _reached(imported: dict[str, set[str]], start: str) -> set[str]:
    found: set[str] = set()
    left = [*imported[start]]
    while left:
        module = left.pop()
        if module not in found:
            found.add(module)
            left += imported[module]
    return found


def num_code_lines(text: str) -> int:
    left_out: set[int] = set()
    for node in ast.walk(ast.parse(text)):
        if isinstance(node, (ast.Import, ast.ImportFrom)):
            left_out.update(range(node.lineno, (node.end_lineno or 0) + 1))
        for part in getattr(node, "body", ()) if isinstance(node, (ast.Module, ast.ClassDef, *FUNCTIONS)) else ():
            if (
                isinstance(part, ast.Expr)
                and isinstance(part.value, ast.Constant)
                and isinstance(part.value.value, str)
            ):
                left_out.update(range(part.lineno, (part.end_lineno or 0) + 1))
    lines = enumerate(text.splitlines(), 1)
    return sum(bool(line.strip()) and line.lstrip()[0] != "#" and number not in left_out for number, line in lines)


FUNCTIONS = (ast.FunctionDef, ast.AsyncFunctionDef)


def num_functions_with_many_parameters(text: str) -> int:
    functions = [node.args for node in ast.walk(ast.parse(text)) if isinstance(node, FUNCTIONS)]
    named = [[*args.posonlyargs, *args.args, *args.kwonlyargs] for args in functions]
    return sum(sum(one.arg not in {"self", "cls"} for one in args) > MANY_PARAMETERS for args in named)


def imports_internals(text: str) -> bool:
    return re.search(rf"^(from|import) ({'|'.join(PACKAGES)})\.(?!errors)", text, re.MULTILINE) is not None


def num_private_attributes(text: str) -> int:
    attributes = [node for node in ast.walk(ast.parse(text)) if isinstance(node, ast.Attribute)]
    own = [node for node in attributes if isinstance(node.value, ast.Name) and node.value.id in {"self", "cls"}]
    private = [node for node in attributes if node.attr.startswith("_") and not node.attr.startswith("__")]
    return len([node for node in private if node not in own])


def gates_of_code() -> Iterator[Gate]:
    code, tests = sources(*PACKAGES).values(), sources("tests").values()
    yield Gate("circles of imports", sum(len(circles(package)) for package in PACKAGES), 0)
    yield Gate("code lines", sum(map(num_code_lines, code)), 20_800)
    yield Gate(
        f"functions with more than {MANY_PARAMETERS} parameters", sum(map(num_functions_with_many_parameters, code)), 20
    )
    inner = [text for text in tests if imports_internals(text)]
    yield Gate("lines of test files that import internals", sum(len(text.splitlines()) for text in inner), 20_000)
    yield Gate("private attributes of others in tests", sum(map(num_private_attributes, tests)), 200)


# ---- what is printed ----


def print_table(gates: Iterable[Gate]) -> None:
    for name, value, goal in gates:
        verdict = "" if goal is None else f"{goal:>8,}  {'met' if value <= goal else 'open'}"
        print(f"{name:<45}{value:>8,}{verdict}", file=sys.stderr)


def print_files(found: dict[str, dict[str, Cost]]) -> None:
    for verb, by_process in found.items():
        print(f"{verb}:", file=sys.stderr)
        for file in sorted((by_process["client"] + by_process["server"]).files):
            numbers = {name: sum(one[0] == file for one in cost.functions) for name, cost in by_process.items()}
            print(f"  {file}  client {numbers['client']}, server {numbers['server']}", file=sys.stderr)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument(
        "--list", action="store_true", help="name the files on stderr, with the functions called in each"
    )
    args = parser.parse_args()
    found = measured()
    gates = [*gates_of_verbs(found), *gates_of_code()]
    if args.list:
        print_files(found)
    print_table(gates)
    with_goal = {gate.name: {"value": gate.value, "goal": gate.goal} for gate in gates if gate.goal is not None}
    others = {gate.name: gate.value for gate in gates if gate.goal is None}
    print(json.dumps({"question": "what a put, a fetch with its get, and the code cost", "gates": with_goal, **others}))


if __name__ == "__main__":
    main()
