# SPDX-License-Identifier: Apache-2.0
"""SamplesView: a batch row by row, and never written through."""

from __future__ import annotations

import pytest
import torch

from transfer_queue import BatchMeta

DENSE = {"dtype": torch.float32, "shape": (4,), "is_nested": False, "is_non_tensor": False}
RAGGED = {"dtype": torch.int64, "shape": None, "is_nested": True, "is_non_tensor": False}


def make(size):
    schema = {"x": DENSE, "ids": {**RAGGED, "per_sample_shapes": [(row,) for row in range(size)]}}
    tags = [{"tag": row} for row in range(size)]
    return BatchMeta(range(10, 10 + size), ["p"] * size, schema, [row % 2 for row in range(size)], custom_meta=tags)


def test_samples_are_light_rows():
    samples = make(3).samples
    row = samples[-1]
    assert (row.global_index, row.partition_id, row.production_status, row.custom_meta) == (12, "p", 0, {"tag": 2})
    assert type(row.production_status) is int
    assert row.fields == {"x": DENSE, "ids": {**RAGGED, "shape": (2,)}}
    assert repr(row) == (
        "SampleView(global_index=12, partition_id='p', production_status=0, "
        "fields=['ids', 'x'], custom_meta={'tag': 2})"
    )


def test_samples_have_a_length_an_index_a_slice_and_an_iterator():
    samples = make(3).samples
    assert len(samples) == 3
    assert [sample.global_index for sample in samples] == [10, 11, 12]
    assert [sample.global_index for sample in samples[1:]] == [11, 12]
    for item in (3, -4):
        with pytest.raises(IndexError, match=f"sample {item}"):
            samples[item]


def test_writing_through_a_sample_raises_type_error():
    row = make(2).samples[1]
    with pytest.raises(TypeError):
        row.fields["new"] = {}
    with pytest.raises(TypeError):
        row.fields["x"]["shape"] = ()
    with pytest.raises(TypeError):
        row.custom_meta["tag"] = 1
    with pytest.raises(TypeError, match="read-only"):
        row.global_index = 1
    with pytest.raises(TypeError, match="read-only"):
        del row.global_index
    with pytest.raises(TypeError):
        make(2).samples[0] = row
