# SPDX-License-Identifier: Apache-2.0
"""SimpleStorage keeps values in the memory of storage unit processes."""
