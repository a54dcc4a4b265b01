"""Networks of the paper, measured as ``benchmarks paper run`` does, and trained by their scripts."""

from __future__ import annotations

import sys
from dataclasses import replace
from unittest import mock

import pytest
import tensorflow as tf

from benchmarks.models import ScriptNetwork, loaded
from benchmarks.paper.command import case_of
from benchmarks.paper.networks import NETWORKS
from benchmarks.runners import one_process
from tf_ooo.modes import data_parallel

pytestmark = pytest.mark.takes(120)


def test_a_script_is_measured_in_turns_with_stock():
    case = case_of(NETWORKS["densenet121"], "tiny", {})
    small = {"script": "feed_forward", "size": "tiny", "settings": {"layers": 2, "width": 32, "batch": 4}}
    parameters = {**case.parameters, "script": small, "steps": 1}
    case = replace(case, parameters=parameters, ways=case.ways[:2], turns=1)
    assert not one_process.why_not(case)
    measured = one_process.run(case)
    assert set(measured.ways) == {way.name for way in case.ways}
    assert {run.bits for run in measured.ways.values() if run.bits is not None} == {measured.stock_bits}


@pytest.mark.devices(2)
def test_data_are_prepared_where_the_model_is_not(monkeypatch):
    """Workers have a share of the CPU for training."""
    devices = []

    def data(of, rows, seed):
        devices.append(tf.identity(1.0).device)
        return [], []

    of = ScriptNetwork("feed_forward", "tiny", {"layers": 1, "pixels": 4}, "generated")
    monkeypatch.setattr(loaded(of.script), "data", data)
    with tf.device("CPU:1"):
        of.data(1)
        devices.append(tf.identity(1.0).device)
    assert [device[-5:] for device in devices] == ["CPU:0", "CPU:1"]


class Fitted:
    """A model that only keeps how it was trained."""

    def compile(self, *_, **__):
        pass

    def fit(self, x, y, **given):
        self.rows, self.given = (len(x), len(y)), given


@pytest.mark.parametrize("script", sorted({network.script for network in NETWORKS.values()}))
@pytest.mark.parametrize(("mode", "rows"), [("single_device", 5), ("pipeline", 3 * 5)])
def test_scripts_train_on_rows_of_micro_batches(monkeypatch, script, mode, rows):
    module, model = loaded(script), Fitted()
    monkeypatch.setattr(module, "build", lambda _: model)
    monkeypatch.setattr(module.tf_ooo, "OOOBackprop", mock.Mock())
    # Devices of a process that has run something are as they are.
    monkeypatch.setattr(tf.config, "set_logical_device_configuration", lambda *_: None)
    arguments = f"--mode {mode} --microbatches 3 --batch 5 --steps 2 --data generated"
    monkeypatch.setattr(sys, "argv", [script, *arguments.split()])
    module.main()
    assert model.rows == (2 * rows, 2 * rows)
    assert model.given["batch_size"] == rows


def test_each_worker_has_as_many_steps_as_were_asked_for(monkeypatch):
    module, model = loaded("feed_forward"), Fitted()
    monkeypatch.setattr(module, "build", lambda _: model)
    monkeypatch.setattr(module.tf_ooo, "OOOBackprop", mock.Mock())
    ranks = mock.Mock(rank=1, size=3)
    monkeypatch.setattr(data_parallel, "choose_engine", lambda _: ranks)
    arguments = "--mode data_parallel --batch 5 --steps 2 --data generated"
    monkeypatch.setattr(sys, "argv", ["feed_forward", *arguments.split()])
    module.main()
    assert model.rows == (2 * 5, 2 * 5)
    assert model.given["batch_size"] == 5


@pytest.mark.parametrize(
    ("script", "arguments", "said"),
    [
        ("bert", "--width wide", "width='wide': expected a whole number above 0"),
        ("densenet", "--layers 122", "layers=122: a DenseNet has 121, 169, 201, 264"),
        ("rnn", "--layers 0 --batch 0", "layers=0: expected a whole number above 0"),
        ("mobilenet_v3_large", "--alpha 0", "alpha=0: expected a number above 0"),
        ("bert", "--task 3", "task=3: expected a word"),
        ("gpt3", "--microbatches 0", "microbatches=0: expected a whole number above 0"),
    ],
)
def test_scripts_refuse_other_kinds_in_one_line(monkeypatch, capsys, script, arguments, said):
    module = loaded(script)
    monkeypatch.setattr(module, "build", lambda _: pytest.fail("built nonetheless"))
    monkeypatch.setattr(sys, "argv", [script, *arguments.split()])
    with pytest.raises(SystemExit, match="2"):
        module.main()
    assert capsys.readouterr().err.endswith(f"error: {said}\n")
