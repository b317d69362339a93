# SPDX-License-Identifier: Apache-2.0
"""The controller's decisions, free of sockets, clocks, threads and torch."""
