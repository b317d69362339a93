# SPDX-License-Identifier: Apache-2.0
"""Ways from a producing process to a reading one: this package, the peer, and what a user would write instead."""
