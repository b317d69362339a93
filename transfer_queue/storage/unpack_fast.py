# SPDX-License-Identifier: Apache-2.0
"""What ``unpack`` builds in the client, without the checks and dispatch of the public constructors.

Those checks run in Python and take the larger part of a small get. TensorDict also wraps each object in a tensordict:
1.1 ms for 1 024 texts, although nearly all readers only ask for the list. The shortcuts use private attributes of torch
and TensorDict. Each one is therefore compared once with the public way, which is used wherever the two differ.
"""

from __future__ import annotations

import contextlib
import functools
import logging
import pickle
from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple

import numpy as np
import torch
from tensordict import NonTensorStack, TensorDict
from tensordict.utils import LinkedList

from transfer_queue.storage.wire import IntArray

with contextlib.suppress(ImportError):  # torch imports them with the first jagged tensor: a fork meanwhile would hang
    import torch.nested._internal.ops
    import torch.nested._internal.sdpa

_MOST_EVEN = 4096
"""Offsets of rows of equal length are cached up to this number of rows."""


class _Offsets(NamedTuple):
    """Row boundaries of a jagged tensor, and what torch derives from them."""

    array: IntArray
    tensor: torch.Tensor
    rows: Any
    """The symbolic size for the row lengths. Tensors that share it can be combined."""
    shortest: int
    longest: int


class Jagged:
    """Makes the jagged tensors of one batch.

    Columns with the same row lengths share their offsets. Torch then accepts them together (``log_probs * mask``), and
    the offsets are built once.
    """

    def __init__(self) -> None:
        self._known: list[_Offsets] = []
        self._even: dict[tuple[int, int], _Offsets] = {}

    def __call__(self, values: torch.Tensor, offsets: IntArray, lengths: tuple[int, int] | None = None) -> torch.Tensor:
        """Make a new tensor, not a view; row i is ``values[offsets[i] : offsets[i + 1]]``.

        ``lengths``: of the shortest and the longest row, if known.
        """
        shortest, longest = lengths or _extremes(offsets)
        if shortest == longest and not offsets[0]:
            return self.even(values, len(offsets) - 1, longest)
        known = next((known for known in self._known if np.array_equal(known.array, offsets)), None)
        if known is None:
            known = _offsets(offsets, shortest, longest)
            self._known.append(known)
        return _make_jagged()(values, known)

    def even(self, values: torch.Tensor, count: int, length: int) -> torch.Tensor:
        """The same for ``count`` rows of one length."""
        known = self._even.get((count, length))
        if known is None:  # also kept here: two threads may build the same length at once
            known = self._even[count, length] = (_kept_even if count < _MOST_EVEN else _even)(count, length)
        return _make_jagged()(values, known)


def _extremes(offsets: IntArray) -> tuple[int, int]:
    if len(offsets) == 2:
        return (int(offsets[1] - offsets[0]),) * 2
    sizes = np.diff(offsets)
    return int(sizes.min()), int(sizes.max())


def _offsets(array: IntArray, shortest: int, longest: int) -> _Offsets:
    tensor = torch.from_numpy(array)
    rows = _parts_of_jagged().rows_of(tensor) if _make_jagged() is _short_jagged else None
    return _Offsets(array, tensor, rows, shortest, longest)


def _even(count: int, length: int) -> _Offsets:
    with torch.inference_mode(False):  # otherwise a validation's offsets would be unusable in training
        return _offsets(np.arange(count + 1) * length, length, length)


_kept_even = functools.lru_cache(256)(_even)  # successive batches often have the same shape


def batch(columns: Mapping[str, Any], count: int) -> TensorDict:
    """Make a TensorDict of columns that have ``count`` rows each."""
    return _make_batch()(dict(columns), count)


def _public_batch(columns: dict[str, Any], count: int) -> TensorDict:
    return TensorDict(columns, batch_size=[count])


def _short_batch(columns: Any, count: int) -> TensorDict:
    made: TensorDict = TensorDict._new_unsafe(source=columns, batch_size=torch.Size((count,)))
    return made


@functools.cache
def _make_batch() -> Callable[[dict[str, Any], int], TensorDict]:
    columns = {"x": torch.arange(2)}
    try:
        made, known = _short_batch(columns, 2), _public_batch(columns, 2)
        same = type(made) is type(known) and made.batch_size == known.batch_size and bool((made == known).all())
        same = same and made.device == known.device and made.is_locked == known.is_locked and made.names == known.names
    except (AttributeError, TypeError, RuntimeError):
        same = False
    return _short_batch if same else _public_batch


def _public_jagged(values: torch.Tensor, offsets: _Offsets) -> torch.Tensor:
    # torch 2.6 refuses values that were made in another mode.
    with torch.inference_mode(values.is_inference()):
        # Without the longest length, to_padded_tensor() would pad to the sum of all lengths.
        return torch.nested.nested_tensor_from_jagged(
            values, offsets.tensor, min_seqlen=offsets.shortest, max_seqlen=offsets.longest
        )


def _short_jagged(values: torch.Tensor, offsets: _Offsets) -> torch.Tensor:
    """Make what ``NestedTensor(values, offsets)`` makes, without its dispatch, which is a fifth of a small get."""
    parts, rows, strides = _parts_of_jagged(), offsets.rows, values.stride()
    shape = (len(offsets.array) - 1, rows, *values.shape[1:])
    strides = (rows if strides[0] == 1 else rows * strides[0], *strides)
    # With the policy "sizes", torch reads ``_size`` and ``_strides`` below and never the wrapper's own sizes.
    # The wrapper gets plain sizes, because storing a symbolic one takes as long as everything else here.
    plain = (shape[0], 0, *values.shape[1:]), (0, *strides[1:])
    made: Any = torch.Tensor._make_wrapper_subclass(
        parts.kind, *plain, 0, torch.contiguous_format, values.dtype, torch.jagged, values.device, False, False,
        "sizes", False, True, parts.keys, storage_size=values.untyped_storage().size(),
    )  # fmt: skip
    vars(made).update(
        _size=shape,
        _strides=strides,
        _ragged_idx=1,
        _values=values,
        _offsets=offsets.tensor,
        _lengths=None,
        _metadata_cache={
            "min_seqlen": _length("min", offsets.shortest),
            "max_seqlen": _length("max", offsets.longest),
        },
        _dynamo_propagated_dynamic_indices={1},
    )
    values._dynamo_propagated_dynamic_indices = {0}  # type: ignore[attr-defined]
    jagged_tensor: torch.Tensor = made
    return jagged_tensor


class _PartsOfJagged(NamedTuple):
    kind: type
    keys: Any
    rows_of: Callable[[torch.Tensor], Any]
    """Returns the symbolic size for the row lengths. Equal offsets have the same one."""


@functools.cache
def _parts_of_jagged() -> _PartsOfJagged:
    from torch._C import DispatchKey, DispatchKeySet
    from torch.nested._internal.nested_tensor import NestedTensor, get_tensor_symint

    keys = DispatchKeySet(DispatchKey.NestedTensor).add(DispatchKey.AutogradNestedTensor)
    return _PartsOfJagged(NestedTensor, keys, get_tensor_symint)


@functools.lru_cache(1024)
def _length(which: str, length: int) -> torch.Tensor:
    """Torch stores the shortest and longest length as the size of an empty tensor."""
    with torch.inference_mode(False):  # otherwise a validation's tensors would be unusable in training
        kept = torch.zeros(length, 0, device="cpu")
    torch._dynamo.mark_dynamic(kept, 0)
    return kept


@functools.cache
def _make_jagged() -> Callable[[torch.Tensor, _Offsets], torch.Tensor]:
    # torch 2.13 logs a line for its own developers on the first call; users can't act on it.
    logger = logging.getLogger("torch.fx._symbolic_trace")
    level = logger.level
    logger.setLevel(logging.ERROR)
    try:
        with torch.inference_mode(False), torch.device("cpu"):  # independent of the caller's modes
            same = _short_is_public()
    except (ImportError, AttributeError, KeyError, TypeError, RuntimeError):
        same = False
    finally:
        logger.setLevel(level)
    return _short_jagged if same else _public_jagged


def _short_is_public() -> bool:
    """Return whether the shortcut makes what the public way makes."""
    edges = np.array([0, 1, 3])
    first, second = (torch.from_numpy(edges.copy()) for _ in range(2))
    known: Any = _public_jagged(torch.arange(6).view(3, 2), _Offsets(edges, first, None, 1, 2))
    rows = _parts_of_jagged().rows_of(second)
    made: Any = _short_jagged(torch.arange(6).view(3, 2), _Offsets(edges, second, rows, 1, 2))
    lengths = [vars(tensor._metadata_cache["max_seqlen"]) for tensor in (made, known)]
    return (
        type(made) is type(known)
        and made.layout == known.layout
        and made.stride()[1:] == known.stride()[1:]
        and (made.dim(), made.numel(), made.shape[2:]) == (known.dim(), known.numel(), known.shape[2:])
        and (made.is_contiguous(), made.storage_offset()) == (known.is_contiguous(), known.storage_offset())
        and made.requires_grad == known.requires_grad
        and torch._C._dispatch_keys(made) == torch._C._dispatch_keys(known)
        and vars(made).keys() == vars(known).keys()
        and vars(made._values).keys() == vars(known._values).keys()
        and lengths[0] == lengths[1]
        and bool((made.to_padded_tensor(0) == known.to_padded_tensor(0)).all())
        and bool((made.sum(1) == known.sum(1)).all())
        and made._max_seqlen == known._max_seqlen == 2
    )


class _UnmadeStack(NonTensorStack):
    """A ``NonTensorStack`` without members yet. It becomes a plain one as soon as they are needed."""

    _objects: list[Any]

    def __new__(cls, *members: Any, **options: Any) -> NonTensorStack:
        return NonTensorStack(*members, **options)  # TensorDict derives plain stacks from a column

    def __getattr__(self, name: str) -> Any:
        if name != "tensordicts":
            return object.__getattribute__(self, name)  # raises the usual AttributeError
        # Two threads may get here at once: both make the same members, and one result is kept.
        members = self.__dict__.setdefault(name, NonTensorStack(*self._objects).tensordicts)
        self.__class__ = NonTensorStack
        return members

    def tolist(self, *, as_linked_list: bool = False, **options: Any) -> list[Any]:
        return LinkedList(self._objects, td=self) if as_linked_list else list(self._objects)

    def __reduce__(self) -> Any:
        return _unmade, (self._objects,)


def object_column(values: Sequence[Any]) -> NonTensorStack:
    """``NonTensorStack(*values)`` for values that are not tensordicts."""
    return _unmade(list(values)) if values and _may_wait() else NonTensorStack(*values)


def _unmade(values: list[Any]) -> NonTensorStack:
    column: Any = NonTensorStack.__new__(_UnmadeStack)
    column._objects = values
    column._is_locked = None
    column._batch_size = torch.Size((len(values),))
    column.stack_dim = 0
    column._hook_in = column._hook_out = None
    return column  # type: ignore[no-any-return]


@functools.cache
def _may_wait() -> bool:
    """Return whether this TensorDict builds its stacks as expected here. Its internals are not public API."""
    values = ["a", 1]
    try:
        known, made = NonTensorStack(*values), _unmade(values)
        same = made.tolist() == known.tolist() and pickle.loads(pickle.dumps(made)).tolist() == values
        same = same and type(made) is _UnmadeStack and len(made) == 2 and made.device == known.device
        held = TensorDict({"x": made}, [2])
        same = same and held["x"] == values and held[1]["x"] == 1 and type(made) is NonTensorStack
        return same and vars(made).keys() - {"_objects"} == vars(known).keys()
    except (AttributeError, TypeError, RuntimeError):
        return False
