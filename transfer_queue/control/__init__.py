# SPDX-License-Identifier: Apache-2.0
"""The controller's decisions, without sockets, clocks, threads or torch."""
