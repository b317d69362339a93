# SPDX-License-Identifier: Apache-2.0
"""``lightning-tq status``: shows what a running queue holds and which requests wait, from outside."""
