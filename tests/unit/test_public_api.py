"""Public names, and which package may import which."""

from __future__ import annotations

import ast
import importlib
import subprocess
import sys
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
    "__version__", "OOOBackprop", "function", "enabled", "Options", "classify", "plan", "simulate",
    "Timeline", "LayerCosts", "Link", "Schedule", "Report", "OOOError", "OptionsError", "GraphError",
    "ScheduleError", "CostError", "MemoryLimitError", "BackendError", "PassError",
    "high_priority_main_stream", "host_memory", "SingleDevice", "DataParallel", "Pipeline", "LayerPipe",
}  # fmt: skip

PRIVATE = ("tensorflow.python", "tensorflow.compiler", "tensorflow.tsl", "keras.src", "tf_keras")


def _files():
    return [path for package in BELOW for path in sorted((ROOT / package).rglob("*.py"))]


def _is_compat(path):
    """A file of the packages ``tf_ooo.compat`` and ``grappler_passes.compat``."""
    return path.parent.name == "compat"


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


def test_type_checkers_know_the_same_names():
    """``__init__.pyi``: each name from where it is loaded, under its own name."""
    stub = ast.parse((ROOT / "tf_ooo/__init__.pyi").read_text())
    imports = [node for node in stub.body if isinstance(node, ast.ImportFrom)]
    homes = {alias.asname: f"{node.module}.{alias.name}" for node in imports for alias in node.names}
    assert homes.keys() | {"__version__"} == NAMES | {"data_parallel", "pipeline"}
    for name, home in homes.items():
        module, _, own_name = home.rpartition(".")
        assert getattr(importlib.import_module(module), own_name) is getattr(tf_ooo, name)


TYPED = """
import tf_ooo
callback = tf_ooo.OOOBackprop(tf_ooo.Pipeline(devices=2))
reveal_type(tf_ooo.OOOBackprop)
reveal_type(callback.report)
reveal_type(tf_ooo.plan)
reveal_type(tf_ooo.function(len))
tf_ooo.Pipeline(streams=2)
tf_ooo.nonsense
"""


def test_type_checkers_see_types(tmp_path):
    pytest.importorskip("mypy")
    program = tmp_path / "typed.py"
    program.write_text(TYPED)
    command = [sys.executable, "-m", "mypy", str(program)]
    said = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=False)
    # Lines may be of an earlier run, in another folder, where mypy remembers it.
    lines = [line.split(": ", 1)[1] for line in said.stdout.splitlines() if "/typed.py:" in line]
    shown = [line.removeprefix('note: Revealed type is "') for line in lines if "defined in" not in line]
    assert len(shown) == 6, said
    assert shown[0].startswith("def (mode: str | tf_ooo.options.base.ModeOptions |")
    assert shown[1] == 'tf_ooo.report.report.Report"'
    assert shown[2].endswith('-> tf_ooo.planning.model.schedule.Schedule"')
    assert shown[3] == 'tf_ooo.decorator.OOOFunction"'
    assert shown[4] == 'error: Unexpected keyword argument "streams" for "Pipeline"  [call-arg]'
    assert shown[5] == 'error: Module has no attribute "nonsense"  [attr-defined]'


def test_all_errors_have_one_base():
    errors = [getattr(tf_ooo, name) for name in NAMES if name.endswith("Error")]
    assert all(issubclass(error, tf_ooo.OOOError) for error in errors)


def _text_constants(path):
    nodes = ast.walk(ast.parse(path.read_text()))
    return [n.value for n in nodes if isinstance(n, ast.Constant) and isinstance(n.value, str)]


def _is_module(text):
    dotted = "." in text and text.replace(".", "").isidentifier()
    return dotted and (ROOT / f"{text.replace('.', '/')}.py").exists()


def test_every_file_is_looked_at():
    compat = {str(path.relative_to(ROOT)) for path in _files() if _is_compat(path)}
    topics = {
        "grappler_passes": (
            "__init__", "graph_protos", "keras_values", "releases", "runtime", "shape_inference",
        ),
        "tf_ooo": (
            "__init__", "func_graphs", "keras_compiled", "keras_fits", "keras_layers", "keras_loops",
            "keras_variables", "nests", "tf_functions",
            "tf_profiler", "train_function", "versions", "xla", "xla_calls",
        ),
    }  # fmt: skip
    assert compat == {f"{package}/compat/{topic}.py" for package in topics for topic in topics[package]}
    assert {path.relative_to(ROOT).parts[0] for path in _files()} == set(BELOW)


def _upwards(path):
    """Modules of a package above its own, private API outside of compat/, and Keras in the graph passes."""
    own = path.relative_to(ROOT).parts[0]
    for module in _imports(path):
        package = module.split(".")[0]
        above = package in BELOW and package != own and package not in BELOW[own]
        keras_in_passes = package == "keras" and own == "grappler_passes"
        if above or keras_in_passes or (module.startswith(PRIVATE) and not _is_compat(path)):
            yield f"{path.relative_to(ROOT)} imports {module}"


def test_import_direction():
    assert [line for path in _files() for line in _upwards(path)] == []


def _named_above(path):
    """Texts for importlib that name a package above, or private API."""
    own = path.relative_to(ROOT).parts[0]
    above = [package for package in BELOW if package not in (own, *BELOW[own])]
    for text in _text_constants(path):
        if text.startswith(PRIVATE) or (_is_module(text) and text.split(".")[0] in above):
            yield f"{path.relative_to(ROOT)} names {text}"


def test_no_import_by_name():
    """Only tf_ooo/__init__.py may name keras_callbacks."""
    asked = [path for path in _files() if not _is_compat(path) and path != ROOT / "tf_ooo" / "__init__.py"]
    assert [line for path in asked for line in _named_above(path)] == []
