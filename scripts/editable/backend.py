# SPDX-License-Identifier: Apache-2.0
"""The build backend: setuptools', whose editable installations get ``guard.py``, too."""

# setuptools can put nothing but links into an editable wheel, so what it built is completed here.

from __future__ import annotations

import base64
import hashlib
import zipfile
from pathlib import Path
from typing import Any

from setuptools import build_meta
from setuptools.build_meta import *  # noqa: F403

_GUARD = Path(__file__).with_name("guard.py").read_bytes()
_ADDED = {"lightning_tq_guard.py": _GUARD, "lightning_tq_guard.pth": b"import lightning_tq_guard\n"}


def build_editable(directory: str, config: Any = None, metadata: str | None = None) -> str:
    """Build the wheel of an editable installation (PEP 660). Returns its name."""
    name: str = build_meta.build_editable(directory, config, metadata)
    path = Path(directory, name)
    with zipfile.ZipFile(path) as wheel:
        files = {info: wheel.read(info) for info in wheel.infolist()}
    record = next(info for info in files if info.filename.endswith(".dist-info/RECORD"))
    for added, content in _ADDED.items():
        digest = base64.urlsafe_b64encode(hashlib.sha256(content).digest()).decode().rstrip("=")
        files[record] += f"{added},sha256={digest},{len(content)}\n".encode()
    with zipfile.ZipFile(path, "w", zipfile.ZIP_DEFLATED) as wheel:
        for file, content in {**_ADDED, **files}.items():
            wheel.writestr(file, content)
    return name
