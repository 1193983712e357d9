"""Plain data as bytes and back, without pickle: what an untrusted process sends must not run code here."""

from __future__ import annotations

import json
import struct
import sys
from typing import Any

_LENGTH = struct.Struct("!Q")
_KINDS = "biufc"  # numpy's letters for booleans, integers, floating point and complex numbers


def encode(value: Any) -> bytes:
    """Return `value` as bytes: None, numbers, texts, bytes, numpy arrays, and lists, tuples and dicts of those.

    Raises TypeError, naming the type, for anything else.
    """
    blobs: list[bytes] = []
    tree = json.dumps(_to_tree(value, blobs)).encode()
    return b"".join(_LENGTH.pack(len(part)) + part for part in (tree, *blobs))


def decode(data: bytes) -> Any:
    """Return what `encode` was given. Raises ValueError for bytes that it did not make."""
    parts, position = [], 0
    try:
        while position < len(data):
            (length,) = _LENGTH.unpack_from(data, position)
            position += _LENGTH.size
            if position + length > len(data):
                raise ValueError("it ends too early")
            parts.append(data[position : position + length])
            position += length
        return _from_tree(json.loads(parts[0]), parts[1:])
    except (ValueError, TypeError, KeyError, IndexError, RecursionError, struct.error) as error:
        raise ValueError(f"these bytes are no plain data: {error}") from None


def _to_tree(value: Any, blobs: list[bytes]) -> Any:
    if value is None or type(value) in (bool, int, float, str):
        return value
    if type(value) in (list, tuple):
        return {type(value).__name__: [_to_tree(part, blobs) for part in value]}
    if type(value) is dict:
        return {"dict": [[_to_tree(key, blobs), _to_tree(part, blobs)] for key, part in value.items()]}
    numpy = sys.modules.get("numpy")
    if type(value) is bytes:
        blobs.append(value)
        return {"bytes": len(blobs) - 1}
    if numpy is not None and type(value) is numpy.ndarray and value.dtype.kind in _KINDS:
        blobs.append(numpy.ascontiguousarray(value).tobytes())
        return {"array": len(blobs) - 1, "dtype": value.dtype.str, "shape": list(value.shape)}
    raise TypeError(f"a {type(value).__name__} is not plain data")


def _from_tree(tree: Any, blobs: list[bytes]) -> Any:
    if not isinstance(tree, dict):
        return tree
    kind = next(iter(tree))
    if kind == "list":
        return [_from_tree(part, blobs) for part in tree[kind]]
    if kind == "tuple":
        return tuple(_from_tree(part, blobs) for part in tree[kind])
    if kind == "dict":
        return {_from_tree(key, blobs): _from_tree(part, blobs) for key, part in tree[kind]}
    if kind == "bytes":
        return blobs[tree[kind]]
    if kind == "array":
        import numpy

        dtype = numpy.dtype(tree["dtype"])
        if dtype.kind not in _KINDS:
            raise ValueError(f"an array of {dtype}")
        return numpy.frombuffer(blobs[tree[kind]], dtype).reshape(tree["shape"]).copy()
    raise ValueError(f"an unknown kind of data: {kind!r}")
