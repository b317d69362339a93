# SPDX-License-Identifier: Apache-2.0
"""Helpers without a better home: logging, processes."""
