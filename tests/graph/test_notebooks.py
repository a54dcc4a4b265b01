"""The notebooks run, and say what their texts promise."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

nbclient = pytest.importorskip("nbclient", reason="nbclient is not installed")
pytest.importorskip("ipykernel", reason="ipykernel is not installed")
pytest.importorskip("sklearn", reason="scikit-learn is not installed")

pytestmark = [pytest.mark.alone, pytest.mark.takes(30)]

ROOT = Path(__file__).parents[2]
NOTEBOOKS = ROOT / "examples" / "notebooks"
SAID = {
    "first_line": ("the stock step runs", "times as fast as 1F1B, with the same bits"),
    "planner": ("zb_v   ",),
}


@pytest.mark.parametrize("name", SAID)
def test_notebook(name, tmp_path, monkeypatch):
    import nbformat

    monkeypatch.setenv("PYTHONPATH", os.pathsep.join(filter(None, (str(ROOT), os.environ.get("PYTHONPATH")))))
    notebook = nbformat.read(NOTEBOOKS / f"{name}.ipynb", as_version=4)
    resources = {"metadata": {"path": str(tmp_path)}}
    nbclient.NotebookClient(notebook, timeout=800, kernel_name="python3", resources=resources).execute()
    said = str([cell.get("outputs") for cell in notebook.cells])
    assert [text for text in SAID[name] if text not in said] == []


def test_every_notebook_is_run():
    assert {path.stem for path in NOTEBOOKS.glob("*.ipynb")} == SAID.keys()
