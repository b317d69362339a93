# SPDX-License-Identifier: Apache-2.0
"""Helpers that several packages share: logging, processes, rows, values."""
