# SPDX-License-Identifier: Apache-2.0
"""A web page that shows a running queue live: a client of the queue, which changes nothing there."""
