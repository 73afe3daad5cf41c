"""Types of arrays of the core, conversion of integer arguments, and read-only arrays."""

from __future__ import annotations

from typing import Any, TypeVar

import numpy as np
from numpy.typing import ArrayLike, NDArray

Floats = NDArray[np.float64]
Ints = NDArray[np.int64]
Bools = NDArray[np.bool_]
Words = NDArray[np.uint64]
A = TypeVar("A", bound=NDArray[Any])


def integers(name: str, value: ArrayLike) -> Ints:
    """A fresh one-dimensional int64 array, or a ValueError that names the field."""
    array = np.array(value)
    if array.ndim != 1 or (array.size and array.dtype.kind not in "iu"):
        raise ValueError(f"{name}: {array.dtype} of shape {array.shape}; give a one-dimensional sequence of integers")
    return array.astype(np.int64)


def read_only(array: A) -> A:
    """The same array, which can no longer be written to."""
    array.flags.writeable = False
    return array
