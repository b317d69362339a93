# SPDX-License-Identifier: Apache-2.0
"""SimpleStorage: values in the memory of storage unit processes."""
