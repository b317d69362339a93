# SPDX-License-Identifier: Apache-2.0
"""Whose files these are: the distribution TransferQueue has a folder ``transfer_queue``, too, and either overwrites it.

Importing this raises ImportError where files of lightning-tq are replaced or missing.
"""

# TransferQueue's __init__.py may be what runs, and lightning_tq runs this file by its path: the standard library only.

from __future__ import annotations

import sys
from importlib.machinery import ModuleSpec
from pathlib import Path
from typing import Any, NoReturn

_NAME, _OTHER = "lightning-tq", "TransferQueue"
_FOLDER = Path(__file__).parent


def check() -> None:
    """Raise ImportError if another distribution has replaced or deleted files of this one."""
    if not (_FOLDER / "__init__.py").exists():
        refuse(f"{_FOLDER}/__init__.py is missing")
    # Reading RECORD takes 30 ms. Only TransferQueue has a client.py: here it is a folder.
    if (_FOLDER / "client.py").exists() and (changed := changed_files()):
        refuse(f"{len(changed)} files are not those of {_NAME}, such as {_FOLDER.parent / changed[0]}")


def refuse_other(found: ModuleSpec | None) -> NoReturn:
    """Raise ImportError because ``import transfer_queue`` would find this one."""
    check()
    refuse(f"'import transfer_queue' finds {found and found.origin}, which is not that of {_NAME} in {_FOLDER}")


def refuse(problem: str) -> NoReturn:
    text = (
        f"{problem}. The distribution {_OTHER} has a package of the same name, and one overwrites or deletes the "
        "other's files. Run both of these commands (with uv: uv pip ...):\n  " + "\n  ".join(commands())
    )
    if Path(*sys.argv[:1]).stem == _NAME:  # the command, which shows its user no traceback
        sys.exit(f"error: {text}")
    raise ImportError(text)


def commands() -> tuple[str, str]:
    """What mends an environment."""
    import json
    from shlex import quote
    from urllib.parse import unquote

    own = _distribution(_NAME)
    text = None if own is None else own.read_text("direct_url.json")
    said = json.loads(text or "{}")  # PEP 610; there is none after an install from an index
    source, editable = said.get("url", _NAME), said.get("dir_info", {}).get("editable")
    vcs = f"{said['vcs_info']['vcs']}+" if "vcs_info" in said else ""
    source = quote(unquote(source.removeprefix("file://"))) if source.startswith("file://") else vcs + source
    return f"pip uninstall -y {_OTHER}", f"pip install --force-reinstall --no-deps {'-e ' * bool(editable)}{source}"


def changed_files() -> list[str] | None:
    """Files of this installation that are missing, or not what was installed. None: that isn't known, as of a clone."""
    import base64
    import csv
    import hashlib
    from importlib.metadata import distributions

    named = distributions(name=_NAME)  # there may be one more, as of a user beside that of a virtual environment
    own = [each for each in named if Path(str(each.locate_file(_FOLDER.name))).resolve() == _FOLDER.resolve()]
    record = own[0].read_text("RECORD") if own else None
    if record is None:
        return None

    def is_changed(name: str, expected: str) -> bool:
        path = _FOLDER.parent / name
        if not path.exists():
            return True
        digest = base64.urlsafe_b64encode(hashlib.sha256(path.read_bytes()).digest()).decode().rstrip("=")
        return expected != f"sha256={digest}"

    return [name for name, expected, _ in csv.reader(record.splitlines()) if expected and is_changed(name, expected)]


def other_version() -> str | None:
    """The version of the distribution TransferQueue, if it is installed, too."""
    found = _distribution(_OTHER)
    return None if found is None else str(found.version)


def warn_of_other() -> None:
    """Warn if the distribution TransferQueue is installed, too."""
    if (version := other_version()) is not None:
        import warnings

        text = (
            f"{_OTHER} {version} is installed beside {_NAME}, and its package has the same name: at its next upgrade "
            "or uninstall it replaces or deletes files of this one. Run now (with uv: uv pip ...):\n  "
        ) + "\n  ".join(commands())
        warnings.warn(text, stacklevel=3)


def _distribution(name: str) -> Any | None:
    from importlib.metadata import PackageNotFoundError, distribution

    try:
        return distribution(name)
    except PackageNotFoundError:
        return None


if __name__ == "transfer_queue.own_files":  # runpy also changes sys.argv while it runs a file
    check()
