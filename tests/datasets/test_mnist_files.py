"""MNIST is found where it can be had, read as its files say, and refused in clear words when they are damaged."""

from __future__ import annotations

import gzip
import struct
from pathlib import Path

import numpy as np
import pytest

from course_utils import datasets
from course_utils.datasets import mnist, mnist_files, mnist_or_digits

DRAW = np.random.default_rng(3)
PIXELS = {part: DRAW.integers(0, 256, (count, 28, 28), dtype=np.uint8) for part, count in (("train", 12), ("test", 5))}
LABELS = {part: DRAW.integers(0, 10, len(pixels), dtype=np.uint8) for part, pixels in PIXELS.items()}


def idx(array: np.ndarray) -> bytes:
    """The bytes of an idx file, as LeCun's page describes it."""
    return struct.pack(f">{1 + array.ndim}I", 0x800 + array.ndim, *array.shape) + array.tobytes()


def four_files(folder: Path, mark: str = "-", packed: bool = False, nested: bool = False) -> None:
    for part, stem in (("train", "train"), ("test", "t10k")):
        for kind, array in (("images", PIXELS[part]), ("labels", LABELS[part])):
            name = f"{stem}-{kind}{mark}idx{array.ndim}-ubyte" + (".gz" if packed else "")
            place = folder / name if nested else folder
            place.mkdir(parents=True, exist_ok=True)
            (place / name).write_bytes(gzip.compress(idx(array)) if packed else idx(array))


def tables(folder: Path, header: bool) -> None:
    for part in PIXELS:
        rows = np.column_stack([LABELS[part], PIXELS[part].reshape(-1, 784)])
        titles = ",".join(["label", *(f"{n}x{m}" for n in range(28) for m in range(28))]) if header else ""
        np.savetxt(folder / f"mnist_{part}.csv", rows, fmt="%d", delimiter=",", header=titles, comments="")


def archive(folder: Path) -> None:
    arrays = {f"{axis}_{part}": kind[part] for axis, kind in (("x", PIXELS), ("y", LABELS)) for part in PIXELS}
    np.savez(folder / "mnist.npz", **arrays)


@pytest.fixture
def elsewhere(tmp_path, monkeypatch) -> Path:
    """A machine whose only places for data are below a folder of this test."""
    monkeypatch.setattr(mnist_files, "KAGGLE", tmp_path / "kaggle")
    monkeypatch.setattr(mnist_files, "CACHES", (tmp_path / "keras",))
    monkeypatch.delenv("COURSE_PLAIN", raising=False)
    return tmp_path


@pytest.mark.parametrize(
    "laid_out",
    [
        four_files,
        lambda folder: four_files(folder, mark="."),
        lambda folder: four_files(folder, packed=True),
        lambda folder: four_files(
            folder, nested=True
        ),  # as Kaggle unpacks some data sets: a folder named like its file
        lambda folder: tables(folder, header=True),
        lambda folder: tables(folder, header=False),
        archive,
    ],
    ids=["idx", "with dots", "gz", "nested", "csv", "csv without titles", "npz"],
)
@pytest.mark.parametrize("part", ["train", "test"])
def test_every_layout_gives_the_same_arrays(laid_out, part, tmp_path):
    laid_out(tmp_path)
    data = mnist(part, tmp_path)
    assert np.array_equal(data.images, PIXELS[part].reshape(-1, 784) / np.float32(255))
    assert np.array_equal(data.labels, LABELS[part])
    assert (data.images.dtype, data.labels.dtype) == (np.float32, np.int64)
    assert str(data).startswith(f"{len(PIXELS[part])} handwritten digits of 28 x 28 pixels ({part}): MNIST")


def test_the_digit_recognizers_only_table_with_labels_is_divided_without_overlap(tmp_path):
    folder = tmp_path / "digit-recognizer"
    folder.mkdir()
    rows = np.column_stack([LABELS["train"], PIXELS["train"].reshape(-1, 784)])
    np.savetxt(folder / "train.csv", rows, fmt="%d", delimiter=",", header="label", comments="")
    train, test = mnist("train", tmp_path), mnist("test", tmp_path)
    assert (len(train), len(test)) == (10, 2)
    assert np.array_equal(np.concatenate([train.labels, test.labels]), LABELS["train"])


def test_a_train_csv_of_something_else_is_not_taken_for_mnist(tmp_path):
    (tmp_path / "titanic").mkdir()
    (tmp_path / "titanic" / "train.csv").write_text("Survived,Name\n1,Smith\n", encoding="utf-8")
    with pytest.raises(FileNotFoundError, match="attach a data set"):
        mnist("train", tmp_path)


@pytest.mark.parametrize("place", ["kaggle", "keras"])
def test_the_chooser_takes_mnist_where_it_is(place, elsewhere):
    (elsewhere / place).mkdir()
    four_files(elsewhere / place)
    assert "MNIST" in mnist_or_digits("train").source


def test_the_chooser_falls_back_on_the_digits_and_says_so(elsewhere):
    data = mnist_or_digits("test")
    assert len(data) == 360
    assert "scikit-learn" in data.source
    with pytest.raises(FileNotFoundError, match="no MNIST below"):
        mnist()


def test_a_notebook_that_is_built_or_compared_has_the_digits_on_any_machine(elsewhere, monkeypatch):
    (elsewhere / "kaggle").mkdir()
    four_files(elsewhere / "kaggle")
    monkeypatch.setenv("COURSE_PLAIN", "1")
    assert "scikit-learn" in mnist_or_digits().source


def damage(path: Path, change) -> None:
    path.write_bytes(change(path.read_bytes()))


@pytest.mark.parametrize(
    ("name", "change", "words"),
    [
        ("train-images-idx3-ubyte", lambda raw: b"\0\0\x08\x01" + raw[4:], "begins with 2049.* begins with 2051"),
        ("train-labels-idx1-ubyte", lambda raw: b"<htm" + raw[4:], "begins with .* begins with 2049"),
        ("train-images-idx3-ubyte", lambda raw: raw[:-100], "12 x 28 x 28 = 9,408 bytes, but 9,308 follow"),
        ("train-images-idx3-ubyte", lambda raw: raw[:7], "7 bytes are too few"),
        ("train-labels-idx1-ubyte", lambda raw: b"", "0 bytes are too few"),
        ("train-labels-idx1-ubyte", lambda _: idx(LABELS["test"]), "12 images, but 5 labels"),
        ("train-labels-idx1-ubyte", lambda _: idx(LABELS["train"] + 10), "a label of 1"),
        ("train-images-idx3-ubyte", lambda _: idx(PIXELS["train"][:, :20, :20]), "these have 400"),
    ],
)
def test_a_damaged_file_is_refused_with_its_name_and_never_replaced_by_other_data(name, change, words, elsewhere):
    four_files(elsewhere / "kaggle")
    damage(elsewhere / "kaggle" / name, change)
    for load in (mnist, mnist_or_digits):
        with pytest.raises(ValueError, match=words) as caught:
            load("train")
        assert "idx" in str(caught.value)


def test_a_packed_file_that_was_cut_off_is_refused(tmp_path):
    four_files(tmp_path, packed=True)
    damage(tmp_path / "train-images-idx3-ubyte.gz", lambda raw: raw[: len(raw) // 2])
    with pytest.raises(ValueError, match="cannot be unpacked"):
        mnist("train", tmp_path)


def test_a_table_that_holds_text_is_refused(tmp_path):
    (tmp_path / "mnist_train.csv").write_text("label,a\n3,five\n", encoding="utf-8")
    with pytest.raises(ValueError, match="not a table"):
        mnist("train", tmp_path)


def test_an_archive_of_something_else_is_refused(tmp_path):
    np.savez(tmp_path / "mnist.npz", other=np.zeros(3))
    with pytest.raises(ValueError, match="is not the mnist"):
        mnist("train", tmp_path)


def test_an_unknown_part_is_refused():
    for load in (datasets.mnist, datasets.mnist_or_digits):
        with pytest.raises(ValueError, match="'train', 'test'"):
            load("all")
