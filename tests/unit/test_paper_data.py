"""The data sets of examples/paper: shapes, rules, and what is used where a package is missing."""

from __future__ import annotations

import builtins
import importlib.util
import re
import sys
import types

import keras
import numpy as np
import pytest
import tensorflow as tf

from benchmarks.models import loaded

data = loaded("paper_data")
needs_datasets = pytest.mark.skipif(
    importlib.util.find_spec("tensorflow_datasets") is None, reason="tensorflow-datasets is not installed"
)


def assert_standardized(x):
    assert x.dtype == np.float32
    np.testing.assert_allclose(x.mean((0, 1, 2), "float64"), 0, atol=1e-5)
    np.testing.assert_allclose(x.std((0, 1, 2), "float64"), 1, rtol=1e-5)


@pytest.mark.parametrize("source", ["shipped", "generated"])
def test_images(source, capsys):
    if source == "shipped":
        pytest.importorskip("sklearn", reason="scikit-learn is not installed")
    x, y = data.images(source, 2000, 16, 10, seed=3)
    assert x.shape == (2000, 16, 16, 3)
    assert_standardized(x)
    assert y.dtype == np.int32
    assert set(y) == set(range(10))
    again, labels = data.images(source, 2000, 16, 10, seed=3)
    np.testing.assert_array_equal(x, again)
    np.testing.assert_array_equal(y, labels)
    of = ", scikit-learn's digits" if source == "shipped" else ""
    assert f"data: {source}{of}; 2000 images" in capsys.readouterr().out
    # Each pixel of 8 x 8 is a square of 2 x 2.
    np.testing.assert_array_equal(x[:, ::2, ::2], x[:, 1::2, 1::2])


def test_a_channel_that_is_always_the_same_is_zero():
    images = np.full((2, 4, 4, 3), 7, "uint8")
    images[0, ..., 1] = 9
    x = data._standardized(images)
    assert x[..., [0, 2]].tolist() == np.zeros((2, 4, 4, 2)).tolist()
    assert x[:, 0, 0, 1].tolist() == [1, -1]


@pytest.mark.parametrize("source", ["shipped", "generated"])
@pytest.mark.parametrize("length", [16, 17])
def test_pairs(source, length):
    x, y = data.pairs(source, 200, length, 300, seed=1)
    assert x.shape == (200, length)
    half = (length - 3) // 2
    assert (x[:, 0] == data.CLS).all()
    assert (x[:, 1 + half] == data.SEP).all()
    assert (x[:, 2 + 2 * half] == data.SEP).all()
    assert set(y) == {0, 1}
    assert x.max() < 300
    assert (x.dtype, y.dtype) == (np.int32, np.int32)
    if source == "generated":  # a sentence that follows begins with what its rule says, nine times of ten
        expected = 5 + (7 * x[:, half] + 3) % 295
        follows = x[:, 2 + half] == expected
        assert follows[y == 1].mean() > 0.8
        assert follows[y == 0].mean() < 0.2


def test_hidden_words_are_the_texts():
    x, y = data.hidden_words("generated", 50, 20, 100, 4, seed=2)
    assert (x == data.MASK).sum(axis=1).tolist() == [4] * 50
    assert y.shape == (50, 4)
    assert (y >= 5).all()
    texts, _ = data.next_words("generated", 50, 20, 100, seed=2)
    restored = x.copy()
    restored[x == data.MASK] = y.reshape(-1)
    assert (
        restored[:, :19].tolist() == data._texts("generated", 50, 20, 100, 2, data._ARTICLES)[:, :19].tolist()
    )
    assert texts.shape == (50, 20)


def test_next_and_last_words():
    texts, following = data.next_words("shipped", 10, 12, 400)
    np.testing.assert_array_equal(texts[:, 1:], following[:, :-1])
    x, y = data.last_words("shipped", 10, 12, 400)
    np.testing.assert_array_equal(x, texts)
    np.testing.assert_array_equal(y, following[:, -1])


def test_frequent_words_have_the_first_numbers():
    texts = ["A b, a", "", "(c!)", "a... B"]
    of_two_words = data._numbers(texts, vocabulary=7)
    assert [words.tolist() for words in of_two_words] == [[5, 6, 5], [], [data.UNKNOWN], [5, 6]]
    of_many_words = data._numbers(texts, vocabulary=100)
    assert [words.tolist() for words in of_many_words] == [[5, 6, 5], [], [7], [5, 6]]


def test_auto_without_the_package_is_generated(monkeypatch, capsys):
    imported = builtins.__import__

    def without(name, *arguments, **more):
        if name == "sklearn":
            raise ModuleNotFoundError(name)
        return imported(name, *arguments, **more)

    monkeypatch.setattr(builtins, "__import__", without)
    data.images("auto", 4, 8, 10)
    assert "data: generated; 4 images" in capsys.readouterr().out


def test_digits_without_their_package(monkeypatch):
    monkeypatch.setitem(sys.modules, "sklearn.datasets", None)
    with pytest.raises(SystemExit, match=r"pip install 'tf_ooo\[digits\]'; or --data generated"):
        data.images("shipped", 4, 8, 10)


def test_real_data_without_their_package(monkeypatch):
    monkeypatch.setitem(sys.modules, "tensorflow_datasets", None)
    with pytest.raises(SystemExit, match=r"pip install 'tf_ooo\[datasets\]'"):
        data.next_words("real", 4, 8, 100)


def test_what_cannot_be_loaded_is_told_in_one_line(monkeypatch):
    def load(name, split):
        raise AssertionError(f"Manual directory of {name} does not exist.\nCreate it and download")

    monkeypatch.setitem(sys.modules, "tensorflow_datasets", types.SimpleNamespace(load=load))
    said = (
        "imagenet2012 cannot be loaded: Manual directory of imagenet2012 does not exist.; --data shipped or"
    )
    with pytest.raises(SystemExit, match=re.escape(said)):
        data.images("real", 4, 64, 10)


class Rows(list):
    """Stands for a data set of tensorflow-datasets."""

    def take(self, count):
        return Rows(self[:count])

    def as_numpy_iterator(self):
        return iter(self)


def test_words_of_real_pairs_and_texts(monkeypatch):
    sets = {
        "glue/mrpc": Rows([
            {"sentence1": b"A dog barks here", "sentence2": b"a dog sings loudly", "label": 1, "idx": 0},
            {"sentence1": b"a cat", "sentence2": b"a dog", "label": 0, "idx": 1},
        ]),
        "wiki40b/en": Rows([
            {"text": b"\n_START_ARTICLE_\na\n_START_PARAGRAPH_\nb_NEWLINE_a " * 20, "wikidata_id": b"Q1"}
        ]),
        "ted_hrlr_translate/ru_to_en": Rows([{"ru": b"x y " * 20, "en": b"a b " * 20}]),
    }  # fmt: skip
    there = types.SimpleNamespace(load=lambda name, split: sets[name])
    monkeypatch.setitem(sys.modules, "tensorflow_datasets", there)
    x, y = data.pairs("real", 8, 11, 50)
    assert set(y) == {0, 1}
    np.testing.assert_array_equal((x == data.PAD).sum(axis=1), np.where(y == 1, 0, 4))
    a, dog = 5, 6
    assert (x[:, 6:8] == [a, dog]).all()
    # Neither marks of articles nor identifiers nor the other language have numbers.
    texts, _ = data.next_words("real", 4, 8, 50)
    assert texts.shape == (4, 8)
    assert set(texts.ravel()) == {5, 6}
    words, following = data.last_words("real", 4, 8, 50)
    assert set(words.ravel()) == {5, 6}
    np.testing.assert_array_equal(words[:, 0], following)


@needs_datasets
@pytest.mark.parametrize(
    ("function", "arguments", "of_x", "of_y", "said"),
    [
        (data.pairs, (8, 16, 50), (8, 16), (8,), "MRPC; 8 pairs"),
        (data.next_words, (4, 8, 50), (4, 8), (4, 8), "wiki40b/en; 4 texts"),
        (data.hidden_words, (4, 8, 50, 2), (4, 8), (4, 2), "wiki40b/en; 4 texts"),
        (data.last_words, (4, 8, 50), (4, 8), (4,), "ted_hrlr_translate/ru_to_en; 4 texts"),
        (data.images, (6, 64, 1000), (6, 64, 64, 3), (6,), "ImageNet; 6 images"),
    ],
)
def test_sets_of_tensorflow_datasets(capsys, function, arguments, of_x, of_y, said):
    """Their own features, with random rows."""
    import tensorflow_datasets as tfds

    with tfds.testing.mock_data(num_examples=30):
        x, y = function("real", *arguments, seed=1)
        again, labels = function("real", *arguments, seed=1)
    assert (x.shape, y.shape, y.dtype) == (of_x, of_y, np.int32)
    np.testing.assert_array_equal(x, again)
    np.testing.assert_array_equal(y, labels)
    assert f"data: real, {said}" in capsys.readouterr().out
    if function == data.images:
        assert_standardized(x)
    else:
        assert x.dtype == np.int32
        assert x.max() < 50
        assert len(np.unique(x)) > 8


def test_imagenets_images_are_cut_from_the_middle(monkeypatch):
    wide = np.zeros((1, 64, 200, 3), "uint8")
    wide[:, 4:60, 72:128] = 100
    rows = tf.data.Dataset.from_tensor_slices({"image": wide, "label": [7]})
    monkeypatch.setattr(data, "_load", lambda name: rows)
    for pixels in (56, 33, 224):
        x, y = data._imagenet(3, pixels)
        assert (x.shape, y.tolist()) == ((1, pixels, pixels, 3), [7])
        np.testing.assert_allclose(x, 100, rtol=1e-6)


def test_cifar100_is_cropped_and_mirrored(monkeypatch):
    random = np.random.default_rng(0)
    x = random.integers(0, 256, (50_000, 32, 32, 3), "uint8")
    y = random.integers(0, 100, (50_000, 1))
    monkeypatch.setattr(keras.datasets.cifar100, "load_data", lambda: ((x, y), (x[:1], y[:1])))
    images, labels = data.images("real", 40, 32, 100, seed=1)
    assert (images.shape, labels.shape, labels.dtype) == ((40, 32, 32, 3), (40,), np.int32)
    assert_standardized(images)
    np.testing.assert_array_equal(images, data.images("real", 40, 32, 100, seed=1)[0])
    assert data.images("real", 5, 16, 10)[0].shape == (5, 16, 16, 3)


def test_crops_are_windows_of_the_padded_image():
    image = np.arange(1, 6 * 6 * 3 + 1).reshape(6, 6, 3)
    padded = np.pad(image, ((4, 4), (4, 4), (0, 0)))
    windows = [padded[row : row + 6, column : column + 6] for row in range(9) for column in range(9)]
    numbers = {window.tobytes(): number for number, window in enumerate(windows)}
    mirrored = {window[:, ::-1].tobytes(): number for number, window in enumerate(windows)}
    crops = data._cropped_and_flipped(np.stack([image] * 1000), np.random.default_rng(0))
    as_they_were = [crop.tobytes() in numbers for crop in crops]
    assert 0.4 < np.mean(as_they_were) < 0.6
    assert {(numbers | mirrored)[crop.tobytes()] for crop in crops} == set(range(81))


def test_a_vocabulary_without_words_is_refused():
    with pytest.raises(SystemExit, match="vocabulary=5: the first 5 numbers are no words"):
        data.next_words("generated", 4, 8, 5)
