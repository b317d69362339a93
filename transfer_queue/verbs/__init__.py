# SPDX-License-Identifier: Apache-2.0
"""The client's verbs by noun, each once and as a coroutine; ``transfer_queue.client`` puts them together."""
