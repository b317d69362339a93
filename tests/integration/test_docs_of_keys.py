# SPDX-License-Identifier: Apache-2.0
"""The example of docs/keys.md runs as it is printed there."""

from __future__ import annotations

import re
from pathlib import Path

DOCS = Path(__file__).parents[2] / "docs"


def test_the_example_of_the_guide_runs(script):
    (code,) = re.findall(r"```python\n(.*?)```", (DOCS / "keys.md").read_text(), re.DOTALL)
    process = script(code)
    out, errors = process.communicate()
    assert (process.returncode, errors) == (0, "")
    assert "'env': 'math', 'policy_version': 1" in out
