# SPDX-License-Identifier: Apache-2.0
"""What ``lightning-tq records`` shows of odd names and values."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path

import pytest
import torch

from lightning_tq import TQDataModule
from tests.console import lightning_tq
from tests.lightning.conftest import stream


def test_samples_are_shown_whatever_their_tags_are_named(
    tmp_path: Path, data: Callable[..., TQDataModule], capsys: pytest.CaptureFixture[str]
) -> None:
    client = data(train=stream()).client
    client.register_task("learn", dp_size=1)
    client.register_task("copy", follows="learn")
    tags = {"rank": 100, "partition": "other", "[/b]": float("nan")}
    client.put({"x": torch.zeros(1, 2), "text": ["a"]}, partition_id="train", tags=[tags])
    client.get_meta(["x", "text"], 1, "train", task_name="learn", sampling_config={"dp_rank": 0, "batch_index": 0})
    client.save_batches(tmp_path / "record" / "000000", "copy")
    assert lightning_tq(["records", str(tmp_path / "record"), "--step", "0", "--json"]) == 0
    shown = json.loads(capsys.readouterr().out)
    assert {name: shown[name] for name in ("rank", "partition", "rank (own)", "partition (own)", "[/b]")} == {
        "rank": 0, "partition": "train", "rank (own)": 100, "partition (own)": "other", "[/b]": None,
    }  # fmt: skip
    assert lightning_tq(["records", str(tmp_path / "record"), "--step", "0"]) == 0
    assert "[/b]" in capsys.readouterr().out


def test_what_a_terminal_would_obey_is_shown_as_text(
    tmp_path: Path, data: Callable[..., TQDataModule], capsys: pytest.CaptureFixture[str]
) -> None:
    client = data(train=stream()).client
    client.register_task("copy", follows="learn")
    client.put({"text": ["\x1b[31mé\r\n"]}, partition_id="train")
    client.get_meta(["text"], 1, "train", task_name="learn", sampling_config={"dp_rank": 0, "batch_index": 0})
    client.save_batches(tmp_path / "record" / "000000", "copy")
    assert lightning_tq(["records", str(tmp_path / "record"), "--step", "0"]) == 0
    assert r"�[31mé�\n" in capsys.readouterr().out
