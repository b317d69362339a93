# SPDX-License-Identifier: Apache-2.0
"""Imported only where transfer_queue/__init__.py is missing, as after an uninstall of TransferQueue."""

import runpy
from pathlib import Path

# It raises ImportError, with the commands that mend this. A folder without __init__.py could be imported, and be empty.
runpy.run_path(str(Path(__file__).with_suffix("") / "own_files.py"))["check"]()
