# SPDX-License-Identifier: Apache-2.0
"""Checkpoints on disk: how they are laid out, written, and read. What is in them is decided elsewhere."""
