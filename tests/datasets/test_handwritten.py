"""The digits are the real ones, whole, typed, and say which data they are."""

from __future__ import annotations

import numpy as np
import pytest

from course_utils.datasets import digits


def test_the_whole_set_has_the_size_that_uci_documents_for_its_test_part() -> None:
    data = digits("all")
    assert data.images.shape == (1797, 64)
    assert data.labels.shape == (1797,)
    # counts per digit as listed in the UCI description (optdigits.names, testing)
    assert np.bincount(data.labels).tolist() == [178, 182, 177, 183, 181, 182, 181, 179, 174, 180]


def test_pixels_are_float32_from_zero_to_one_and_labels_are_int64() -> None:
    data = digits("all")
    assert data.images.dtype == np.float32
    assert data.labels.dtype == np.int64
    assert data.images.min() == 0.0
    assert data.images.max() == 1.0


def test_train_and_test_are_the_whole_without_overlap() -> None:
    whole, train, test = digits("all"), digits("train"), digits("test")
    assert (len(train), len(test)) == (1437, 360)
    assert np.array_equal(np.concatenate([train.images, test.images]), whole.images)
    assert np.array_equal(np.concatenate([train.labels, test.labels]), whole.labels)


def test_pixels_equal_those_of_scikit_learn_up_to_the_scale() -> None:
    from sklearn.datasets import load_digits

    assert np.array_equal(digits("all").images * 16, load_digits().data.astype(np.float32))


def test_each_call_gives_arrays_of_its_own() -> None:
    first = digits("test")
    first.images[:] = -1
    assert digits("test").images.min() == 0.0


def test_it_says_which_data_it_is() -> None:
    data = digits("test")
    assert "UCI" in data.source
    assert str(data).startswith("360 handwritten digits of 8 x 8 pixels (test)")


def test_an_unknown_part_is_refused_with_the_known_ones() -> None:
    with pytest.raises(ValueError, match="'train', 'test', 'all'"):
        digits("validation")


def test_importing_the_package_does_not_import_scikit_learn() -> None:
    import subprocess
    import sys

    code = "import sys, course_utils.datasets; print('sklearn' in sys.modules, 'torch' in sys.modules)"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.split() == ["False", "False"]
