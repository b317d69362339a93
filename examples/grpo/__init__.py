# SPDX-License-Identifier: Apache-2.0
"""GRPO on verifiable arithmetic tasks: workers lease tasks from a live queue, and a trainer learns from it."""

from __future__ import annotations
