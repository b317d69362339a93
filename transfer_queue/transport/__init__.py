# SPDX-License-Identifier: Apache-2.0
"""Moves bytes. The only package that uses sockets."""
