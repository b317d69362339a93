# SPDX-License-Identifier: Apache-2.0
"""``lightning-tq status``: what a running queue holds and who waits for what, seen from outside."""
