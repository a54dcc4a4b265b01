"""Tests what is done once in a process, or could end it: each test in a process of its own."""

from __future__ import annotations

import ctypes
import json
import os
import shutil
import subprocess
import sys
import textwrap
import threading
import time
from pathlib import Path

import keras
import pytest
import tensorflow as tf

import tf_ooo
from grappler_passes import plugin
from grappler_passes.compat import runtime
from grappler_passes.compat.graph_protos import copy_of
from grappler_passes.plugin import loader, requests
from tests import forked

pytestmark = pytest.mark.alone
SHIM_SOURCE = Path(loader.__file__).with_name("shim.c")


def run_one(value=3.0):
    w = tf.Variable(value)
    return float(tf.function(lambda: w * w)())


def compile_c(source: Path, target: Path, *options: str) -> None:
    compiler = shutil.which("cc")
    if compiler is None:
        pytest.skip("no C compiler (cc)")
    subprocess.run([compiler, *options, str(source), "-o", str(target)], check=True, capture_output=True)


def test_loading_from_many_threads_loads_once():
    assert plugin.loaded() == ()
    threads = [threading.Thread(target=plugin.load) for _ in range(8)]
    [t.start() for t in threads]
    [t.join() for t in threads]
    assert plugin.loaded() == ("CPU",)


def test_tracing_without_the_plug_in_says_so():
    request = plugin.register(plugin.Request("r", copy_of))
    with pytest.raises(RuntimeError, match=r"plugin\.load\(\)"), plugin.tracing(request):
        raise AssertionError("traced without the plug-in")
    plugin.load()
    with plugin.tracing(request):
        run_one()
    assert request.rewrites == 1, "registered before loading"


@pytest.mark.devices(2)
def test_loading_after_tensorflow_was_used_keeps_its_devices():
    run_one()
    plugin.load()
    assert len(tf.config.list_logical_devices("CPU")) == 2
    request = plugin.register(plugin.Request("r", copy_of))
    with plugin.tracing(request):
        run_one()
    assert request.rewrites == 1, request


@pytest.mark.devices(2)
def test_every_replica_of_a_mirrored_variable_is_named():
    plugin.load()
    with tf.distribute.MirroredStrategy(["CPU:0", "CPU:1"]).scope():
        model = keras.Sequential([keras.Input((4,)), *(keras.layers.Dense(4) for _ in range(2))])
        model.layers[0].trainable = False
        model.compile("sgd", "mse", jit_compile=False)
    graphs = []
    request = plugin.Request("r", graphs.append, describe=plugin.describe_keras(model))
    with plugin.tracing(plugin.register(request)):
        model.fit(tf.ones((8, 4)), tf.ones((8, 4)), batch_size=4, verbose=0)
    assert not request.errors, request
    graph = max(graphs, key=lambda g: len(g.node))
    infos = [json.loads(n.attr["_ooo_variable"].s) for n in graph.node if "_ooo_variable" in n.attr]
    trainable = {info["name"]: info["trainable"] for info in infos}
    for variable in model.variables:
        wanted = any(variable is v for v in model.trainable_variables)
        name = getattr(variable, "path", variable.name.removesuffix(":0"))
        assert trainable[name] == wanted, name
        assert trainable[name + "/replica_1"] == wanted, name


def test_another_optimizer_is_named_and_nothing_is_loaded(tmp_path):
    other = tmp_path / "libother_optimizer.so"
    compile_c(SHIM_SOURCE, other, "-shared", "-fPIC", '-DOOO_DEVICE_TYPE="CPU"')
    runtime.load_library(str(other))
    with pytest.raises(plugin.PluginError, match=r"libother_optimizer\.so"):
        plugin.load()
    assert plugin.loaded() == ()
    assert run_one() == 9.0


def test_a_machine_without_tensorflow_is_told_what_to_install():
    """A new Python: this process has imported it."""
    code = """
        import sys
        sys.modules["tensorflow"] = None
        from grappler_passes import plugin
        try:
            plugin.load()
        except plugin.PluginError as error:
            assert "pip install '.[cpu]'" in str(error), error
        else:
            raise AssertionError("loaded without TensorFlow")
    """
    process = subprocess.run(
        [sys.executable, "-c", textwrap.dedent(code)], capture_output=True, text=True, timeout=800
    )
    assert process.returncode == 0, process.stdout + process.stderr


def end_while_a_function_is_compiled():
    plugin.load()
    started = threading.Event()

    def slow(graph_def):
        started.set()
        time.sleep(0.3)
        print("rewrote", flush=True)
        return copy_of(graph_def)

    request = plugin.register(plugin.Request("slow", slow))
    w, nothing = tf.Variable(3.0), tf.queue.FIFOQueue(1, [tf.float32], [()])

    def work():
        """For ever: a thread that comes back to a Python that has ended aborts the process (before 3.14)."""
        with plugin.tracing(request):
            tf.function(lambda: w * nothing.dequeue())()

    threading.Thread(target=work, daemon=True).start()
    assert started.wait(60)


def test_the_interpreter_ends_while_functions_are_compiled():
    script = forked.start(forked.as_script, end_while_a_function_is_compiled)
    said, _ = script.communicate(timeout=800)
    assert script.returncode == 0, said
    assert "rewrote" in said, "the rewrite under way was waited for"


def test_a_forked_child_starts_without_requests_and_the_parent_goes_on():
    plugin.load()
    request = plugin.register(plugin.Request("parent", copy_of))

    def use_in_child():
        """TensorFlow has started no threads yet, so the child may use it."""
        assert requests.find("parent") is None
        with plugin.tracing(request):
            assert run_one() == 9.0
        assert request.calls == 0
        own = plugin.register(plugin.Request("child", copy_of))
        with plugin.tracing(own):
            assert run_one() == 9.0
        assert own.rewrites == 1

    forked.result_of(use_in_child)
    with plugin.tracing(request):
        assert run_one() == 9.0
    assert request.rewrites == 1, request


def test_a_fork_during_a_rewrite_leaves_a_child_that_can_end(monkeypatch):
    monkeypatch.setattr(loader, "EXIT_WAIT_S", 1e6)  # a child that waits for the parent's call never ends
    plugin.load()

    def fork(graph_def):
        child = os.fork()
        if child == 0:
            loader._leave()  # what the end of the interpreter runs
            os._exit(0)
        assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 0
        return copy_of(graph_def)

    request = plugin.register(plugin.Request("forks", fork))
    with plugin.tracing(request):
        assert run_one() == 9.0
    assert request.rewrites == 1, request.errors


# In the order of `layout` in shim.c.
LAYOUT = """
    sizeof(TF_Buffer), offsetof(TF_Buffer, data), offsetof(TF_Buffer, length),
    offsetof(TF_Buffer, data_deallocator),
    TP_OPTIMIZER_CONFIGS_STRUCT_SIZE, offsetof(TP_OptimizerConfigs, disable_model_pruning),
    TP_OPTIMIZER_STRUCT_SIZE, offsetof(TP_Optimizer, create_func), offsetof(TP_Optimizer, optimize_func),
    offsetof(TP_Optimizer, destroy_func),
    TP_OPTIMIZER_REGISTRATION_PARAMS_STRUCT_SIZE,
    offsetof(TP_OptimizerRegistrationParams, major_version),
    offsetof(TP_OptimizerRegistrationParams, device_type),
    offsetof(TP_OptimizerRegistrationParams, optimizer_configs),
    offsetof(TP_OptimizerRegistrationParams, optimizer)
"""


def test_the_shim_has_the_layout_of_the_installed_header(tmp_path):
    source, program = tmp_path / "layout.c", tmp_path / "layout"
    source.write_text(
        "#include <stdbool.h>\n#include <stdio.h>\n"
        '#include "tensorflow/c/experimental/grappler/grappler.h"\n'
        f"int main(void) {{ size_t v[] = {{{LAYOUT}}};\n"
        'for (size_t i = 0; i < sizeof(v) / sizeof(v[0]); i++) printf("%zu\\n", v[i]); return 0; }\n'
    )
    compile_c(source, program, "-I", tf.sysconfig.get_include())
    wanted = [int(line) for line in subprocess.check_output([program], text=True).split()]
    for device_type in ("CPU", "GPU"):
        library = ctypes.CDLL(str(loader.shim_path(device_type)))
        library.ooo_layout.restype = ctypes.c_size_t
        values = (ctypes.c_size_t * 64)()
        count = library.ooo_layout(values, 64)
        assert list(values)[:count] == wanted
        library.ooo_device_type.restype = ctypes.c_char_p
        assert library.ooo_device_type().decode() == device_type


@pytest.mark.parametrize(
    ("option", "value", "reason"),
    [
        ("meta_optimizer_iterations", 1, "meta_optimizer_iterations=ONE"),
        ("disable_meta_optimizer", True, "graph optimizers are switched off"),
    ],
)
def test_settings_that_keep_steps_from_being_rewritten_are_named(option, value, reason, capfd):
    from tensorflow.python.eager import context

    config = tf.compat.v1.ConfigProto()
    setattr(config.graph_options.rewrite_options, option, value)
    context.context()._config = config
    weights = [tf.Variable([[1.0, 2.0], [3.0, 4.0]]) for _ in range(2)]

    @tf_ooo.function(compare=True)
    def step(x):
        with tf.GradientTape() as tape:
            loss = tf.reduce_sum(tf.tanh(x @ weights[0]) @ weights[1])
        for weight, gradient in zip(weights, tape.gradient(loss, weights), strict=True):
            weight.assign_sub(0.1 * gradient)
        return loss

    for _ in range(3):
        step(tf.ones((2, 2)))
    assert reason in step.report.fallback_reason
    assert "\n" not in step.report.fallback_reason, "one line"
    assert capfd.readouterr().out == ""
