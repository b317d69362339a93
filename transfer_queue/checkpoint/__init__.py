# SPDX-License-Identifier: Apache-2.0
"""Checkpoints on disk: their layout, and how they are written and read. Other packages decide their contents."""
