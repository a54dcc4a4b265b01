"""``tf-ooo doctor``, with machines made up."""

from __future__ import annotations

import shutil
import socket
import subprocess
import sys

import pytest
from click.testing import CliRunner

from grappler_passes.compat import releases
from tf_ooo.cli import checks, main
from tf_ooo.errors import BackendError
from tf_ooo.hosts import devices, native


@pytest.fixture(autouse=True)
def _no_cluster(monkeypatch):
    monkeypatch.delenv(devices.CLUSTER_VARIABLE, raising=False)


@pytest.fixture
def without_tensorflow(monkeypatch):
    reason = "TensorFlow cannot be imported (No module named 'tensorflow'); pip install '.[cpu]' or '.[gpu]'"
    monkeypatch.setattr(releases, "why_unsupported", lambda: reason)


@pytest.fixture
def listener():
    with socket.create_server(("127.0.0.1", 0)) as server:
        yield f"127.0.0.1:{server.getsockname()[1]}"


def test_without_tensorflow_the_rest_is_told_and_it_ends_with_1(without_tensorflow):
    findings = dict(checks.findings())
    assert findings["TensorFlow"].state == "broken"
    assert findings["TensorFlow"].advice == "pip install '.[cpu]' or '.[gpu]'"
    assert "plug-in" not in findings
    result = CliRunner().invoke(main, ["doctor"])
    assert result.exit_code == 1
    assert result.output.splitlines()[-1] == "To be mended: TensorFlow"


def test_all_is_well(monkeypatch):
    monkeypatch.setattr(checks, "_ALWAYS", {"a": lambda: checks.Finding("ok", "fine")})
    monkeypatch.setattr(
        checks, "_WITH_TENSORFLOW", {"b": lambda: checks.Finding("absent", "none", "nothing")}
    )
    monkeypatch.setattr(checks, "tensorflow", lambda: checks.Finding("ok", "2.21.0"))
    result = CliRunner().invoke(main, ["doctor"])
    assert result.exit_code == 0, result.output
    assert result.output.splitlines()[-1] == "Ready to train."


def test_an_old_python_is_broken(monkeypatch):
    assert checks.python().state == "ok"
    monkeypatch.setattr(checks, "PYTHONS", (99, 99))
    assert checks.python().advice == "take Python 3.99 to 3.99"


def test_a_library_that_is_not_compiled(monkeypatch, without_tensorflow):
    def load(name):
        raise BackendError(f"{name} is not compiled; install a C compiler")

    monkeypatch.setattr(native, "load", load)
    finding = dict(checks.findings())["host libraries"]
    assert (finding.state, finding.advice) == ("absent", "install a C compiler")


@pytest.mark.parametrize(
    ("error", "said"),
    [
        (RuntimeError("no such\nsecond line"), "RuntimeError: no such"),
        (OSError("cannot be opened; so it is"), "OSError: cannot be opened; so it is"),
        (KeyError(), "KeyError"),
    ],
)
def test_an_error_of_others_is_an_answer_with_its_type(monkeypatch, without_tensorflow, error, said):
    def raises():
        raise error

    monkeypatch.setenv("COLUMNS", "300")
    monkeypatch.setattr(checks, "_ALWAYS", {"a": raises, "b": lambda: checks.Finding("ok", "fine")})
    findings = dict(checks.findings())
    assert findings["a"] == checks.Finding("broken", said)
    assert findings["b"].state == "ok"
    result = CliRunner().invoke(main, ["doctor"])
    assert result.exit_code == 1
    assert said in result.output


def test_a_horovod_for_another_tensorflow(monkeypatch):
    class Finder:
        def find_spec(self, name, path=None, target=None):
            if name.partition(".")[0] == "horovod":
                raise RuntimeError("undefined symbol: _ZN10tensorflow")

    for name in [name for name in sys.modules if name.partition(".")[0] == "horovod"]:
        monkeypatch.delitem(sys.modules, name)
    monkeypatch.setattr(sys, "meta_path", [Finder(), *sys.meta_path])
    finding = checks.horovod()
    assert finding.state == "broken"
    assert finding.fact == "cannot be imported (RuntimeError: undefined symbol: _ZN10tensorflow)"
    assert finding.advice.startswith("build it again for this TensorFlow")


@pytest.mark.parametrize(
    ("message", "advice"),
    [
        ("is not compiled; install a C compiler", "install a C compiler"),
        ("cannot be loaded", "pip install . again, with a C compiler"),
    ],
)
def test_without_the_plug_in_there_is_something_to_do(monkeypatch, message, advice):
    pytest.importorskip("tensorflow")
    from grappler_passes import plugin

    def load():
        raise plugin.PluginError(message)

    monkeypatch.setattr(plugin, "load", load)
    finding = checks.plug_in()
    assert finding.state == "broken"
    assert finding.fact == message.partition(";")[0]
    assert finding.advice == f"{advice}; until then training runs in stock order"


def test_no_port(monkeypatch):
    def refused(*_):
        raise OSError("not permitted")

    monkeypatch.setattr(devices, "_bound", refused)
    assert checks.local_ports().state == "absent"


def test_tasks_of_a_cluster(listener, without_tensorflow, monkeypatch):
    free = f"127.0.0.1:{devices.free_port()}"
    findings = dict(checks.findings(f"{listener},{free},nowhere.invalid:2222"))
    assert findings[listener].fact == "answers"
    assert findings[free].state == "absent"
    assert findings["nowhere.invalid:2222"].state == "broken"
    monkeypatch.setenv(devices.CLUSTER_VARIABLE, listener)
    assert listener in dict(checks.findings())


def test_no_cluster_is_one_line():
    result = CliRunner().invoke(main, ["doctor", "--cluster", "host"])
    assert result.exit_code == 2
    assert "is no address" in result.output


def test_a_driver_without_gpus_is_named(monkeypatch):
    tf = pytest.importorskip("tensorflow")
    monkeypatch.setattr(tf.config, "list_physical_devices", lambda *_: [])
    monkeypatch.setattr(shutil, "which", lambda _: "/usr/bin/nvidia-smi")
    monkeypatch.setattr(tf.test, "is_built_with_cuda", lambda: True)
    assert "CUDA_VISIBLE_DEVICES" in checks.gpus().advice
    monkeypatch.setattr(tf.test, "is_built_with_cuda", lambda: False)
    assert checks.gpus().advice == "pip install '.[gpu]' in a clone of the repository"


def test_the_command_imports_tensorflow_only_when_it_runs():
    code = "import sys, tf_ooo.cli; sys.exit('tensorflow' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], timeout=800).returncode == 0
