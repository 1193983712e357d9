"""MNIST where it can be had without a download: an attached Kaggle data set, or what a library has cached.

Provenance: Y. LeCun, C. Cortes and C. Burges, "The MNIST database of handwritten digits", 1998: 60,000 digits to train
on and 10,000 to test, 28 x 28 pixels. The course carries no copy.
"""

from __future__ import annotations

import gzip
import math
import os
import struct
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any

from .handwritten import Digits, digits

if TYPE_CHECKING:
    from numpy.typing import NDArray

KAGGLE = Path("/kaggle/input")
CACHES = (Path("data/MNIST/raw"), Path("~/data/MNIST/raw"), Path("~/.keras/datasets"))  # torchvision's, Keras's
PARTS = ("train", "test")

_STEMS = {"train": "train", "test": "t10k"}
_KINDS = {"images": (3, 2051), "labels": (1, 2049)}  # dimensions, and the magic number that begins such a file


def mnist_or_digits(part: str = "train") -> Digits:
    """Return MNIST where it can be had (see `mnist`), else the digits that scikit-learn carries; `source` says which.

    Nothing is downloaded. Under COURSE_PLAIN=1, with which notebooks are built and compared, it is always the digits,
    so that outputs do not depend on what a machine has cached. Raises ValueError for an unknown part and for files of
    MNIST that are damaged.

    Example: `print(mnist_or_digits("train"))` says how many digits, of which size, from where.
    """
    if part not in PARTS:
        raise ValueError(f"part must be one of {', '.join(map(repr, PARTS))}, not {part!r}")
    if os.environ.get("COURSE_PLAIN") == "1":
        return digits(part)
    try:
        return mnist(part)
    except FileNotFoundError:
        return digits(part)


def mnist(part: str = "train", folder: str | Path | None = None) -> Digits:
    """Load a part of MNIST from files that are already on this machine.

    `folder`: where to look, with all folders below; without it, below /kaggle/input and where torchvision and Keras
    keep what they have downloaded. Known are the four idx files (also .gz), mnist.npz, mnist_train.csv and
    mnist_test.csv, and the train.csv of Kaggle's "Digit Recognizer", whose first five sixths are then "train" and the
    rest "test", since the competition's own test file has no labels.

    Raises FileNotFoundError where there is none of them, and ValueError for an unknown part or a damaged file.

    Example: `mnist("test", "downloads").images.shape` gives `(10000, 784)`.
    """
    if part not in PARTS:
        raise ValueError(f"part must be one of {', '.join(map(repr, PARTS))}, not {part!r}")
    places = [KAGGLE, *CACHES] if folder is None else [Path(folder)]
    for place in (place.expanduser() for place in places):
        for found in _readings(part, place):
            return found
    looked = ", ".join(str(place) for place in places)
    raise FileNotFoundError(
        f"no MNIST below {looked}. On Kaggle, attach a data set with the four idx files (or mnist_train.csv and "
        "mnist_test.csv) to the notebook; elsewhere give the folder that holds them, mnist(part, folder), or use "
        "digits()."
    )


def _readings(part: str, place: Path) -> Iterator[Digits]:
    """What can be read below a place, the original files first."""
    files = sorted(path for path in place.rglob("*") if path.is_file())
    images, labels = (_idx_file(files, part, kind) for kind in _KINDS)
    if images and labels:
        pixels = read_idx(images, "images")
        yield _checked(
            pixels.reshape(len(pixels), math.prod(pixels.shape[1:])), read_idx(labels, "labels"), part, images
        )
    if archive := _named(files, ["mnist.npz"]):
        yield _from_npz(archive, part)
    if table := _named(files, [f"mnist_{part}.csv"]):
        yield _checked(*_from_csv(table), part, table)
    if table := _named(files, ["train.csv"], below="digit"):
        pixels, names = _from_csv(table)
        cut = len(names) * 5 // 6
        chosen = slice(0, cut) if part == "train" else slice(cut, None)
        yield _checked(pixels[chosen], names[chosen], part, table)


def _idx_file(files: Iterable[Path], part: str, kind: str) -> Path | None:
    dimensions, _ = _KINDS[kind]
    stem = f"{_STEMS[part]}-{kind}"
    names = [f"{stem}{mark}idx{dimensions}-ubyte{end}" for mark in "-." for end in ("", ".gz")]
    return _named(files, names)


def _named(files: Iterable[Path], names: list[str], below: str = "") -> Path | None:
    """The first of the files with one of the names; with `below`, only where a folder above it is called such."""
    fitting = (path for path in files if path.name in names and below in str(path.parent).lower())
    return next(fitting, None)


def read_idx(path: str | Path, kind: str) -> NDArray[Any]:
    """Read one idx file, `kind` "images" (n, rows, columns) or "labels" (n,), as uint8; .gz is unpacked.

    Raises ValueError, with the file's name, where it is not such a file or does not hold what its header says.
    """
    import numpy as np

    path = Path(path)
    dimensions, magic = _KINDS[kind]
    try:
        raw = gzip.decompress(path.read_bytes()) if path.suffix == ".gz" else path.read_bytes()
    except (OSError, EOFError) as error:  # gzip raises both for a file that was cut off
        raise ValueError(f"{path}: cannot be unpacked ({error}); download it anew") from error
    start = 4 * (1 + dimensions)
    if len(raw) < start:
        raise ValueError(f"{path}: {len(raw)} bytes are too few for the header of an idx file; download it anew")
    found, *shape = struct.unpack(f">{1 + dimensions}I", raw[:start])
    if found != magic:
        raise ValueError(f"{path}: begins with {found}, where an idx file of {kind} begins with {magic}")
    wanted = math.prod(shape)
    if len(raw) - start != wanted:
        told = " x ".join(map(str, shape))
        raise ValueError(f"{path}: its header says {told} = {wanted:,} bytes, but {len(raw) - start:,} follow")
    return np.frombuffer(raw, np.uint8, offset=start).reshape(shape)


def _from_npz(path: Path, part: str) -> Digits:
    import numpy as np

    try:
        with np.load(path, allow_pickle=False) as archive:
            pixels, names = archive[f"x_{part}"], archive[f"y_{part}"]
    except (OSError, KeyError, ValueError) as error:
        raise ValueError(f"{path}: is not the mnist.npz that Keras keeps ({error})") from error
    return _checked(pixels.reshape(len(pixels), math.prod(pixels.shape[1:])), names, part, path)


def _from_csv(path: Path) -> tuple[NDArray[Any], NDArray[Any]]:
    """The pixels and the labels, which stand first in each line; a line of names above them is skipped."""
    import numpy as np

    with path.open(encoding="utf-8") as lines:
        titled = not lines.readline().partition(",")[0].strip().isdigit()
    try:
        table = np.loadtxt(path, delimiter=",", skiprows=int(titled), dtype=np.uint8, ndmin=2)
    except (ValueError, OverflowError) as error:
        raise ValueError(f"{path}: not a table of a label and pixels from 0 to 255 ({error})") from error
    return table[:, 1:], table[:, 0]


def _checked(pixels: NDArray[Any], labels: NDArray[Any], part: str, path: Path) -> Digits:
    import numpy as np

    if len(pixels) != len(labels):
        raise ValueError(f"{path}: {len(pixels):,} images, but {len(labels):,} labels beside them")
    if pixels.shape[1:] != (784,):
        raise ValueError(f"{path}: MNIST's images have 28 x 28 = 784 pixels, these have {pixels.shape[1]}")
    if len(labels) and labels.max() > 9:
        raise ValueError(f"{path}: a label of {labels.max()}, where there are 0 to 9")
    images = np.ascontiguousarray(pixels / np.float32(255), dtype=np.float32)
    source = f"MNIST (LeCun, Cortes and Burges, 1998), from {path}"
    return Digits(images=images, labels=np.ascontiguousarray(labels, dtype=np.int64), part=part, source=source)
