# SPDX-License-Identifier: Apache-2.0
"""Starts and ends the queue's server processes."""
