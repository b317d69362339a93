# SPDX-License-Identifier: Apache-2.0
"""Loggers of this package, at the level of TQ_LOGGING_LEVEL."""

from __future__ import annotations

import logging

from transfer_queue.config import environment_text


def get_logger(name: str, default_level: str = "WARNING") -> logging.Logger:
    """A logger at the level of TQ_LOGGING_LEVEL, else ``default_level``. It logs to stderr if there is no other
    handler.
    """
    logger = logging.getLogger(name)
    logger.setLevel(environment_text("TQ_LOGGING_LEVEL", default_level).upper())
    if not logger.handlers and not logging.getLogger().handlers:
        handler = logging.StreamHandler()
        handler.setFormatter(logging.Formatter("%(asctime)s %(levelname)s %(name)s: %(message)s"))
        logger.addHandler(handler)
        logger.propagate = False
    return logger
