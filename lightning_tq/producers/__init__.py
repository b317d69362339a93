# SPDX-License-Identifier: Apache-2.0
"""Producer processes of a run, and what they use: model weights."""
