# SPDX-License-Identifier: Apache-2.0
"""A user's YAML file: the keys and values it holds, or what is wrong with it."""

from __future__ import annotations

from pathlib import Path

import yaml  # type: ignore[import-untyped]
from omegaconf import DictConfig, OmegaConf
from omegaconf.errors import OmegaConfBaseException

from transfer_queue.errors import ConfigError


def load_mapping(path: str | Path) -> DictConfig:
    """
    Raises:
        ConfigError: it is no YAML, refers to what isn't there, or its top is a list; names the file.
    """
    try:
        conf = OmegaConf.load(path)
        OmegaConf.to_container(conf, resolve=True)
    except (yaml.YAMLError, OmegaConfBaseException, UnicodeDecodeError, OSError) as error:
        raise ConfigError(f"{path} can't be read as YAML: {' '.join(str(error).split())}.") from error
    if not isinstance(conf, DictConfig):
        raise ConfigError(f"{path} must hold keys and values, its top is a list.")
    return conf
