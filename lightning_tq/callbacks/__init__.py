# SPDX-License-Identifier: Apache-2.0
"""Callbacks, one job each."""
