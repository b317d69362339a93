# SPDX-License-Identifier: Apache-2.0
"""One file, one question, one JSON line."""
