"""``tf-ooo plan`` on saved Keras models."""

from __future__ import annotations

import json

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
    result = _run(path, *problem, "--batch", 8, "--costs-out", costs, "--json")
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
    with pytest.raises(CostError, match="device 'v100' has no tf32; it has fp32, fp16"):
        costs_of_model(model, 8, precision="tf32")


def test_a_model_of_bfloat16():
    policy = keras.mixed_precision.DTypePolicy("mixed_bfloat16")
    model = keras.Sequential([keras.Input((64,)), layers.Dense(64, dtype=policy), layers.Dense(8)])
    table = costs_of_model(model, 8, "h100")
    assert table.device == "h100-bf16"
    assert "tensors are bfloat16, as in the model" in table.assumptions
    with pytest.raises(CostError, match="device 'v100' has no bf16"):
        costs_of_model(model, 8)


def test_the_function_plans_for_models(tmp_path):
    """As the command does, for a model or for its file."""
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
def test_a_compiled_model_of_tf_keras(tmp_path, monkeypatch, name):
    tf_keras = pytest.importorskip("tf_keras")
    model = tf_keras.Sequential([tf_keras.Input((5,)), tf_keras.layers.Dense(4), tf_keras.layers.Dense(2)])
    model.compile("adam", "mse", metrics=["mse"])
    model.save(tmp_path / name)
    if name == "m.h5":
        assert "set TF_USE_LEGACY_KERAS=1" in _run(tmp_path / name, "--devices", 2).stderr
    monkeypatch.setenv("TF_USE_LEGACY_KERAS", "1")
    result = _run(tmp_path / name, "--devices", 2, "--microbatches", 2, "--batch", 4)
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
