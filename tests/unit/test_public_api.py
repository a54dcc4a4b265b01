"""Public names, and which package may import which."""

from __future__ import annotations

import ast
from pathlib import Path

import pytest

import tf_ooo

ROOT = Path(__file__).parents[2]
BELOW = {
    "grappler_passes": (),
    "tf_ooo": ("grappler_passes",),
    "keras_callbacks": ("tf_ooo", "grappler_passes"),
}
NAMES = {
    "__version__", "OOOBackprop", "function", "enabled", "Options", "classify", "plan", "Schedule", "Report",
    "OOOError", "OptionsError", "GraphError", "ScheduleError", "MemoryLimitError", "BackendError",
}  # fmt: skip


def _files():
    return [path for package in BELOW for path in sorted((ROOT / package).rglob("*.py"))]


def _imports(path):
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            yield node.module or ""


def test_names():
    assert set(tf_ooo.__all__) == NAMES
    assert all(getattr(tf_ooo, name) is not None for name in NAMES)
    assert callable(tf_ooo.function)
    assert tf_ooo.__version__ == "0.1.0"
    with pytest.raises(AttributeError, match="no attribute 'nonsense'"):
        _ = tf_ooo.nonsense


def test_all_errors_have_one_base():
    errors = [getattr(tf_ooo, name) for name in NAMES if name.endswith("Error")]
    assert all(issubclass(error, tf_ooo.OOOError) for error in errors)


@pytest.mark.parametrize("path", _files(), ids=lambda path: str(path.relative_to(ROOT)))
def test_import_direction(path):
    own = path.relative_to(ROOT).parts[0]
    for module in _imports(path):
        package = module.split(".")[0]
        assert package not in BELOW or package == own or package in BELOW[own], module
        private = module.startswith("tensorflow.python")
        assert not private or path.name == "compat.py", f"{module}: private API belongs in compat.py"
