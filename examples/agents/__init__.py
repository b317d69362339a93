# SPDX-License-Identifier: Apache-2.0
"""An agent learns a game of several turns, from episodes that dying workers leave to others."""
