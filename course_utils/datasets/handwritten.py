"""Handwritten digits, 8 x 8 pixels, from the copy that scikit-learn carries: real data without a download.

Provenance: E. Alpaydin and C. Kaynak, "Optical Recognition of Handwritten Digits", UCI Machine Learning Repository,
1998 (https://archive.ics.uci.edu/dataset/80, licence CC BY 4.0). scikit-learn carries that data set's test part: 1,797
digits written by 13 people, scanned at 32 x 32 and reduced to counts of dark pixels in 4 x 4 blocks (0 to 16).
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from numpy.typing import NDArray

SOURCE = (
    "Optical Recognition of Handwritten Digits (Alpaydin and Kaynak, UCI, 1998), the copy that scikit-learn carries"
)
PARTS = {"train": slice(0, 1437), "test": slice(1437, 1797), "all": slice(0, 1797)}


@dataclass(frozen=True)
class Digits:
    """A part of the digits, or of MNIST, as numpy arrays.

    `images` has shape (n, 64), float32, each pixel from 0 (paper) to 1 (ink), row after row of the 8 x 8 picture;
    MNIST's have 28 x 28. `labels` has shape (n,), int64, 0 to 9. `part` is "train", "test" or "all"; `source` says
    which data this is.
    """

    images: NDArray[Any]
    labels: NDArray[Any]
    part: str
    source: str = SOURCE

    def __len__(self) -> int:
        return len(self.labels)

    def __str__(self) -> str:
        side = math.isqrt(self.images.shape[1])
        return f"{len(self):,} handwritten digits of {side} x {side} pixels ({self.part}): {self.source}"

    __repr__ = __str__


def digits(part: str = "train") -> Digits:
    """Load the handwritten digits that scikit-learn carries; nothing is downloaded.

    `part`: "train" (the first 1,437), "test" (the last 360, no digit in both) or "all", in the file's own order. Each
    call returns fresh arrays. Raises ValueError for another part.

    Example: `data = digits("test"); data.images.shape` gives `(360, 64)`.
    """
    if part not in PARTS:
        raise ValueError(f"part must be one of {', '.join(map(repr, PARTS))}, not {part!r}")
    import numpy as np
    from sklearn.datasets import load_digits  # imported here: scikit-learn takes a second

    raw = load_digits()
    chosen = PARTS[part]
    images = np.ascontiguousarray(raw.data[chosen] / 16.0, dtype=np.float32)
    labels = np.ascontiguousarray(raw.target[chosen], dtype=np.int64)
    return Digits(images=images, labels=labels, part=part)
