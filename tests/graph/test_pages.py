"""The Python blocks of the README and of all pages run as they stand, one after the other on each page."""

from __future__ import annotations

from pathlib import Path

import keras
import numpy as np
import pytest
import tensorflow as tf

from tf_ooo.fit import timing

sybil = pytest.importorskip("sybil", reason="sybil is not installed")
pytest.importorskip("sklearn", reason="scikit-learn is not installed")

pytestmark = [pytest.mark.devices(2), pytest.mark.takes(120)]

ROOT = Path(__file__).parents[2]
# So many blocks may be marked as not to be run: they need a GPU, other hosts or ranks, torch.
MOST_SKIPPED = 6


def _pages():
    """Return the pages with Python in them; the log and the design say what was, and what is inside."""
    pages = [ROOT / "README.md", *(ROOT / "docs").glob("*.md"), *(ROOT / "docs" / "details").glob("*.md")]
    return [page for page in sorted(pages) if "```python\n" in page.read_text()]


def _blocks(page):
    from sybil.parsers.markdown import PythonCodeBlockParser, SkipParser

    parsers = [PythonCodeBlockParser(), SkipParser()]
    return sybil.Sybil(parsers, path=str(ROOT), pattern="*.md").parse(page)


def _build():
    """Seven layers, so that two devices have something to share."""
    dense = [keras.layers.Dense(16, "relu") for _ in range(6)]
    return keras.Sequential([keras.Input((4,)), *dense, keras.layers.Dense(1)])


@pytest.fixture
def given():
    """Return what pages take as there: a model that is compiled, and data."""
    model = _build()
    model.compile("sgd", "mse", jit_compile=False)
    x, y = np.ones((320, 4), "float32"), np.ones((320, 1), "float32")
    return {
        "build": _build, "model": model, "x": x, "y": y, "loss_fn": keras.losses.MeanSquaredError(),
        "optimizer": keras.optimizers.SGD(0.1), "data": tf.data.Dataset.from_tensor_slices((x, y)).batch(32),
        "tf": tf, "keras": keras,
    }  # fmt: skip


@pytest.mark.parametrize("page", _pages(), ids=lambda page: str(page.relative_to(ROOT)))
def test_page(page, given, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    document = _blocks(page)
    document.namespace.update(given)
    import tf_ooo

    document.namespace["tf_ooo"] = tf_ooo
    for example in document.examples():
        example.evaluate()


def test_the_verdict_of_the_readme(given, capsys):
    document = _blocks(ROOT / "README.md")
    document.namespace.update(given)
    for example in document.examples():
        example.evaluate()
    said = capsys.readouterr().out
    assert said.count("mode, schedule") == 2
    assert timing.ON_CPU in (ROOT / "docs" / "index.md").read_text()


def test_few_blocks_are_left_out():
    assert sum(page.read_text().count("<!-- skip: next -->") for page in _pages()) <= MOST_SKIPPED
