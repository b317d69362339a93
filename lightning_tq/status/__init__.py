# SPDX-License-Identifier: Apache-2.0
"""``lightning-tq status``, ``clients``, ``evict`` and ``forget-task``: a running queue from outside."""
