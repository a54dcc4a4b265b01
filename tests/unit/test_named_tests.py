"""Tests that are named outside their files are there: a renamed one would be left out, or break a command."""

from __future__ import annotations

import ast
import importlib.util
import os
import re
import shlex
import shutil
import subprocess
import sys
from pathlib import Path
from types import ModuleType

import pytest

from tests.conftest import QUICK

ROOT = Path(__file__).parents[2]


def _of_mutation(name: str) -> ModuleType:
    """A module of tests/mutation, which is a script's folder and no package."""
    spec = importlib.util.spec_from_file_location(name, ROOT / f"tests/mutation/{name}.py")
    module = importlib.util.module_from_spec(spec)
    sys.modules[name] = module  # dataclasses look their module up
    spec.loader.exec_module(module)
    return module


def _targets() -> dict[str, list[str]]:
    return _of_mutation("targets").TESTS


def _smoke() -> list[str]:
    """Return the tests that ``make smoke`` runs."""
    own = {name: value for name, value in os.environ.items() if not name.startswith(("MAKE", "MFLAGS"))}
    done = subprocess.run(
        ["make", "-n", "smoke"], capture_output=True, text=True, cwd=ROOT, env=own, timeout=60
    )
    return [word for word in shlex.split(done.stdout.splitlines()[-1]) if word.startswith("tests/")]


def _defined_in(file: Path) -> set[str]:
    """Functions, classes and methods of a test file, as node ids call them."""
    names = set()
    for node in ast.parse(file.read_text()).body:
        if isinstance(node, (ast.FunctionDef, ast.ClassDef)):
            names.add(node.name)
        if isinstance(node, ast.ClassDef):
            names |= {f"{node.name}::{own.name}" for own in node.body if isinstance(own, ast.FunctionDef)}
    return names


def _exists(nodeid: str) -> bool:
    """The file, in it the function or class, and its parameter: a key of a table, or a model of the zoo."""
    path, _, name = nodeid.partition("::")
    name, _, parameter = name.removesuffix("]").partition("[")
    if not (ROOT / path).is_file() or (name and name not in _defined_in(ROOT / path)):
        return False
    sources = "".join(file.read_text() for file in (ROOT / path, ROOT / "tests/zoo.py"))
    return not parameter or bool(re.search(rf'"{parameter}":|def {parameter}\(', sources))


@pytest.mark.parametrize("module", _targets())
def test_mutated_modules_and_their_tests_exist(module):
    missing = [path for path in (module, *_targets()[module]) if not (ROOT / path).is_file()]
    assert not missing
    assert _targets()[module]


@pytest.mark.parametrize("nodeid", QUICK)
def test_quick_tests_exist(nodeid):
    assert _exists(nodeid)


@pytest.mark.skipif(shutil.which("make") is None, reason="needs make")
def test_smoke_tests_exist():
    named = _smoke()
    assert len(named) > 10
    assert [nodeid for nodeid in named if not _exists(nodeid)] == []


@pytest.mark.parametrize(
    "nodeid",
    [
        "tests/graph/test_none.py",
        "tests/graph/test_bit_equal.py::test_none",
        "tests/graph/test_bit_equal.py::test_models[none]",
        "tests/graph/test_xla.py::TestHlo::test_none",
    ],
)
def test_what_is_not_there_is_noticed(nodeid):
    assert not _exists(nodeid)


def test_copies_for_mutants_hold_all_of_the_packages(tmp_path):
    """Beside the packages there is what is not copied; within them folders may have the same names."""
    for folder in ("tf_ooo/plan/shared", "tf_ooo/out", "shared", "out", ".git", ".venv-2.15"):
        (tmp_path / "tree" / folder).mkdir(parents=True)
        (tmp_path / "tree" / folder / "a.py").write_text("")
    _of_mutation("forks").copy_tree(tmp_path / "tree", tmp_path / "copy")
    copied = sorted(path.relative_to(tmp_path / "copy").parent for path in (tmp_path / "copy").rglob("a.py"))
    assert copied == [Path("tf_ooo/out"), Path("tf_ooo/plan/shared")]
