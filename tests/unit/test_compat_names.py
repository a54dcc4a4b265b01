"""Private names of TensorFlow and Keras: in compat only, each in one file, each function with its test."""

from __future__ import annotations

import ast
import re
from collections import defaultdict
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
PACKAGES = ("grappler_passes", "tf_ooo", "keras_callbacks")
FILES = [path for package in PACKAGES for path in sorted((ROOT / package).rglob("*.py"))]
TOPICS = [path for path in FILES if path.parent.name == "compat" and path.stem != "__init__"]
PRIVATE = ("tensorflow.python", "tensorflow.compiler", "tensorflow.tsl")
# Attributes of this package that others of its files read, and Python's own.
OURS = {"os._exit", "sys._getframe", "sys._current_frames"}


def id_of(path):
    return str(path.relative_to(ROOT))


def private_attributes(path):
    """Names behind a dot that begin with _, but not of self."""
    tree = ast.parse(path.read_text())
    own = {node.attr for node in ast.walk(tree) if isinstance(node, ast.Attribute) and _is_self(node.value)}
    own |= {node.name for node in ast.walk(tree) if isinstance(node, (ast.FunctionDef, ast.ClassDef))}
    for node in ast.walk(tree):
        if isinstance(node, ast.Attribute) and node.attr.startswith("_") and not node.attr.startswith("__"):
            text = ast.unparse(node)
            if not _is_self(node.value) and node.attr not in own and text not in OURS:
                yield node.attr


def _is_self(node):
    return isinstance(node, ast.Name) and node.id in ("self", "cls")


def private_texts(path):
    """Whole texts that are such names: given to getattr, or attributes of nodes."""
    for node in ast.walk(ast.parse(path.read_text())):
        text = node.value if isinstance(node, ast.Constant) else None
        if isinstance(text, str) and re.fullmatch(r"_(?!ooo_)\w+", text):
            yield text


def private_imports(path):
    """``module.name`` of what is used of TensorFlow's private modules."""
    tree = ast.parse(path.read_text())
    for node in ast.walk(tree):
        if isinstance(node, ast.ImportFrom) and (node.module or "").startswith(PRIVATE):
            for alias in node.names:
                used = [n.attr for n in ast.walk(tree) if isinstance(n, ast.Attribute) and _is(n, alias.name)]
                yield from (f"{node.module}.{alias.name}.{name}" for name in used)


def _is(attribute, name):
    return isinstance(attribute.value, ast.Name) and attribute.value.id == name


def test_each_private_name_is_in_one_file():
    places = defaultdict(set)
    for path in TOPICS:
        for name in (*private_attributes(path), *private_texts(path), *private_imports(path)):
            places[name].add(id_of(path))
    assert len(places) > 50, "they are no longer found"
    assert {name: files for name, files in places.items() if len(files) > 1} == {}


def test_no_private_attribute_outside():
    outside = [path for path in FILES if path not in TOPICS]
    assert {id_of(path): names for path in outside if (names := list(private_attributes(path)))} == {}


@pytest.mark.parametrize("path", TOPICS, ids=id_of)
def test_each_function_is_tested(path):
    """In the test of its topic; a class by its name, a function through the topic."""
    test = (ROOT / f"tests/graph/test_compat_{path.stem}.py").read_text()
    defined = [n for n in ast.parse(path.read_text()).body if isinstance(n, (ast.FunctionDef, ast.ClassDef))]
    names = [node.name if isinstance(node, ast.ClassDef) else f"{path.stem}.{node.name}" for node in defined]
    assert [name for name in names if "._" not in name and not re.search(rf"\b{name}\b", test)] == []


def test_files_are_short():
    assert max(len(path.read_text().splitlines()) for path in TOPICS) < 340
