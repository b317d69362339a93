# SPDX-License-Identifier: Apache-2.0
"""Seams of other trainers: each file is about one of them, needs it installed, and is imported by name only."""
