# SPDX-License-Identifier: Apache-2.0
"""The main job: GRPO on verifiable arithmetic tasks, with rollouts, rewards and training joined by a live queue."""

from __future__ import annotations
