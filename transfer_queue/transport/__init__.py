# SPDX-License-Identifier: Apache-2.0
"""Moves bytes, in client and server. The only package that uses sockets."""
