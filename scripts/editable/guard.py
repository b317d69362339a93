# SPDX-License-Identifier: Apache-2.0
"""Of an editable installation of lightning-tq: refuses the package of TransferQueue, which Python would find first.

Every start of Python runs this, so it imports nothing that setuptools' own finder hasn't.
"""

import sys
from importlib.machinery import PathFinder
from importlib.util import find_spec
from pathlib import Path


class Guard:
    @staticmethod
    def find_spec(name, path=None, target=None):
        """Finds nothing. Raises ImportError where the next finder would find a transfer_queue of others."""
        if name != "transfer_queue":
            return
        found = PathFinder.find_spec(name)
        if found is None or found.origin is None or Path(found.origin).with_name("own_files.py").exists():
            return
        own = find_spec("lightning_tq")
        if own is not None and own.origin is not None:
            import runpy

            runpy.run_path(str(Path(own.origin).parents[1] / name / "own_files.py"))["refuse_other"](found)


sys.meta_path.insert(0, Guard)
