# SPDX-License-Identifier: Apache-2.0
"""Invalid streams, and streams that contradict each other or their stage, are refused when they are made."""

from __future__ import annotations

import re
from typing import Any

import pytest

import transfer_queue as tq
from lightning_tq import Stream, TQDataModule
from lightning_tq.stream import as_stream
from tests.lightning.conftest import stream
from transfer_queue.errors import InvalidRequestError


@pytest.mark.parametrize(
    ("options", "says"),
    [
        ({"multiprocessing_context": "spawn"}, "multiprocessing_context needs num_workers of at least 1"),
        ({"multiprocessing_context": "thread", "num_workers": 1}, "must be one of 'fork', 'spawn', 'forkserver'"),
    ],
)
def test_the_start_method_of_workers_is_checked_with_the_stream(options: dict[str, Any], says: str) -> None:
    with pytest.raises(InvalidRequestError, match=says):
        stream(**options)


@pytest.mark.parametrize(
    ("options", "says"),
    [
        ({"timeout_s": "5"}, "timeout_s must be a number of seconds above 0 or None, got '5'"),
        ({"sampling_config": 5}, "sampling_config must be a mapping of arguments or None, got 5"),
        ({"replay": "yes"}, "replay must be true or false or None, got 'yes'"),
        ({"replay_from": 5}, "replay_from must be a directory or None, got 5"),
        ({"replay_from": "d", "where": "a == 1"}, "replay_from trains all that was recorded, so where='a == 1' has no"),
        ({"pin_memory": "x"}, "pin_memory must be true or false, got 'x'"),
        ({"prefetch": None}, "prefetch must be true or false, got None"),
        ({"partition": "a{epoch:zz}"}, "partition template 'a{epoch:zz}' is malformed: "),
        ({"partition": "a{epoch:{n}}"}, "partition template 'a{epoch:{n}}' is malformed: 'n'"),
    ],
)
def test_an_option_that_can_mean_nothing_is_refused_by_its_name(options: dict[str, Any], says: str) -> None:
    with pytest.raises(InvalidRequestError, match=re.escape(says)):
        stream(**options)


def test_streams_of_one_task_may_have_equal_samplers_but_not_different_ones() -> None:
    def streams(*sizes: int) -> list[Any]:
        """A separate sampler for each stream, as a configuration file makes them."""
        samplers = [tq.GRPOGroupNSampler(n_samples_per_prompt=size) for size in sizes]
        return [stream(name, sampler=sampler) for name, sampler in zip(("a", "b"), samplers, strict=True)]

    assert TQDataModule(val=streams(2, 2)) is not None
    with pytest.raises(InvalidRequestError, match="two streams of task 'learn' have different samplers"):
        TQDataModule(val=streams(2, 4))


def test_only_training_streams_can_set_replay_to_false() -> None:
    train = stream(replay=False)
    with pytest.raises(InvalidRequestError, match=r"task 'judge': replay=False is for training.*Omit replay"):
        TQDataModule(train=train, val=stream("val", task="judge", replay=False))


def test_a_stream_may_be_a_mapping_of_its_options() -> None:
    options = {"partition": "val", "task": "learn", "fields": ["x"], "batch_size": 4}
    assert as_stream(options, "val") == Stream(**options)
    assert as_stream(made := stream(), "train") is made
    assert TQDataModule(train=stream(), val=[options, stream("other", task="judge")]) is not None


def test_training_and_validation_may_not_take_each_other_s_batches() -> None:
    train, val = stream("data@{epoch}"), stream("data@{epoch}", batch_size=8)
    with pytest.raises(InvalidRequestError, match=r"both read partition 'data@\{epoch\}' as task 'learn'"):
        TQDataModule(train=train, val=[stream("other", task="judge"), val])


@pytest.mark.parametrize(
    "options",
    [
        {"val": stream("data", task="judge")},
        {"val": stream("other")},
        {"test": stream("data"), "predict": stream("data")},
        {"val": stream("data"), "ack": "never"},
        {"train": stream("{stage}"), "val": stream("{stage}")},
    ],
    ids=["another task", "another partition", "other runs", "nothing is acknowledged", "a partition per stage"],
)
def test_streams_that_do_not_meet_in_a_run_may_share_names(options: dict[str, Any]) -> None:
    assert TQDataModule(**{"train": stream("data"), **options}) is not None


@pytest.mark.parametrize(
    ("where", "says"),
    [("env = 'math'", "character 5: expected == to compare"), ("", "character 1"), (7, "where must be a filter")],
)
def test_a_filter_is_checked_with_its_stream(where: Any, says: str) -> None:
    with pytest.raises(InvalidRequestError, match=says):
        stream(where=where)


@pytest.mark.parametrize(
    ("given", "says"),
    [
        ({"task": "learn", "batchsize": 4}, "stream 'train' has no option 'batchsize'; did you mean 'batch_size'"),
        ({"task": "learn", "fields": ["x"]}, "stream 'train' lacks partition, batch_size: got {'task': 'learn'"),
        ({"a": stream(), "b": {}}, r"stream 'train' must be one Stream, got several: 'a', 'b'\. A run trains one"),
        ("train", "stream 'train' must be a Stream or a mapping of its options, got 'train'"),
        (
            {"partition": "p", "task": "learn", "fields": ["x"], "batch_size": 0},
            "batch_size must be an int of at least 1, got 0",
        ),
    ],
)
def test_a_mapping_that_is_no_stream_is_refused(given: Any, says: str) -> None:
    with pytest.raises(InvalidRequestError, match=says):
        TQDataModule(train=given)


def test_the_pattern_of_a_partition_template_matches_every_name_that_it_may_give() -> None:
    numbered = stream(partition="{stage}@{epoch:03d}-{policy_version:>4}")
    assert numbered.pattern("train") == "train@*-*"
    assert numbered.partition_at(epoch=7, global_step=12, stage="train") == "train@007-  12"
