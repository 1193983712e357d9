"""Plain data survives the way through bytes; everything else is refused, on both ends."""

from __future__ import annotations

import pickle
import threading
from typing import Any

import numpy as np
import pytest

from course_utils.launcher import plain


@pytest.mark.parametrize(
    "value",
    [
        None,
        True,
        -(10**30),
        0.1,
        float("inf"),
        "a text with \udcff in it",
        b"\x00\xff",
        [1, [2.0, ("x", None)]],
        {"a": (1,), 2: {"b": [b"c"]}, (1, 2): "tuple keys"},
        (),
        {},
    ],
)
def test_plain_values_come_back_equal_and_of_the_same_type(value: Any) -> None:
    back = plain.decode(plain.encode(value))
    assert back == value
    assert type(back) is type(value)


@pytest.mark.parametrize("dtype", ["float16", "float32", "float64", "int8", "int64", "bool", "complex64", ">i4"])
@pytest.mark.parametrize("shape", [(), (0,), (3,), (2, 0, 3), (4, 5)])
def test_arrays_come_back_whole(dtype: str, shape: tuple[int, ...]) -> None:
    array = np.array(np.arange(np.prod(shape, dtype=int)).reshape(shape) % 2, dtype)
    back = plain.decode(plain.encode({"array": array, "view": array.T}))
    np.testing.assert_array_equal(back["array"], array)
    np.testing.assert_array_equal(back["view"], array.T)
    assert back["array"].dtype == array.dtype
    assert back["array"].flags.writeable


class AlwaysEqual:
    def __eq__(self, other: object) -> bool:
        return True

    __hash__ = object.__hash__


class Sneaky(int):
    pass


@pytest.mark.parametrize(
    "value", [object(), threading.Lock(), AlwaysEqual(), Sneaky(3), {1, 2}, [print], np.array([object()])]
)
def test_anything_else_is_refused_by_its_type(value: Any) -> None:
    with pytest.raises(TypeError, match="not plain data"):
        plain.encode(value)


@pytest.mark.parametrize(
    "data",
    [
        b"",
        b"x",
        pickle.dumps([1, 2]),
        plain.encode([1, 2])[:-1],
        plain.encode(3) + b"more",
        plain.encode(np.ones(3))[:-4],
        plain.encode({"a": np.ones(3)}).replace(b"<f8", b"|O8"),
        plain.encode(np.ones(3)).replace(b"[3]", b"[9]"),
    ],
)
def test_bytes_that_are_no_plain_data_are_refused(data: bytes) -> None:
    with pytest.raises(ValueError, match="no plain data"):
        plain.decode(data)
