"""What could end the process, each in a process of its own."""

from __future__ import annotations

import ctypes
import os
import shutil
import subprocess
import sys
import textwrap
from pathlib import Path

import pytest

from grappler_passes.plugin import loader

SHIM_SOURCE = Path(loader.__file__).with_name("shim.c")

PREAMBLE = """
import os, sys, threading, time
import tensorflow as tf
from grappler_passes import plugin
from grappler_passes.plugin import compat, loader, requests

def copy_of(graph_def):
    out = type(graph_def)()
    out.CopyFrom(graph_def)
    return out

def run_one(value=3.0):
    w = tf.Variable(value)
    return float(tf.function(lambda: w * w)())
"""


def run(code: str, *, preamble: str = PREAMBLE) -> str:
    """Runs Python code in a process of its own; its output, after a check that it ended well."""
    process = subprocess.run(
        [sys.executable, "-c", preamble + textwrap.dedent(code)],
        capture_output=True,
        text=True,
        timeout=180,
        env=os.environ | {"TF_CPP_MIN_LOG_LEVEL": "3", "CUDA_VISIBLE_DEVICES": ""},
    )
    assert process.returncode == 0, process.stdout + process.stderr
    return process.stdout


def compile_c(source: Path, target: Path, *options: str) -> None:
    compiler = shutil.which("cc")
    if compiler is None:
        pytest.skip("no C compiler (cc)")
    subprocess.run([compiler, *options, str(source), "-o", str(target)], check=True, capture_output=True)


def test_loading_from_many_threads_loads_once():
    run("""
        threads = [threading.Thread(target=plugin.load) for _ in range(8)]
        [t.start() for t in threads]
        [t.join() for t in threads]
        assert plugin.loaded() == ("CPU",), plugin.loaded()
    """)


def test_tracing_without_the_plug_in_says_so():
    run("""
        request = plugin.register(plugin.Request("r", copy_of))
        try:
            with plugin.tracing(request):
                raise AssertionError("traced without the plug-in")
        except RuntimeError as error:
            assert "plugin.load()" in str(error)
        plugin.load()
        with plugin.tracing(request):
            run_one()
        assert request.rewrites == 1, "registered before loading"
    """)


def test_loading_after_tensorflow_was_used_keeps_its_devices():
    run("""
        tf.config.set_logical_device_configuration(
            tf.config.list_physical_devices("CPU")[0], [tf.config.LogicalDeviceConfiguration()] * 2)
        run_one()
        plugin.load()
        assert len(tf.config.list_logical_devices("CPU")) == 2
        request = plugin.register(plugin.Request("r", copy_of))
        with plugin.tracing(request):
            run_one()
        assert request.rewrites == 1, request
    """)


def test_every_replica_of_a_mirrored_variable_is_named():
    run("""
        import json, keras
        tf.config.set_logical_device_configuration(
            tf.config.list_physical_devices("CPU")[0], [tf.config.LogicalDeviceConfiguration()] * 2)
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
        found = [json.loads(n.attr["_ooo_variable"].s) for n in graph.node if "_ooo_variable" in n.attr]
        trainable = {info["name"]: info["trainable"] for info in found}
        for variable in model.variables:
            wanted = any(variable is v for v in model.trainable_variables)
            name = getattr(variable, "path", variable.name.removesuffix(":0"))
            assert trainable[name] == wanted, name
            assert trainable[name + "/replica_1"] == wanted, name
    """)


def test_another_optimizer_is_named_and_nothing_is_loaded(tmp_path):
    other = tmp_path / "libother_optimizer.so"
    compile_c(SHIM_SOURCE, other, "-shared", "-fPIC", '-DOOO_DEVICE_TYPE="CPU"')
    run(f"""
        compat.load_library({str(other)!r})
        try:
            plugin.load()
        except plugin.PluginError as error:
            assert "libother_optimizer.so" in str(error), error
        else:
            raise AssertionError("loaded beside another optimizer")
        assert plugin.loaded() == ()
        assert run_one() == 9.0
    """)


def test_a_machine_without_tensorflow_is_told_what_to_install():
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
    run(textwrap.dedent(code), preamble="")


def test_the_interpreter_ends_while_functions_are_compiled():
    out = run("""
        plugin.load()
        started = threading.Event()

        def slow(graph_def):
            started.set()
            time.sleep(0.3)
            print("rewrote", flush=True)
            return copy_of(graph_def)

        request = plugin.register(plugin.Request("slow", slow))

        def work():
            with plugin.tracing(request):
                run_one()

        threading.Thread(target=work, daemon=True).start()
        assert started.wait(60)
    """)
    assert "rewrote" in out, "the rewrite under way was waited for"


def test_a_forked_child_starts_without_requests_and_the_parent_goes_on():
    run("""
        plugin.load()
        request = plugin.register(plugin.Request("parent", copy_of))
        child = os.fork()
        if child == 0:  # TensorFlow has started no threads yet, so the child may use it
            ok = requests.find("parent") is None
            with plugin.tracing(request):
                ok &= run_one() == 9.0 and request.calls == 0
            own = plugin.register(plugin.Request("child", copy_of))
            with plugin.tracing(own):
                ok &= run_one() == 9.0 and own.rewrites == 1
            os._exit(0 if ok else 1)
        assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 0
        with plugin.tracing(request):
            assert run_one() == 9.0
        assert request.rewrites == 1, request
    """)


def test_a_fork_during_a_rewrite_leaves_a_child_that_can_end():
    run("""
        plugin.load()

        def fork(graph_def):
            child = os.fork()
            if child == 0:
                loader._leave()  # what the end of the interpreter runs: must not wait for the parent's call
                os._exit(0)
            started_s = time.monotonic()
            assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 0
            assert time.monotonic() - started_s < loader.EXIT_WAIT_S
            return copy_of(graph_def)

        request = plugin.register(plugin.Request("forks", fork))
        with plugin.tracing(request):
            assert run_one() == 9.0
        assert request.rewrites == 1, request.errors
    """)


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
    import tensorflow as tf

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
    ("option", "reason"),
    [("meta_optimizer_iterations = 1", "meta_optimizer_iterations=ONE"),
     ("disable_meta_optimizer = True", "graph optimizers are switched off")],
)  # fmt: skip
def test_settings_that_keep_steps_from_being_rewritten_are_named(option, reason):
    output = run(f"""
        from tensorflow.python.eager import context
        import tf_ooo
        config = tf.compat.v1.ConfigProto()
        config.graph_options.rewrite_options.{option}
        context.context()._config = config
        weights = [tf.Variable([[1.0, 2.0], [3.0, 4.0]]) for _ in range(2)]

        @tf_ooo.function(profile_steps=1)
        def step(x):
            with tf.GradientTape() as tape:
                loss = tf.reduce_sum(tf.tanh(x @ weights[0]) @ weights[1])
            for weight, gradient in zip(weights, tape.gradient(loss, weights)):
                weight.assign_sub(0.1 * gradient)
            return loss

        for _ in range(3):
            step(tf.ones((2, 2)))
        print("reason:", step.report.fallback_reason)
    """)
    assert reason in output
    assert output.strip().count("\n") == 0, "one line"
