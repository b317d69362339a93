# SPDX-License-Identifier: Apache-2.0
"""Did the fits keep their promises? The model that comes out was trained on each sample once. Pure."""

from __future__ import annotations

from collections.abc import Sequence

from tests.chaos.judgement import errors, named
from tests.chaos.ledger import Record
from tests.chaos.plan import Plan


def check(plan: Plan, records: Sequence[Record]) -> list[str]:
    """What went wrong, in sentences; empty if nothing did."""
    found = list(errors(records, plan.disk_nbytes is not None))
    models = [record.what for record in records if record.event == "model"]
    if not models:
        return [*found, "no fit came to its end"]
    return found + named("samples were not trained exactly once by the model that came out", models[-1]["wrong"])
