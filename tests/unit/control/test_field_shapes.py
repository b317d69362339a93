# SPDX-License-Identifier: Apache-2.0
"""Schema of a partition: a field is dense while all rows agree, ragged while ranks do, mixed after that."""

from __future__ import annotations

import numpy as np
import pytest

from transfer_queue.control.rows import RowState, RowTable
from transfer_queue.control.schema import Schema
from transfer_queue.errors import InvalidRequestError
from transfer_queue.protocol import FieldSpec

ROWS = 6


@pytest.fixture
def schema():
    table = RowTable()
    table.append(np.arange(ROWS, dtype=np.int64), RowState.LIVE)
    return Schema(table)


def dense(*shape):
    return FieldSpec("int64", shape)


def ragged(*shapes):
    return FieldSpec("int64", None, is_nested=True, row_shapes=np.array(shapes, dtype="<i4").tobytes())


def record(schema, rows, spec, name="x"):
    schema.check({name: spec}, "p", len(rows))
    schema.record(np.array(rows), {name: spec})


def test_a_field_whose_rows_agree_has_one_shape(schema):
    record(schema, [0, 1], dense(4, 2))
    record(schema, [3], dense(4, 2))
    assert schema.spec("x", np.array([0, 3])) == dense(4, 2)
    assert schema.has("x").tolist() == [True, True, False, True, False, False]


def test_a_dense_field_that_gets_another_length_becomes_ragged_with_a_shape_per_row(schema):
    record(schema, [0, 1], dense(4))
    record(schema, [2], dense(7))
    assert schema.spec("x", np.array([2, 0])) == ragged([7], [4])
    assert schema.spec("x", np.array([1])) == ragged([4])


def test_a_ragged_field_stays_ragged_and_a_rewritten_row_has_its_new_shape(schema):
    record(schema, [0, 1, 2], ragged([1, 8], [3, 8], [0, 8]))
    record(schema, [1], dense(9, 8))
    record(schema, [3], ragged([2, 8]))
    assert schema.spec("x", np.arange(4)) == ragged([1, 8], [9, 8], [0, 8], [2, 8])


def test_a_field_whose_ranks_differ_is_mixed_from_then_on(schema):
    record(schema, [0], dense(4))
    record(schema, [1], dense(4, 4))
    mixed = FieldSpec("int64", None, is_nested=True)
    assert schema.spec("x", np.array([0, 1])) == mixed
    record(schema, [2], dense(4))
    record(schema, [3], ragged([5]))
    assert schema.spec("x", np.array([2, 3])) == mixed


def test_a_ragged_field_that_meets_another_rank_is_mixed(schema):
    record(schema, [0, 1], ragged([4], [5]))
    record(schema, [2, 3], ragged([1, 1], [2, 2]))
    assert schema.spec("x", np.arange(4)) == FieldSpec("int64", None, is_nested=True)


def test_rows_of_unknown_shape_make_a_field_mixed(schema):
    record(schema, [0], dense(4))
    record(schema, [1], FieldSpec("int64", None, is_nested=True))
    assert schema.spec("x", np.array([0])) == FieldSpec("int64", None, is_nested=True)


def test_scalars_and_empty_dimensions_have_shapes_too(schema):
    record(schema, [0, 1], FieldSpec("float32", ()), "scalar")
    record(schema, [0], dense(0))
    record(schema, [1], dense(3))
    assert schema.spec("scalar", np.array([0, 1])) == FieldSpec("float32", ())
    assert schema.spec("x", np.array([0, 1])) == ragged([0], [3])


def test_objects_have_neither_dtype_nor_shape(schema):
    objects = FieldSpec(None, None, is_non_tensor=True)
    record(schema, [0], objects)
    record(schema, [1], objects)
    assert schema.spec("x", np.array([0, 1])) == objects


def test_a_field_that_is_expected_is_a_placeholder_until_it_is_written(schema):
    schema.expect("x")
    schema.expect("x")
    assert (schema.names, schema.written()) == (["x"], [])
    assert schema.spec("x", np.array([0])) == FieldSpec(None, None)
    record(schema, [0], dense(2))
    assert schema.written() == ["x"]


def test_complete_means_every_field_and_an_unknown_one_is_nowhere(schema):
    record(schema, [0, 1], dense(2), "x")
    record(schema, [1, 2], dense(2), "y")
    rows = np.arange(3)
    assert schema.complete(rows, ["x", "y"]).tolist() == [False, True, False]
    assert schema.complete(rows, ["x", "unknown"]).tolist() == [False, False, False]
    assert schema.complete(rows, []).tolist() == [True, True, True]
    assert schema.has("unknown").tolist() == [False] * ROWS
    assert (schema.fields_of(np.array([1])), schema.fields_of(np.array([0, 1]))) == (["x", "y"], ["x"])


@pytest.mark.parametrize(("num_bytes", "rows"), [(12, 0), (12, 2), (13, 1), (4, 2)])
def test_row_shapes_that_do_not_fit_the_rows_are_refused(schema, num_bytes, rows):
    spec = FieldSpec("int64", None, is_nested=True, row_shapes=bytes(num_bytes))
    with pytest.raises(InvalidRequestError, match=f"field 'x' brings {num_bytes} bytes of row shapes for {rows} rows"):
        schema.check({"x": spec}, "p", rows)
