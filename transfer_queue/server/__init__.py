# SPDX-License-Identifier: Apache-2.0
"""The server: one process that hosts a controller, a storage unit, or both."""
