"""Tests that are named outside their files are there: a renamed one would be left out, or break a command."""

from __future__ import annotations

import ast
import os
import re
import shlex
import shutil
import subprocess
from pathlib import Path

import pytest

from tests.conftest import QUICK
from tests.last import LAST, left_out
from tests.mutation.targets import TESTS
from tests.skips import ALLOWED

ROOT = Path(__file__).parents[2]


def _smoke() -> list[str]:
    """Return the tests that ``make smoke`` runs."""
    own = {name: value for name, value in os.environ.items() if not name.startswith(("MAKE", "MFLAGS"))}
    done = subprocess.run(
        ["make", "-n", "smoke"], capture_output=True, text=True, cwd=ROOT, env=own, timeout=800
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


@pytest.mark.parametrize("module", TESTS)
def test_mutated_modules_and_their_tests_exist(module):
    named = [nodeid.partition("[")[0] for nodeid in TESTS[module]]
    missing = [nodeid for nodeid in (module, *named) if not _exists(nodeid)]
    assert not missing
    assert TESTS[module]


@pytest.mark.parametrize("nodeid", [*QUICK, *LAST])
def test_quick_tests_and_those_behind_all_others_exist(nodeid):
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


def test_only_tests_of_whole_programs_are_left_out_and_only_in_a_late_run():
    late, other = LAST[0] + "::test_page", "tests/graph/test_fit.py::test_one"
    assert left_out(late, None) == left_out(other, 0.0) == ""
    reason = left_out(late, 0.0)
    assert any(re.search(pattern, reason) for pattern in ALLOWED)
    assert left_out(LAST[1] + "::test_one", 1e6) == left_out(LAST[1] + "::test_two", 0.0) == ""
