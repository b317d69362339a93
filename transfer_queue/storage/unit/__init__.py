# SPDX-License-Identifier: Apache-2.0
"""A storage unit, in the server process: its arena, the blocks that hold values, and what spills to disk."""
