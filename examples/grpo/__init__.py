# SPDX-License-Identifier: Apache-2.0
"""GRPO on verifiable arithmetic tasks: rollouts, rewards and training share a live queue."""

from __future__ import annotations
