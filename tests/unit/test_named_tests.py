"""Tests that are named outside their files are there: a renamed one would be left out, or break a command."""

from __future__ import annotations

import ast
import importlib.util
import re
from pathlib import Path

import pytest

from tests.conftest import QUICK

ROOT = Path(__file__).parents[2]


def _targets() -> dict[str, list[str]]:
    """``TESTS`` of tests/mutation/targets.py, which is a script's folder and no package."""
    spec = importlib.util.spec_from_file_location("targets", ROOT / "tests/mutation/targets.py")
    targets = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(targets)
    return targets.TESTS


def _smoke() -> list[str]:
    """What ``make smoke`` runs."""
    (text,) = re.findall(r"^SMOKE := ((?:.*\\\n)*.*)", (ROOT / "Makefile").read_text(), re.MULTILINE)
    return re.findall(r"tests/[^\s']+", text)


def _defined_in(file: Path) -> set[str]:
    """Functions, classes and methods of a test file, as node ids call them."""
    names = set()
    for node in ast.parse(file.read_text()).body:
        if isinstance(node, (ast.FunctionDef, ast.ClassDef)):
            names.add(node.name)
        if isinstance(node, ast.ClassDef):
            names |= {f"{node.name}::{own.name}" for own in node.body if isinstance(own, ast.FunctionDef)}
    return names


@pytest.mark.parametrize("module", _targets())
def test_mutated_modules_and_their_tests_exist(module):
    missing = [path for path in (module, *_targets()[module]) if not (ROOT / path).is_file()]
    assert not missing
    assert _targets()[module]


@pytest.mark.parametrize("nodeid", [*QUICK, *_smoke()])
def test_node_ids_exist(nodeid):
    path, _, name = nodeid.partition("::")
    assert (ROOT / path).is_file()
    if name:
        assert name.partition("[")[0] in _defined_in(ROOT / path)


def test_parameters_in_node_ids_are_written_in_their_file():
    with_parameter = [nodeid for nodeid in (*QUICK, *_smoke()) if "[" in nodeid]
    assert with_parameter
    for nodeid in with_parameter:
        path, parameter = nodeid.partition("::")[0], re.findall(r"\[(.*)\]", nodeid)[0]
        sources = [ROOT / path, ROOT / "tests/zoo.py"]
        named = rf'"{parameter}":|def {parameter}\('
        assert any(re.search(named, file.read_text()) for file in sources), nodeid
