# SPDX-License-Identifier: Apache-2.0
"""The parts of versus_upstream: an environment for the peer, a worker per package, the table and the plot."""
