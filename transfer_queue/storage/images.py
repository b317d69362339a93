# SPDX-License-Identifier: Apache-2.0
"""PIL images as plain data, in the client: mode, size, raw pixels, a palette with its transparency; not compressed."""

from __future__ import annotations

import sys
from typing import Any

from transfer_queue.errors import ProtocolError, UnsupportedValueError

_PIXELS_PER_BYTE = 8
"""Of the most compact mode: one bit per pixel."""


def is_image(value: Any) -> bool:
    """Without PIL loaded, no value is an image."""
    pil = sys.modules.get("PIL.Image")
    return pil is not None and isinstance(value, pil.Image)


def image_parts(image: Any) -> list[Any]:
    """What ``image_of`` takes. A file that was opened is read now."""
    pixels = image.tobytes()
    palette = None if image.palette is None else [image.palette.mode, bytes(image.palette.palette)]
    transparency = image.info.get("transparency")
    if not isinstance(transparency, (int, bytes)):
        transparency = list(transparency) if isinstance(transparency, tuple) else None
    return [image.mode, list(image.size), pixels, palette, transparency]


def image_of(
    mode: str, size: list[int], pixels: bytes, palette: list[Any] | None = None, transparency: Any = None
) -> Any:
    """The image.

    Raises:
        UnsupportedValueError: this process has no Pillow.
        ProtocolError: the pixels don't fit.
    """
    try:
        from PIL import Image
    except ImportError as error:
        raise UnsupportedValueError("a value is an image, and this process has no Pillow: install it.") from error
    try:
        width, height = size
        if width * height > len(pixels) * _PIXELS_PER_BYTE:
            raise ValueError(f"{len(pixels)} bytes for {width} x {height} pixels")
        image = Image.frombytes(mode, (width, height), pixels)
        if palette is not None:
            image.putpalette(bytes(palette[1]), palette[0])
    except (ValueError, TypeError, IndexError, KeyError) as error:
        raise ProtocolError(f"a stored image can't be read: {error}") from error
    if transparency is not None:
        image.info["transparency"] = tuple(transparency) if isinstance(transparency, list) else transparency
    return image
