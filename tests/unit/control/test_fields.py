# SPDX-License-Identifier: Apache-2.0
"""Fields: one shape while all samples agree, else one for each; so with dtypes; a declared field takes one dtype."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from control_kit import ACTOR, ROLLOUT, ask, clear, indexes, load, new_plane, refused, save
from hypothesis import given
from hypothesis import strategies as st

from transfer_queue import protocol as p

ROWS = 6
INT, FLOAT = p.FieldSpec("int64", (4,)), p.FieldSpec("float32", (4,))
OBJECTS = p.FieldSpec(None, None, is_non_tensor=True)
MIXED = p.FieldSpec("int64", None, is_nested=True)


def dense(*shape: int) -> p.FieldSpec:
    return p.FieldSpec("int64", shape)


def ragged(*shapes: list[int]) -> p.FieldSpec:
    return p.FieldSpec("int64", None, is_nested=True, row_shapes=np.array(shapes, dtype="<i4").tobytes())


class Fields:
    """Of six samples, which have none at first."""

    def __init__(self, plane: Any) -> None:
        self.plane = plane
        assert indexes(ask(plane, ROLLOUT, p.Insert, "p", ROWS)) == list(range(ROWS))

    def write(self, samples: list[int], spec: p.FieldSpec, name: str = "x") -> Any:
        """The reply."""
        return ask(self.plane, ROLLOUT, p.Publish, "p", p.pack_indexes(samples), {name: spec})

    def record(self, samples: list[int], spec: p.FieldSpec, name: str = "x") -> None:
        reply = self.write(samples, spec, name)
        assert isinstance(reply, p.Published), reply

    def spec(self, name: str, samples: list[int]) -> p.FieldSpec:
        found: p.FieldSpec = ask(self.plane, ACTOR, p.Describe, "p", [name], p.pack_indexes(samples)).fields[name]
        return found

    def have(self, *names: str) -> list[list[bool]]:
        status = ask(self.plane, ACTOR, p.FieldStatus, "p", list(names))
        return np.frombuffer(status.status, np.uint8).reshape(-1, len(names)).astype(bool).tolist()

    def dtypes(self, samples: list[int]) -> list[str | None]:
        spec = self.spec("x", samples)
        if spec.row_dtypes is None:
            return [spec.dtype] * len(samples)
        return [spec.dtypes[at] for at in spec.row_dtypes]


@pytest.fixture
def fields(plane: Any) -> Fields:
    return Fields(plane)


# ---- shapes ----


def test_a_field_whose_rows_agree_has_one_shape(fields):
    fields.record([0, 1], dense(4, 2))
    fields.record([3], dense(4, 2))
    assert fields.spec("x", [0, 3]) == dense(4, 2)
    assert fields.have("x") == [[True], [True], [False], [True], [False], [False]]


def test_a_dense_field_that_gets_another_length_becomes_ragged_with_a_shape_per_row(fields):
    fields.record([0, 1], dense(4))
    fields.record([2], dense(7))
    assert fields.spec("x", [0, 2]) == ragged([4], [7])
    assert fields.spec("x", [1]) == ragged([4])


def test_a_ragged_field_stays_ragged_and_a_rewritten_row_has_its_new_shape(fields):
    fields.record([0, 1, 2], ragged([1, 8], [3, 8], [0, 8]))
    fields.record([1], dense(9, 8))
    fields.record([3], ragged([2, 8]))
    assert fields.spec("x", [0, 1, 2, 3]) == ragged([1, 8], [9, 8], [0, 8], [2, 8])


def test_a_field_whose_ranks_differ_is_mixed_from_then_on(fields):
    fields.record([0], dense(4))
    fields.record([1], dense(4, 4))
    assert fields.spec("x", [0, 1]) == MIXED
    fields.record([2], dense(4))
    fields.record([3], ragged([5]))
    assert fields.spec("x", [2, 3]) == MIXED


@pytest.mark.parametrize("other", [ragged([1, 1], [2, 2]), MIXED], ids=["another rank", "unknown shapes"])
def test_a_ragged_field_that_meets_rows_of_another_kind_is_mixed(fields, other):
    fields.record([0, 1], ragged([4], [5]))
    fields.record([2, 3], other)
    assert fields.spec("x", [0, 1, 2, 3]) == MIXED


def test_scalars_and_empty_dimensions_have_shapes_too(fields):
    fields.record([0, 1], p.FieldSpec("float32", ()), "scalar")
    fields.record([0], dense(0))
    fields.record([1], dense(3))
    assert fields.spec("scalar", [0, 1]) == p.FieldSpec("float32", ())
    assert fields.spec("x", [0, 1]) == ragged([0], [3])


def test_objects_have_neither_dtype_nor_shape(fields):
    fields.record([0], OBJECTS)
    fields.record([1], OBJECTS)
    assert fields.spec("x", [0, 1]) == OBJECTS


@pytest.mark.parametrize(("num_bytes", "rows"), [(12, 2), (13, 1), (4, 2)])
def test_row_shapes_that_do_not_fit_the_rows_are_refused(fields, num_bytes, rows):
    spec = p.FieldSpec("int64", None, is_nested=True, row_shapes=bytes(num_bytes))
    reply = fields.write(list(range(rows)), spec)
    refused(reply, "InvalidRequestError", f"field 'x' brings {num_bytes} bytes of row shapes for {rows} rows")


# ---- several dtypes ----


def test_rows_of_one_dtype_are_described_as_before_and_rows_of_several_one_by_one(fields):
    fields.record([0, 1], INT)
    fields.record([2], FLOAT)
    both = ["int64", "float32"]
    assert fields.spec("x", [0, 1]) == p.FieldSpec("int64", (4,), dtypes=both)
    assert fields.spec("x", [2]) == p.FieldSpec("float32", (4,), dtypes=both)
    assert fields.spec("x", [0, 2]) == p.FieldSpec("int64", (4,), dtypes=both, row_dtypes=b"\x00\x01")


def test_rows_of_objects_and_of_tensors_are_told_apart(fields):
    fields.record([0], OBJECTS)
    fields.record([1, 2], INT)
    assert fields.spec("x", [0]) == p.FieldSpec(None, None, is_non_tensor=True, dtypes=[None, "int64"])
    spec = fields.spec("x", [1, 2])
    assert (spec.dtype, spec.is_non_tensor) == ("int64", False)
    assert np.frombuffer(spec.row_shapes, "<i4").tolist() == [4, 4]
    assert fields.dtypes([0, 2]) == [None, "int64"]


def test_a_row_that_is_written_again_has_its_new_dtype(fields):
    fields.record([0, 1, 2], INT)
    fields.record([1], FLOAT)
    fields.record([0], FLOAT)
    assert fields.dtypes([0, 1, 2]) == ["float32", "float32", "int64"]


@pytest.mark.parametrize("gone", ["cleared", "written again"])
def test_a_field_is_of_one_dtype_again_where_no_other_sample_has_the_old_one(fields, gone):
    fields.record([0, 1], ragged([1], [2]))
    if gone == "cleared":
        clear(fields.plane, [0, 1])
    fields.record([2] if gone == "cleared" else [0, 1], FLOAT)
    assert fields.spec("x", [2] if gone == "cleared" else [0, 1]) == FLOAT


def test_a_write_is_told_which_of_its_fields_have_several_dtypes(fields):
    fields.record([0], INT)
    fields.record([0], INT, "y")
    told = [
        ask(fields.plane, ROLLOUT, p.CheckFields, "p", p.pack_indexes([1]), specs).value
        for specs in ({"x": INT, "new": INT}, {"x": FLOAT, "y": INT})
    ]
    assert told == [{}, {"x": ["int64", "float32"]}]


def test_the_number_of_dtypes_of_a_field_is_bounded(fields):
    fields.record([5], INT)
    for number in range(63):
        fields.record([number % 5], p.FieldSpec(f"dtype{number}", (4,)))
    refused(fields.write([0], FLOAT), "InvalidRequestError", "has 64 dtypes already")
    fields.record([1], INT)


WRITES = st.lists(
    st.tuples(
        st.sets(st.integers(0, ROWS - 1), min_size=1),
        st.sampled_from(["int64", "float32", None]),
        st.integers(1, 2),
    )
)


@given(WRITES)
def test_each_row_has_the_dtype_and_shape_that_it_was_written_with_last_also_after_a_checkpoint(writes):
    plane, restored = new_plane(), new_plane()
    fields = Fields(plane)
    last: dict[int, tuple[str | None, int | None]] = {}
    for rows, dtype, length in writes:
        fields.record(sorted(rows), OBJECTS if dtype is None else p.FieldSpec(dtype, (length,)))
        last.update(dict.fromkeys(rows, (dtype, None if dtype is None else length)))
    load(restored, save(plane))
    for each in (plane, restored):
        fields.plane = each
        for row, (dtype, length) in last.items():
            spec = fields.spec("x", [row])
            shape = spec.shape or (spec.row_shapes and tuple(np.frombuffer(spec.row_shapes, "<i4").tolist()))
            assert (spec.dtype, spec.is_non_tensor) == (dtype, dtype is None)
            assert shape == (None if length is None else (length,))
        if last:
            assert fields.dtypes(sorted(last)) == [last[row][0] for row in sorted(last)]


# ---- declared ----


def declare(plane: Any, **declared: p.DeclaredField) -> Any:
    return ask(plane, ROLLOUT, p.CreatePartition, "p", None, declared)


@pytest.mark.parametrize(
    ("declared", "spec"),
    [
        (p.DeclaredField("int64"), INT),
        (p.DeclaredField("int64", (4,)), INT),
        (p.DeclaredField("int64", (None,)), INT),
        (p.DeclaredField("int64", ()), dense(1)),
        (p.DeclaredField("int64", (None, 8)), ragged([1, 8], [3, 8])),
        (p.DeclaredField(None), OBJECTS),
    ],
)
def test_a_write_that_matches_its_declaration_passes(fields, declared, spec):
    declare(fields.plane, x=declared)
    fields.record([0, 1], spec)
    fields.record([0, 1], FLOAT, "other")


@pytest.mark.parametrize(
    ("declared", "spec", "texts"),
    [
        (p.DeclaredField("int64"), FLOAT, ["as dtype int64, this put", "brings dtype float32"]),
        (p.DeclaredField("int64"), OBJECTS, ["brings plain objects"]),
        (p.DeclaredField(None), INT, ["declared as plain objects", "brings dtype int64"]),
        (p.DeclaredField("int64", (5,)), INT, ["shape [5]", "shape [4]"]),
        (p.DeclaredField("int64", (None, None)), INT, ["shape [None, None]", "shape [4]"]),
        (p.DeclaredField("int64", (None, 8)), ragged([1, 8], [3, 7]), ["not the same for all"]),
        (p.DeclaredField("int64", (None,)), MIXED, ["not the same for all"]),
    ],
)
def test_a_write_that_does_not_match_its_declaration_is_refused_and_both_are_named(fields, declared, spec, texts):
    declare(fields.plane, x=declared)
    reply = ask(fields.plane, ROLLOUT, p.Publish, "p", p.pack_indexes([0, 1]), {"new": INT, "x": spec})
    refused(reply, "SchemaConflictError", "field 'x'", "'p'", *texts)
    assert fields.have("x") == [[False]] * ROWS
    assert ask(fields.plane, ACTOR, p.GetStats).value["partitions"]["p"]["fields"] == ["x"]


def test_a_declaration_comes_before_the_first_put_and_each_time_alike(fields):
    fields.record([0], INT)
    for _ in range(2):
        assert not isinstance(declare(fields.plane, x=p.DeclaredField("int64")), p.Failed)
    for other in (p.DeclaredField("float32"), p.DeclaredField("int64", (4,))):
        reply = declare(fields.plane, y=p.DeclaredField("int64"), x=other)
        refused(reply, "SchemaConflictError", "can't be declared")
    fields.record([0], FLOAT, "y")


def test_a_declaration_is_saved_and_loaded(fields, make_plane):
    declare(fields.plane, x=p.DeclaredField("int64", (None,)), later=p.DeclaredField(None))
    fields.record([0], INT)
    state, fields.plane = save(fields.plane), make_plane()
    load(fields.plane, state)
    for name, spec in (("x", FLOAT), ("later", INT)):
        refused(fields.write([0], spec, name), "SchemaConflictError")
