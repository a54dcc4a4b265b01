"""``tf-ooo plan`` on saved Keras models."""

from __future__ import annotations

import ast
import importlib
import json
import re
import sys

import keras
import pytest
from click.testing import CliRunner
from keras import layers

import tf_ooo
from tf_ooo.cli import main
from tf_ooo.costs.keras_model import costs_of_model
from tf_ooo.costs.table import CostTable
from tf_ooo.errors import CostError, OptionsError


def _run(*arguments):
    return CliRunner().invoke(main, ["plan", *map(str, arguments)], env={"COLUMNS": "160"})


def _classifier():
    model = keras.Sequential(
        [keras.Input((20,)), layers.Dense(30, "relu"), layers.BatchNormalization(), layers.Dense(5)]
    )
    loss = keras.losses.SparseCategoricalCrossentropy(from_logits=True)
    model.compile(keras.optimizers.Adam(), loss, metrics=["accuracy"])
    return model


def test_plan_of_a_file(tmp_path):
    path, costs = tmp_path / "m.keras", tmp_path / "c.json"
    _classifier().save(path)
    problem = ("--devices", 2, "--microbatches", 4, "--link", "25Gbit", "--memory", "16GiB")
    result = _run(path, *problem, "--batch", 31, "--costs-out", costs, "--json")
    assert result.exit_code == 0, result.stderr
    content = json.loads(result.stdout)
    assert (content["mode"], content["devices"], content["microbatches"]) == ("pipeline", 2, 4)
    table = CostTable.load(costs)
    assert table.link.bytes_per_s == 25e9 / 8
    assert (table.source, table.device) == ("analytic", "v100")
    assert "micro-batches of 8 rows" in table.assumptions


def test_costs_by_hand():
    """Weights are 4 bytes each; Adam has two slots."""
    table = costs_of_model(_classifier(), 8, "cpu-core")
    assert [layer.weight_bytes for layer in table.layers] == [4 * (20 * 30 + 30), 4 * 60, 4 * (30 * 5 + 5)]
    assert all(layer.slot_bytes == 2 * layer.weight_bytes for layer in table.layers)
    assert all(layer.forward_s > 0 and layer.weight_grad_s > 0 for layer in table.layers)


def test_measured():
    table = costs_of_model(_classifier(), 8, "cpu-core", measure=True)
    assert table.source in ("measured", "mixed")
    assert "this machine" in table.device


def test_precisions():
    """The peak that counts is the precision's; what nobody gave is said."""
    wide = [keras.Input((1024,)), layers.Dense(1024), layers.Dense(1024)]
    model = keras.Sequential(wide)
    tables = {name: costs_of_model(model, 1024, "a100", precision=name) for name in ("fp32", "tf32", "bf16")}
    forward_s = {name: table.layers[1].forward_s for name, table in tables.items()}
    assert forward_s["fp32"] > forward_s["tf32"] > forward_s["bf16"]
    usual = costs_of_model(model, 1024, "a100")
    assert usual.device == "a100-tf32"
    assert usual.layers == tables["tf32"].layers
    assert usual.assumptions == (
        "micro-batches of 1024 rows",
        "device a100 at tf32: 156 TFLOP/s, 2039 GB/s, published peaks, which nothing reaches",
        "tensors are float32, as in the model",
        "not given, so assumed: precision",
    )
    assert costs_of_model(model).assumptions[-1] == "not given, so assumed: batch, device, precision"
    said = "no device is given, and v100, which is assumed then, has no tf32; device= .* may be a100, "
    with pytest.raises(CostError, match=said):
        costs_of_model(model, 8, precision="tf32")
    with pytest.raises(CostError, match="device 'v100' has no tf32; it has fp32, fp16"):
        costs_of_model(model, 8, "v100", precision="tf32")


def test_a_model_of_bfloat16():
    policy = keras.mixed_precision.DTypePolicy("mixed_bfloat16")
    model = keras.Sequential([keras.Input((64,)), layers.Dense(64, dtype=policy), layers.Dense(8)])
    table = costs_of_model(model, 8, "h100")
    assert table.device == "h100-bf16"
    assert "tensors are bfloat16, as in the model" in table.assumptions
    with pytest.raises(CostError, match="device 'v100' has no bf16"):
        costs_of_model(model, 8)


def test_the_function_plans_for_models(tmp_path):
    """The function plans as the command does, for a model or for its file."""
    path = tmp_path / "m.keras"
    model = _classifier()
    model.save(path)
    ask = {"devices": 2, "microbatches": 4, "batch": 8, "device": "h100", "precision": "bf16"}
    schedule = tf_ooo.plan(model=model, **ask)
    assert schedule == tf_ooo.plan(model=path, **ask)
    given = [part for name, value in ask.items() for part in (f"--{name}", value)]
    content = json.loads(_run(path, *given, "--json").stdout)
    assert content["assumptions"] == list(schedule.assumptions)
    assert content["step_s"] == schedule.predicted_step_s
    assert any("h100 at bf16: 989.5 TFLOP/s" in line for line in schedule.assumptions)


def test_several_inputs_and_no_compile():
    a, b = keras.Input((4,), name="a"), keras.Input((3,), name="b")
    joined = layers.Concatenate()([layers.Dense(5)(a), layers.Dense(6)(b)])
    model = keras.Model({"a": a, "b": b}, [layers.Dense(2)(joined), layers.Dense(1)(joined)])
    table = costs_of_model(model, 4, "v100")
    assert len(table.layers) >= 3
    assert any("not compiled" in note for note in table.notes)


@pytest.mark.parametrize("name", ["m.keras", "m.h5"])
def test_no_model(tmp_path, name):
    path = tmp_path / name
    path.write_text("not a model")
    result = _run(path)
    assert result.exit_code == 2
    assert f"{path}: Keras cannot load it" in result.stderr


@pytest.mark.parametrize("name", ["m.keras", "m.h5"])
def test_a_layer_of_the_users_own_is_named_with_the_way_out(tmp_path, name):
    class Own(layers.Layer):
        def call(self, x):
            return x

    model = keras.Sequential([keras.Input((4,)), Own(), layers.Dense(3)])
    model.save(tmp_path / name)
    said = _run(tmp_path / name).stderr
    assert "'Own'" in said
    assert "--import MODULE" in said
    assert "class_name" not in said


@pytest.mark.parametrize("name", ["m.keras", "m.h5"])
def test_a_compiled_model_of_tf_keras(tmp_path, monkeypatch, name):
    tf_keras = pytest.importorskip("tf_keras")
    model = tf_keras.Sequential([tf_keras.Input((5,)), tf_keras.layers.Dense(4), tf_keras.layers.Dense(2)])
    model.compile("adam", "mse", metrics=["mse"])
    model.save(tmp_path / name)
    if name == "m.h5":
        assert "set TF_USE_LEGACY_KERAS=1" in _run(tmp_path / name, "--devices", 2).stderr
    monkeypatch.setenv("TF_USE_LEGACY_KERAS", "1")
    result = _run(tmp_path / name, "--devices", 2, "--microbatches", 2, "--batch", 8)
    assert result.exit_code == 0, result.stderr


def test_unknown_device(tmp_path):
    path = tmp_path / "m.keras"
    _classifier().save(path)
    result = _run(path, "--device", "v1000")
    assert result.exit_code == 2
    assert "unknown device 'v1000'; known: v100" in result.stderr


def test_open_shapes_are_refused():
    model = keras.Sequential([keras.Input((None, 4)), layers.Dense(3)])
    with pytest.raises(OptionsError, match="only the batch may be open"):
        costs_of_model(model, 4, "v100")


MODULE = """
import keras

@keras.saving.register_keras_serializable()
class Scaled(keras.layers.Layer):
    def build(self, shape):
        self.scale = self.add_weight(shape=(shape[-1],), initializer="ones")

    def call(self, x):
        return x * self.scale

class Net(keras.Model):
    def __init__(self):
        super().__init__()
        self.first, self.scaled = keras.layers.Dense(16, "relu"), Scaled()
        self.second, self.last = keras.layers.Dense(8), keras.layers.Dense(3)

    def call(self, x):
        return self.last(keras.ops.mean(self.second(self.scaled(self.first(x))), axis=1))

class Sum(keras.Model):  # both of its first layers' gradients start from one dO
    def __init__(self):
        super().__init__()
        self.left, self.right = keras.layers.Dense(8, name="left"), keras.layers.Dense(8, name="right")
        self.out = keras.layers.Dense(2, name="out")

    def call(self, inputs):
        return self.out(self.left(inputs["a"]) + self.right(inputs["b"]))

def needs(size):
    return keras.Sequential([keras.layers.Dense(size)])

def broken():
    raise ValueError("no such backbone")

number = 3
"""


@pytest.fixture
def _module(tmp_path, monkeypatch):
    (tmp_path / "my_models.py").write_text(MODULE)
    monkeypatch.chdir(tmp_path)
    monkeypatch.syspath_prepend(tmp_path)
    yield
    sys.modules.pop("my_models", None)


@pytest.mark.usefixtures("_module")
def test_a_class_of_the_users_own(tmp_path):
    """Subclassed, not built: planned from the shape of its input; also by the function."""
    ask = (
        "--model",
        "my_models:Net",
        "--import",
        "my_models",
        "--batch",
        4,
        "--costs-out",
        tmp_path / "c.json",
    )
    result = _run(*ask, "--input-shape", "12,64", "--devices", 2, "--json")
    assert result.exit_code == 0, result.output
    table = CostTable.load(tmp_path / "c.json")
    weights = [layer.weight_bytes for layer in table.layers]
    assert weights == [4 * (64 * 16 + 16), 4 * 16, 4 * (16 * 8 + 8), 4 * (8 * 3 + 3)]
    names = [re.sub(r"_\d+", "", layer.name) for layer in table.layers]  # Keras numbers on
    assert names == ["net/dense", "net/scaled/variable", "net/dense", "net/dense"]
    assert len({layer.name for layer in table.layers}) == 4
    assert table.rows == 1, "as in a fit, four rows are as many micro-batches"
    for given in ((12, 64), "12,64", "12,64:float32"):
        schedule = tf_ooo.plan(model="my_models:Net", batch=4, input_shape=given, devices=2)
        assert schedule.predicted_step_s == json.loads(result.stdout)["step_s"]
    longer = tf_ooo.plan(model="my_models:Net", batch=4, input_shape=(4800, 64), devices=2)
    assert longer.predicted_step_s > schedule.predicted_step_s


@pytest.mark.usefixtures("_module")
def test_layers_of_one_output_gradient_are_told_apart_from_their_model(tmp_path):
    """Its common name alone would be the whole model's; it can be cut by hand."""
    shapes = ("--input-shape", "a=5", "--input-shape", "b=6")
    ask = ("--model", "my_models:Sum", *shapes, "--devices", 2, "--schedule", "zb_h1")
    result = _run(*ask, "--stages", "sum/left + right,sum/out", "--costs-out", tmp_path / "c.json")
    assert result.exit_code == 0, result.output
    names = [layer.name for layer in CostTable.load(tmp_path / "c.json").layers]
    assert names == ["sum/left + right", "sum/out"]


@pytest.mark.usefixtures("_module")
def test_a_saved_model_with_classes_of_its_own(tmp_path):
    scaled = importlib.import_module("my_models").Scaled
    keras.Sequential([keras.Input((5,)), layers.Dense(4), scaled(), layers.Dense(2)]).save("m.keras")
    keras.saving.get_custom_objects().clear()
    sys.modules.pop("my_models")
    assert _run("m.keras", "--devices", 2).exit_code == 2
    assert _run("m.keras", "--devices", 2, "--import", "my_models").exit_code == 0


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (("--model", "my_models:Net"), "is not built, or has no inputs of known shape; say it"),
        (("--model", "my_models:Net", "--input-shape", "64"), "does not take these inputs: Input 0 "),
        (("--model", "my_models:Nets"), "module 'my_models' has no 'Nets'"),
        (("--model", "their_models:Net"), "module 'their_models' cannot be imported: No module named"),
        (("--model", "my_models:needs"), "my_models:needs cannot be made without arguments: needs() missing"),
        (("--model", "my_models:broken"), "cannot be made without arguments: no such backbone"),
        (("--model", "my_models:number"), "my_models:number is no Keras model but a int"),
        (("--model", "Net"), "--model 'Net': expected MODULE:NAME"),
        (("--model", "my_models:Net", "--input-shape", "0,3"), "input shape '0,3': expected sizes without"),
        (("--model", "my_models:Net", "--input-shape", "a=3", "--input-shape", "4"), "name each input once"),
        ((), "give COSTS or MODEL, a file, or --model MODULE:NAME"),
    ],
)  # fmt: skip
@pytest.mark.usefixtures("_module")
def test_models_that_cannot_be_planned(arguments, message):
    result = _run(*arguments)
    assert result.exit_code == 2
    assert message in result.stderr
    assert result.stderr.count("\n") == 1


def test_open_sizes_are_given():
    """One shape for all of a map of inputs, their own types; or each by its name."""
    ids, mask = (
        keras.Input((None,), dtype="int32", name="ids"),
        keras.Input((None,), dtype="bool", name="mask"),
    )
    embedded = layers.Embedding(50, 8, name="table")(ids)
    pooled = layers.GlobalAveragePooling1D()(embedded, mask=mask)
    model = keras.Model({"ids": ids, "mask": mask}, layers.Dense(3)(pooled))
    with pytest.raises(OptionsError, match="only the batch may be open") as raised:
        costs_of_model(model, 4)
    said = (
        "; say all sizes, without the batch, such as --input-shape ids=128:int32 --input-shape mask=128:bool"
    )
    assert said in str(raised.value)
    shapes = ast.literal_eval(str(raised.value).rpartition("input_shape=")[2].rstrip(")"))
    assert costs_of_model(model, 4, input_shape=shapes).rows == 4
    table = costs_of_model(model, 4, input_shape="7")
    by_name = costs_of_model(model, 4, input_shape={"ids": (7,), "mask": "7:bool"})
    assert table.layers == by_name.layers
    assert table.layers[0].weight_bytes == 50 * 8 * 4
