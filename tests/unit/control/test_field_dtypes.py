# SPDX-License-Identifier: Apache-2.0
"""Samples of one field may have different dtypes; a field that is declared takes one."""

from __future__ import annotations

import msgspec
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from transfer_queue.control.rows import RowState, RowTable
from transfer_queue.control.saved import SavedField
from transfer_queue.control.schema import Schema
from transfer_queue.errors import InvalidRequestError, SchemaConflictError
from transfer_queue.protocol import DeclaredField, FieldSpec

ROWS = 6
INT, FLOAT = FieldSpec("int64", (4,)), FieldSpec("float32", (4,))
OBJECTS = FieldSpec(None, None, is_non_tensor=True)


def ragged(*shapes: list[int]) -> FieldSpec:
    return FieldSpec("int64", None, is_nested=True, row_shapes=np.array(shapes, dtype="<i4").tobytes())


def make_schema() -> Schema:
    table = RowTable()
    table.append(np.arange(ROWS, dtype=np.int64), RowState.LIVE)
    return Schema(table)


@pytest.fixture
def schema() -> Schema:
    return make_schema()


def record(schema: Schema, rows: list[int], spec: FieldSpec, name: str = "x") -> None:
    schema.check({name: spec}, "p", len(rows))
    schema.record(np.array(rows), {name: spec})


def dtypes_of(schema: Schema, rows: list[int]) -> list[str | None]:
    spec = schema.spec("x", np.array(rows))
    return [spec.dtypes[at] for at in spec.row_dtypes] if spec.row_dtypes is not None else [spec.dtype] * len(rows)


def columns(schema: Schema) -> set[str]:
    return {name for name in schema._table._columns if name.startswith(("dtypes:", "shapes:"))}


# ---- several dtypes ----


def test_rows_of_one_dtype_are_described_as_before_and_rows_of_several_one_by_one(schema):
    record(schema, [0, 1], INT)
    record(schema, [2], FLOAT)
    both = ["int64", "float32"]
    assert schema.spec("x", np.array([0, 1])) == FieldSpec("int64", (4,), dtypes=both)
    assert schema.spec("x", np.array([2])) == FieldSpec("float32", (4,), dtypes=both)
    assert schema.spec("x", np.array([2, 0])) == FieldSpec("float32", (4,), dtypes=both, row_dtypes=b"\x01\x00")


def test_rows_of_objects_and_of_tensors_are_told_apart(schema):
    record(schema, [0], OBJECTS)
    record(schema, [1, 2], INT)
    assert schema.spec("x", np.array([0])) == FieldSpec(None, None, is_non_tensor=True, dtypes=[None, "int64"])
    spec = schema.spec("x", np.array([1, 2]))
    assert (spec.dtype, spec.is_non_tensor) == ("int64", False)
    assert np.frombuffer(spec.row_shapes, "<i4").tolist() == [4, 4]
    assert dtypes_of(schema, [2, 0]) == ["int64", None]


def test_a_row_that_is_written_again_has_its_new_dtype(schema):
    record(schema, [0, 1, 2], INT)
    record(schema, [1], FLOAT)
    record(schema, [0], FLOAT)
    assert dtypes_of(schema, [0, 1, 2]) == ["float32", "float32", "int64"]


@pytest.mark.parametrize("gone", ["dead", "written again"])
def test_a_field_is_of_one_dtype_again_where_no_other_sample_has_the_old_one(schema, gone):
    record(schema, [0, 1], ragged([1], [2]))
    if gone == "dead":
        schema._table.mark_dead(np.array([0, 1]))
    record(schema, [2] if gone == "dead" else [1, 0], FLOAT)
    assert schema.spec("x", np.array([2] if gone == "dead" else [0, 1])) == FLOAT
    assert columns(schema) == set()


def test_a_field_of_one_dtype_takes_no_memory_per_row_for_it(schema):
    record(schema, [0, 1], INT)
    record(schema, [2, 3], INT)
    assert columns(schema) == set()
    record(schema, [4], FLOAT)
    assert columns(schema) == {"dtypes:x"}


def test_a_write_is_told_which_of_its_fields_have_several_dtypes(schema):
    record(schema, [0], INT)
    record(schema, [0], INT, "y")
    assert schema.dtypes_with({"x": INT, "new": INT}) == {}
    assert schema.dtypes_with({"x": FLOAT, "y": INT}) == {"x": ["int64", "float32"]}
    record(schema, [1], FLOAT)
    assert schema.dtypes_with({"x": FLOAT}) == {"x": ["int64", "float32"]}


def test_the_number_of_dtypes_of_a_field_is_bounded(schema):
    record(schema, [5], INT)
    for number in range(63):
        record(schema, [number % 5], FieldSpec(f"dtype{number}", (4,)))
    with pytest.raises(InvalidRequestError, match="has 64 dtypes already"):
        schema.check({"x": FLOAT}, "p")
    record(schema, [1], INT)


WRITES = st.lists(
    st.tuples(
        st.sets(st.integers(0, ROWS - 1), min_size=1),
        st.sampled_from(["int64", "float32", None]),
        st.integers(1, 2),
    )
)


@given(WRITES)
def test_each_row_has_the_dtype_and_shape_that_it_was_written_with_last_also_after_a_checkpoint(writes):
    schema = make_schema()
    last: dict[int, tuple[str | None, int | None]] = {}
    for rows, dtype, length in writes:
        record(schema, sorted(rows), OBJECTS if dtype is None else FieldSpec(dtype, (length,)))
        last.update(dict.fromkeys(rows, (dtype, None if dtype is None else length)))
    restored = make_schema()
    saved = schema.save(np.arange(ROWS))
    restored.load(msgspec.msgpack.decode(msgspec.msgpack.encode(saved), type=list[SavedField]), 0)
    for each in (schema, restored):
        for row, (dtype, length) in last.items():
            spec = each.spec("x", np.array([row]))
            shape = spec.shape or (spec.row_shapes and tuple(np.frombuffer(spec.row_shapes, "<i4").tolist()))
            assert (spec.dtype, spec.is_non_tensor) == (dtype, dtype is None)
            assert shape == (None if length is None else (length,))
        if last:
            assert dtypes_of(each, sorted(last)) == [last[row][0] for row in sorted(last)]


# ---- declared ----


@pytest.mark.parametrize(
    ("declared", "spec"),
    [
        (DeclaredField("int64"), INT),
        (DeclaredField("int64", (4,)), INT),
        (DeclaredField("int64", (None,)), INT),
        (DeclaredField("int64", ()), FieldSpec("int64", (1,))),
        (DeclaredField("int64", (None, 8)), ragged([1, 8], [3, 8])),
        (DeclaredField(None), OBJECTS),
    ],
)  # fmt: skip
def test_a_write_that_matches_its_declaration_passes(schema, declared, spec):
    schema.declare({"x": declared}, "p")
    schema.check({"x": spec, "other": FLOAT}, "p", 2)


@pytest.mark.parametrize(
    ("declared", "spec", "texts"),
    [
        (DeclaredField("int64"), FLOAT, ["as dtype int64, this put", "brings dtype float32"]),
        (DeclaredField("int64"), OBJECTS, ["brings plain objects"]),
        (DeclaredField(None), INT, ["declared as plain objects", "brings dtype int64"]),
        (DeclaredField("int64", (5,)), INT, ["shape [5]", "shape [4]"]),
        (DeclaredField("int64", (None, None)), INT, ["shape [None, None]", "shape [4]"]),
        (DeclaredField("int64", (None, 8)), ragged([1, 8], [3, 7]), ["not the same for all"]),
        (DeclaredField("int64", (None,)), FieldSpec("int64", None, True), ["not the same for all"]),
    ],
)  # fmt: skip
def test_a_write_that_does_not_match_its_declaration_is_refused_and_both_are_named(schema, declared, spec, texts):
    schema.declare({"x": declared}, "p")
    with pytest.raises(SchemaConflictError) as error:
        schema.check({"new": INT, "x": spec}, "p", 2)
    assert [text for text in ["field 'x'", "'p'", *texts] if text not in str(error.value)] == []
    assert schema.names == ["x"]


def test_a_declaration_comes_before_the_first_put_and_each_time_alike(schema):
    record(schema, [0], INT)
    schema.declare({"x": DeclaredField("int64")}, "p")
    schema.declare({"x": DeclaredField("int64")}, "p")
    for other in (DeclaredField("float32"), DeclaredField("int64", (4,))):
        with pytest.raises(SchemaConflictError, match=r"can't be declared"):
            schema.declare({"y": DeclaredField("int64"), "x": other}, "p")
    assert schema.names == ["x"]


def test_a_declaration_is_saved_and_loaded(schema):
    schema.declare({"x": DeclaredField("int64", (None,)), "later": DeclaredField(None)}, "p")
    record(schema, [0], INT)
    restored = make_schema()
    restored.load(schema.save(np.arange(ROWS)), 0)
    for refused in ({"x": FLOAT}, {"later": INT}):
        with pytest.raises(SchemaConflictError):
            restored.check(refused, "p", 1)
