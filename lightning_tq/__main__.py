# SPDX-License-Identifier: Apache-2.0
"""``python -m lightning_tq`` runs the ``lightning-tq`` command."""

from __future__ import annotations

import sys

from lightning_tq.cli import main

if __name__ == "__main__":
    sys.exit(main())
