# SPDX-License-Identifier: Apache-2.0
"""TQCLI: a LightningCLI with a TQDataModule, configured by YAML files and options."""

from __future__ import annotations

import os
import sys
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, NoReturn

from jsonargparse import set_parsing_settings
from lightning.pytorch import LightningModule
from lightning.pytorch.cli import LightningArgumentParser, LightningCLI
from omegaconf import DictConfig, OmegaConf

# Imported so that a configuration can name the callbacks without their module.
from lightning_tq.callbacks import (  # noqa: F401
    partition_switch,
    publish_weights,
    queue_checkpoint,
    queue_monitor,
    staleness_guard,
    write_back,
)
from lightning_tq.cli.error_text import explain, known_keys
from lightning_tq.datamodule import TQDataModule
from lightning_tq.producers.group import ProducerError
from lightning_tq.queue_config import load_mapping
from lightning_tq.rank_watchdog import RankGoneError
from transfer_queue import BatchTimeoutError, ConfigError, ProducersGoneError, QueueUnreachableError
from transfer_queue.errors import InvalidRequestError, LaunchError, SamplerError

_SELF_EXPLANATORY = (
    BatchTimeoutError,
    LaunchError,
    ProducerError,
    ProducersGoneError,
    QueueUnreachableError,
    RankGoneError,
)
"""Errors of a run that need no traceback, because their text is complete."""

_DESCRIPTION = """Train, validate, test or predict with data streamed from a queue, for example "lightning-tq fit
--config run.yaml --trainer.max_epochs 3". "lightning-tq status" shows a running queue, "clients" those
who use it; "evict" and "forget-task" end what holds it up. A configuration has three
sections: trainer, model (class_path and init_args of a LightningModule) and data (streams, queue, producers).
"lightning-tq fit --help" explains all options, "lightning-tq fit --data.train.help" those of a stream,
"--data.queue.help" those of the queue, "--data.producers.help" those of a producer."""


class TQArgumentParser(LightningArgumentParser):
    """Reports a mistake in one or two lines instead of a type-checking report."""

    def error(self, message: str, ex: Exception | None = None) -> NoReturn:
        if not self.exit_on_error:  # the parser only tries one of several types
            super().error(message, ex)
        parser = getattr(ex, "subcommand_parser", None) or self
        text = explain(message, known_keys(parser))
        sys.stderr.write(f"error: {text}\ntip: {parser.prog.replace(' [options]', '')} --help explains every option.\n")
        sys.exit(2)


class TQCLI(LightningCLI):
    """LightningCLI with a TQDataModule, or the subclass that data.class_path of the configuration names."""

    def __init__(self, model_class: type[LightningModule] | None = None, **options: Any) -> None:
        """Args:
        model_class: Class of the model, whose arguments become options ("--model.width"). Default: class_path of the
            configuration.
        options: Options of LightningCLI.
        """
        os.environ.setdefault("JSONARGPARSE_DEPRECATION_WARNINGS", "off")  # LightningCLI's calls, not the user's
        set_parsing_settings(docstring_parse_attribute_docstrings=True)
        given = options.get("args")
        defaults = {
            "model_class": model_class or LightningModule,
            "datamodule_class": TQDataModule,
            "subclass_mode_model": model_class is None,
            "subclass_mode_data": names_a_data_class(sys.argv[1:] if given is None else given),
            "seed_everything_default": 0,  # Lightning's own default, which comes with a warning
            # A second run in the same directory must not fail because of the first one's saved configuration.
            "save_config_kwargs": {"overwrite": True},
            # parser_mode resolves ${...} within a file; it works only here.
            "parser_kwargs": {"parser_mode": "omegaconf", "prog": "lightning-tq", "description": _DESCRIPTION},
        }
        super().__init__(**{**defaults, **options})

    def init_parser(self, **kwargs: Any) -> LightningArgumentParser:
        parser = TQArgumentParser(allow_abbrev=False, **kwargs)
        parser.add_argument("-c", "--config", action="config", help="YAML file. Can be repeated; later files win.")
        return parser

    def instantiate_classes(self) -> None:
        try:
            super().instantiate_classes()
        except (ConfigError, InvalidRequestError) as error:
            self._refuse(error)
        except ValueError as error:
            if not str(error).startswith("Does not validate against"):
                raise  # an error of the model
            self._refuse(error)

    def _refuse(self, error: ValueError) -> NoReturn:
        self._parser(self.subcommand).error(str(error))


def names_a_data_class(args: Sequence[str] | Mapping[str, Any]) -> bool:
    """Whether the command line, its configuration files, or a configuration sets a class for data."""
    if isinstance(args, Mapping):
        return "class_path" in (args.get("data") or {})
    if any(arg.startswith(("--data.class_path", "--data.init_args")) for arg in args):
        return True
    sections = [OmegaConf.select(conf, path) for conf in _configs(args) for path in ("data", "*.data")]
    return any(isinstance(section, DictConfig) and "class_path" in section for section in sections)


def _configs(args: Sequence[str]) -> Iterator[Any]:
    values = {"--data": "data: ", "--config": "", "-c": ""}
    for position, arg in enumerate(args):
        name, _, value = arg.partition("=")
        if name not in values:
            continue
        value = value or "".join(args[position + 1 : position + 2])
        if Path(value).is_file():  # otherwise the parser reports it
            conf = load_mapping(value)
            yield OmegaConf.create({"data": conf}) if name == "--data" else conf


def run(args: Sequence[str] | None) -> int:
    """Run a Trainer's subcommand. Returns the exit code: 0, 1 for a failed run, 2 for a wrong configuration."""
    if args is not None:
        sys.argv = [sys.argv[0], *args]  # ranks in new processes get these arguments
    here = os.getcwd()
    if here not in sys.path and "" not in sys.path:
        sys.path.insert(0, here)  # a configuration may name modules of the current directory
    try:
        cli = TQCLI()
    except (ConfigError, SamplerError) as error:
        sys.stderr.write(f"error: {error}\n")
        return 2
    except _SELF_EXPLANATORY as error:
        sys.stderr.write(f"error: {error}\n")
        return 1
    if isinstance(cli.datamodule, TQDataModule):
        cli.datamodule.close()
    return 0
