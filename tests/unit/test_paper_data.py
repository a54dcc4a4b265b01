"""The data sets of examples/paper: shapes, rules, and what is used where a package is missing."""

from __future__ import annotations

import builtins
import re
import sys
import types
from pathlib import Path

import numpy as np
import pytest

from tf_ooo.bench.shared.scripts import loaded

data = loaded(str(Path(__file__).parents[2] / "examples/paper/paper_data.py"))


@pytest.mark.parametrize("source", ["shipped", "generated"])
def test_images(source, capsys):
    if source == "shipped":
        pytest.importorskip("sklearn", reason="scikit-learn is not installed")
    x, y = data.images(source, 2000, 16, 10, seed=3)
    assert x.shape == (2000, 16, 16, 3)
    assert (x.min(), x.max()) == (0, 1)
    assert set(y) == set(range(10))
    again, labels = data.images(source, 2000, 16, 10, seed=3)
    np.testing.assert_array_equal(x, again)
    np.testing.assert_array_equal(y, labels)
    of = ", scikit-learn's digits" if source == "shipped" else ""
    assert f"data: {source}{of}; 2000 images" in capsys.readouterr().out
    # Each pixel of 8 x 8 is a square of 2 x 2.
    np.testing.assert_array_equal(x[:, ::2, ::2], x[:, 1::2, 1::2])


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
    assert restored[:, :19].tolist() == data._texts("generated", 50, 20, 100, 2, "")[:, :19].tolist()
    assert texts.shape == (50, 20)


def test_next_and_last_words():
    texts, following = data.next_words("shipped", 10, 12, 400)
    np.testing.assert_array_equal(texts[:, 1:], following[:, :-1])
    x, y = data.last_words("shipped", 10, 12, 400)
    np.testing.assert_array_equal(x, texts)
    np.testing.assert_array_equal(y, following[:, -1])


def test_frequent_words_have_the_first_numbers():
    (numbers,) = data._numbers([["a", "b", "a", "c", "a", "b"]], vocabulary=7)
    assert numbers.tolist() == [5, 6, 5, data.UNKNOWN, 5, 6]


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
    with pytest.raises(SystemExit, match="pip install tensorflow-datasets"):
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
    """As a data set of tensorflow-datasets."""

    def take(self, count):
        return Rows(self[:count])

    def as_numpy_iterator(self):
        return iter(self)


def test_real_pairs_and_texts(monkeypatch):
    sets = {
        "glue/mrpc": Rows([
            {"sentence1": b"A dog barks here", "sentence2": b"a dog sings loudly", "label": 1, "idx": 0},
            {"sentence1": b"a cat", "sentence2": b"a dog", "label": 0, "idx": 1},
        ]),
        "wiki40b/en": Rows([{"text": b"a b a c " * 20, "wikidata_id": b"Q1"}]),
        "ted_hrlr_translate/ru_to_en": Rows([{"ru": b"x y " * 20, "en": b"a b " * 20}]),
    }  # fmt: skip
    there = types.SimpleNamespace(load=lambda name, split: sets[name])
    monkeypatch.setitem(sys.modules, "tensorflow_datasets", there)
    x, y = data.pairs("real", 8, 11, 50)
    assert set(y) == {0, 1}
    np.testing.assert_array_equal((x == data.PAD).sum(axis=1) > 0, y == 0)
    texts, _ = data.next_words("real", 4, 8, 50)
    assert texts.shape == (4, 8)
    words, following = data.last_words("real", 4, 8, 50)
    np.testing.assert_array_equal(words[:, 0], following)


def test_a_vocabulary_without_words_is_refused():
    with pytest.raises(SystemExit, match="vocabulary=5: the first 5 numbers are no words"):
        data.next_words("generated", 4, 8, 5)
