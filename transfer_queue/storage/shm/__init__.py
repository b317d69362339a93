# SPDX-License-Identifier: Apache-2.0
"""The client side of SimpleStorage, which keeps values in the memory of storage unit processes."""
