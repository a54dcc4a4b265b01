"""Replicas of a pipeline on the devices of one process: four logical ones."""

from __future__ import annotations

import dataclasses
import functools
import re
from collections import Counter

import numpy as np
import pytest
import tensorflow as tf

import tf_ooo
from tests.graph import pipeline_models as models
from tests.graph.pipeline_fits import Training, assert_equal_bits, assert_near, fits_of, pipelined
from tf_ooo.errors import MemoryLimitError
from tf_ooo.fit import distributed
from tf_ooo.modes.pipeline import tasks_of
from tf_ooo.modes.pipeline.placed_step import PlacedStep

pytestmark = [pytest.mark.devices(4), pytest.mark.takes(60)]

STEP = re.compile(r"tf_ooo_step_(\d)/")
MODELS = {
    "mlp": (models.mlp, models.momentum, models.UNEVEN),
    "skips": (models.conv_with_skips, models.momentum, (models.IMAGES, models.Y)),
    "tied": (models.Tied, models.adam_of_larger_gradients, (models.WORDS, models.NEXT_WORDS)),
    "two_inputs": (
        models.two_inputs,
        models.momentum,
        ([models.X, models.normal(48, 6)], models.Y),
    ),
    "batch_normalized": (models.batch_normalized, models.momentum, models.UNEVEN),
    "positions": (models.positions, models.momentum, (models.whole(50, 48, 7), models.Y)),
}


@functools.cache
def fits_of_model(name):
    """Return the fits on one pipeline, on two by each of two schedules, and on four."""
    training = Training(*MODELS[name], epochs=2)
    one = training.piped(pipelined("gpipe"))
    two = fits_of(training, "gpipe", "auto", replicas=2)
    return one, two, training.piped(pipelined("gpipe", replicas=4))


@pytest.mark.parametrize("name", MODELS)
def test_replicas_train_as_one_pipeline_does(name):
    """Up to the order in which gradients are added up; all schedules have the same bits."""
    one, two, four = fits_of_model(name)
    assert_equal_bits(two["gpipe"].weights, two["auto"].weights)
    for fitted in (*two.values(), four):
        assert_near(one, fitted, 1e-5)
        assert fitted.places == ["CPU:0"]


@pytest.fixture(name="training", scope="module")
def _training():
    return Training(lambda: models.eight_layers("gelu"), models.momentum, models.EVEN, epochs=2)


# Three micro-batches for each of two replicas.
EACH = 3


def two_replicas(**options):
    return pipelined("1f1b", replicas=2, microbatches=2 * EACH, **options)


@pytest.fixture(name="fitted", scope="module")
def _fitted(training):
    return training.piped(two_replicas(), measured_before=False)


def computing(report):
    """(micro-batch, device) of each product of matrices."""
    for node in report.rewritten_graph.node:
        step = STEP.match(node.name)
        if step and node.op in ("MatMul", "_FusedMatMul"):
            yield int(step[1]), node.device[-5:]


def test_each_replica_runs_its_micro_batches_on_its_own_devices(fitted):
    on = {(number // EACH, device) for number, device in computing(fitted.report)}
    assert on == {(0, "CPU:0"), (0, "CPU:1"), (1, "CPU:2"), (1, "CPU:3")}


def test_each_replica_is_sent_a_weight_once_and_none_has_all_of_them(fitted):
    nodes = {node.name: node for node in fitted.report.rewritten_graph.node}
    sent = {}
    for node in nodes.values():
        for text in node.input if "MatMul" in node.op else ():
            read = nodes[text.lstrip("^").split(":")[0]]
            if read.op == "ReadVariableOp" and read.device != node.device:
                sent.setdefault((read.input[0], node.device), set()).add(read.name)
    assert len(sent) == 16  # of each kernel and bias, to the replica that does not hold it
    assert {len(reads) for reads in sent.values()} == {1}
    updates = [node for node in nodes.values() if node.op.startswith("Assign")]
    updated = {node.device[-5:] for node in updates if node.attr["_ooo_kind"].s == b"U"}
    assert updated == {"CPU:0", "CPU:1", "CPU:2", "CPU:3"}


def test_updates_elsewhere_are_sent_the_learning_rate_once_and_one_message_says_that_they_are_done(fitted):
    nodes = {node.name: node for node in fitted.report.rewritten_graph.node}
    read, waits = Counter(), Counter()
    for node in nodes.values():
        sources = [(text[0], nodes[text.lstrip("^").split(":")[0]]) for text in node.input]
        elsewhere = [(mark, source) for mark, source in sources if source.device != node.device]
        if node.op == "NoOp":
            waits.update((node.name, source.device) for mark, source in elsewhere if mark == "^")
        if node.attr["_ooo_kind"].s == b"U":
            reads = {source.name for _, source in elsewhere if source.op == "ReadVariableOp"}
            read.update((nodes[name].input[0], name, node.device) for name in reads)
    assert len(read) == 3 < sum(read.values()), "one variable, on three devices"
    assert len({variable for variable, _, _ in read}) == 1
    assert len(waits) >= 3
    assert set(waits.values()) == {1}


def test_each_lane_is_in_its_order(fitted):
    """Along a device the tasks of 1F1B run one after the other; the second replica's as the first's."""
    tasks = tasks_of(fitted.report.rewritten_graph)
    ranks = {}
    for node in fitted.report.rewritten_graph.node:
        task = tasks.get(node.name)
        if task is not None and "_ooo_priority" in node.attr and task.kind in ("F", "dO"):
            ranks.setdefault((task.stage, task.microbatch // EACH), {}).setdefault(
                node.attr["_ooo_priority"].i, (task.kind, task.microbatch % EACH)
            )
    orders = {lane: [kind for _, kind in sorted(by_rank.items())] for lane, by_rank in ranks.items()}
    assert orders[0, 0] == orders[0, 1]
    assert orders[1, 0] == orders[1, 1]
    assert orders[1, 0][:4] == [("F", 0), ("dO", 0), ("F", 1), ("dO", 1)]


def test_states_that_pass_through_all_replicas_do_not_hold_their_lanes_up():
    """Moving averages change micro-batch by micro-batch: no lane of the second waits for the first."""
    _, two, _ = fits_of_model("batch_normalized")
    report = two["gpipe"].report
    nodes = {node.name: node for node in report.rewritten_graph.node}
    by_step = {}
    for name, node in nodes.items():
        if "MatMul" in node.op and STEP.match(name):
            by_step.setdefault(int(STEP.match(name)[1]), []).append(name)
    needed, waiting, first = set(), list(by_step[2]), by_step[0] + by_step[1]
    while waiting:
        name = waiting.pop()
        if name not in needed:
            needed.add(name)
            waiting += [text.lstrip("^").split(":")[0] for text in nodes[name].input]
    assert not needed & set(first)


class BelowTheLargest(models.layers.Layer):
    """Takes away the largest of all batches so far, which every micro-batch moves in turn."""

    def build(self, shape):
        self.largest = self.add_weight(shape=shape[1:], initializer="zeros", trainable=False)

    def call(self, x):
        self.largest.assign(tf.maximum(self.largest, tf.reduce_max(x, 0)))
        return x - self.largest


def test_replicas_that_wait_for_each_other_say_so():
    """The layers behind a state that is read are in no order; the numbers are those of one pipeline."""

    def below_the_largest():
        hidden = [models.layers.Dense(9, "tanh"), BelowTheLargest(), models.layers.Dense(8, "tanh")]
        return models.keras.Sequential(
            [models.keras.Input((7,)), *hidden, models.layers.Dense(5), models.layers.Dense(3)]
        )

    training = Training(below_the_largest, models.momentum, models.EVEN, epochs=2)
    options = {"check_loss": False}  # which sees that rows are compared with others
    one, two = (training.piped(pipelined("gpipe", replicas=replicas, **options)) for replicas in (1, 2))
    assert_near(one, two, 1e-5)
    assert any("replicas wait for each other" in note for note in two.report.notes)
    assert not any("replicas wait" in note for note in one.report.notes)


def test_the_report_has_the_replicas(fitted):
    section = fitted.report.pipeline
    assert section.replicas == 2
    assert [len(names) for names in section.replica_devices] == [2, 2]
    assert section.exchange_s > 0
    assert fitted.report.planned.workers == 2
    assert fitted.report.predicted_step_s > 0
    assert not any("replicas wait" in note for note in fitted.report.notes)
    text = str(fitted.report)
    assert "replica 1" in text
    assert "adding up replicas' gradients" in text


def test_a_number_is_chosen_by_simulation(training):
    fitted = training.piped(pipelined("auto", replicas="auto", microbatches=4), measured_before=False)
    rows = fitted.report.pipeline.compared_replicas
    assert [row.replicas for row in rows] == [1, 2, 4]
    taken = [row for row in rows if row.taken]
    assert len(taken) == 1
    assert taken[0].predicted_step_s == min(row.predicted_step_s for row in rows)
    assert "compared" in str(fitted.report)


def test_fewer_rows_than_replicas():
    """The last batch has one row: one replica trains it."""
    x, y = models.X[:17], models.Y[:17]
    training = Training(models.mlp, models.momentum, (x, y), epochs=3)
    one = training.piped(pipelined("gpipe"))
    assert_near(one, training.piped(pipelined("gpipe", replicas=4)), 1e-5)


def test_data_parallel_without_a_launcher_has_the_steps_of_the_whole_batch(training):
    fitted = training.piped(pipelined("auto", replicas=4, microbatches=4), measured_before=False)
    assert_near(training.stock, fitted, 1e-5)
    assert {device for _, device in computing(fitted.report)} == {"CPU:0", "CPU:1", "CPU:2", "CPU:3"}


def test_replicas_of_one_device_have_one_micro_batch_each(tmp_path):
    """Nothing waits for a micro-batch there; plain replicas compute their part of the batch at once, too."""
    training = Training(models.mlp, models.momentum, models.UNEVEN, epochs=2)
    fitted, asked = (
        training.piped(pipelined("auto", replicas=4, microbatches=given), measured_before=False)
        for given in (None, 8)
    )
    said = [any("in 4 micro-batches" in note for note in each.report.notes) for each in (fitted, asked)]
    assert said == [True, False]
    assert [each.report.pipeline.microbatches for each in (fitted, asked)] == [4, 8]
    assert [each.report.planned.microbatches for each in (fitted, asked)] == [1, 2]
    for each in (fitted, asked):
        assert_near(training.stock, each, 1e-5)
    assert {(number, device[-1]) for number, device in computing(fitted.report)} == set(enumerate("0123"))
    firsts = [each.report.same_micro_batches for each in (fitted, asked)]
    assert firsts == [" in 8 micro-batches", " with the same micro-batches"]
    # The plan runs again from a file, which says how many there are; layers are divided otherwise there.
    lines = fitted.report.planned.to_text().splitlines(keepends=True)
    text = "".join(line for line in lines if not line.startswith("stage"))
    (tmp_path / "own.txt").write_text(text)
    own = pipelined(tmp_path / "own.txt", replicas=4, microbatches=None)
    again = training.piped(own, measured_before=False)
    assert again.report.pipeline.microbatches == 4
    assert_near(fitted, again, 1e-5)  # other first steps
    # The report's costs are of the micro-batches that run, and a fit that is given them divides them again.
    costs = fitted.report.costs
    sizes = [layer.activation_bytes for layer in asked.report.costs.layers]
    assert [layer.activation_bytes for layer in costs.layers] == [2 * size for size in sizes]
    given = training.piped(pipelined("auto", replicas=4, microbatches=8, costs=costs), measured_before=False)
    assert [layer.activation_bytes for layer in given.report.costs.layers] == sizes


def test_a_second_fit_keeps_the_micro_batches_of_its_plan(training, monkeypatch):
    callback = pipelined("auto", replicas=4, microbatches=None)
    training.piped(callback, measured_before=False)
    monkeypatch.setattr(PlacedStep, "__init__", None)  # no other is made
    training.fit(callback)
    assert callback.report.pipeline.microbatches == 4


def test_replicas_of_a_model_that_no_device_holds(training, fitted):
    """The step that is taken apart has two micro-batches; gradients are added up where their replica is."""
    cut = training.piped(two_replicas(first_steps="cut"), measured_before=False)
    assert_equal_bits(fitted.weights, cut.weights)
    sums = [node for node in cut.report.rewritten_graph.node if "/sum" in node.name and node.op == "AddV2"]
    on = {(int(STEP.match(node.name)[1]) // EACH, node.device[-5:]) for node in sums if STEP.match(node.name)}
    assert on == {(0, "CPU:0"), (0, "CPU:1"), (1, "CPU:2"), (1, "CPU:3")}


def test_layers_that_run_again_in_every_replica(training, fitted):
    again = training.piped(two_replicas(recompute="all"), measured_before=False)
    assert_equal_bits(fitted.weights, again.weights)
    assert again.report.pipeline.recomputed


def test_what_is_refused_before_anything_has_changed(training):
    training.restore()
    with pytest.raises(tf_ooo.OptionsError, match="replicas=3: 4 devices cannot be dealt out evenly"):
        training.piped(pipelined("auto", replicas=3))
    with pytest.raises(tf_ooo.OptionsError, match="replicas=4 share microbatches=2"):
        training.piped(pipelined("auto", replicas=4, microbatches=2))
    assert_equal_bits(training.model.get_weights(), training.untrained)
    with pytest.raises(MemoryLimitError):
        training.piped(pipelined("gpipe", replicas=2, memory_limit_bytes=1000), measured_before=False)


class TestAuto:
    """``OOOBackprop(devices=...)`` and nothing else."""

    @staticmethod
    def fit(training, monkeypatch, one_s, several_s, **options):
        """With made-up seconds of one device and of a plan."""
        monkeypatch.setattr(distributed, "stock_steps_s", lambda *_: [one_s] * 5)
        monkeypatch.setattr(
            "tf_ooo.modes.pipeline.mesh.Mesh.step_s", property(lambda mesh: several_s), raising=True
        )
        callback = tf_ooo.OOOBackprop(
            devices=4, check_loss=False, compare=True, microbatches=4, profile_steps=1, **options
        )
        return training.piped(callback, measured_before=False)

    @pytest.fixture(name="training", scope="class")
    def _training(self):
        return Training(models.mlp, models.momentum, models.EVEN, epochs=8)

    def test_one_device_where_several_are_predicted_to_be_slower(self, training, monkeypatch):
        fitted = self.fit(training, monkeypatch, one_s=1e-3, several_s=2e-3)
        report = fitted.report
        assert report.fell_back
        assert "4 devices are predicted to take 2.00 ms a step, one takes 1.00 ms" in report.fallback_reason
        assert not any(row.taken for row in report.pipeline.compared_replicas)
        assert report.headline.startswith("no gain: the stock step runs")
        assert_near(training.stock, fitted, 1e-5)

    def test_back_to_one_device_where_several_are_measured_to_be_slower(self, training, monkeypatch):
        fitted = self.fit(training, monkeypatch, one_s=1e-6, several_s=1e-7)
        assert fitted.report.fell_back
        assert fitted.report.fallback_reason.startswith("measured: slower than one device")
        assert fitted.report.headline.startswith("no gain: stock kept")
        assert fitted.places == ["CPU:0"]
        assert_near(training.stock, fitted, 1e-5)

    def test_several_devices_stay_where_they_are_faster(self, training, monkeypatch):
        fitted = self.fit(training, monkeypatch, one_s=10.0, several_s=1.0)
        assert not fitted.report.fell_back
        assert fitted.report.gain.ratio > 1  # not surely: the first steps took less than the made-up ones
        assert_near(training.stock, fitted, 1e-5)

    def test_a_device_that_is_in_the_way_is_left_out(self, training):
        costs = training.piped(pipelined("auto", microbatches=4), measured_before=False).report.costs
        link = dataclasses.replace(costs.link, speeds=(1.0, 0.01, 1.0, 1.0))
        given = dataclasses.replace(costs, link=link)
        callback = tf_ooo.OOOBackprop(devices=4, check_loss=False, compare=False, microbatches=4, costs=given)
        fitted = training.piped(callback, measured_before=False)
        report = fitted.report
        devices = report.pipeline.devices
        assert 1 < len(devices) < 4
        assert not any(name.endswith("CPU:1") for name in devices)
        assert f"on {len(devices)} of 4 devices" in report.summary()
        counted = {row.replicas * row.devices for row in report.pipeline.compared_replicas}
        assert {4, 3} <= counted
        assert [row.taken for row in report.pipeline.compared_replicas].count(True) == 1
        assert_near(training.stock, fitted, 1e-5)

    def test_a_named_schedule_stays(self, training, monkeypatch):
        fitted = self.fit(training, monkeypatch, one_s=1e-6, several_s=1e-7, schedule="gpipe")
        assert not fitted.report.fell_back
        assert fitted.report.schedule == "gpipe"

    def test_a_fit_that_is_too_short_to_compare_is_left_alone_and_the_next_one_looks_again(self, monkeypatch):
        training = Training(models.mlp, models.momentum, models.EVEN, epochs=8)
        callback = tf_ooo.OOOBackprop(devices=4)
        fitted = training.piped(callback, measured_before=False)
        assert "are too few to pay for a comparison" in fitted.report.fallback_reason
        assert fitted.report.costs is None  # nothing else was done
        assert fitted.report.stock_step_s == fitted.report.scalars()["step_s"] > 0
        assert fitted.report.gain is None
        assert "step, stock" in dict(fitted.report.rows())
        assert_near(training.stock, fitted, 1e-5)
        training.fit(callback)  # in which nothing is traced: what looking takes is known from the fit before
        assert "are too few to pay for a comparison" in callback.report.fallback_reason
        assert callback.report.costs is None
        monkeypatch.setattr(distributed, "stock_steps_s", lambda *_: [10.0] * 5)
        monkeypatch.setattr("tf_ooo.fit.timing.pays", lambda *_: True)
        history = training.fit(callback)
        assert np.abs(np.subtract(history["loss"], training.stock.history["loss"])).max() < 1e-5
        assert not callback.report.fell_back
        assert callback.report.gain.ratio > 1
        assert callback.report.stock_step_s is None  # that was of the fit before

    def test_a_model_that_one_device_cannot_run_is_not_left_to_it(self, training, monkeypatch):
        def exhausted(*_):
            raise tf.errors.ResourceExhaustedError(None, None, "no memory")

        monkeypatch.setattr(distributed, "stock_steps_s", exhausted)
        callback = tf_ooo.OOOBackprop(devices=4, check_loss=False, compare=True, profile_steps=1)
        fitted = training.piped(callback, measured_before=False)
        assert not fitted.report.fell_back
        assert fitted.report.no_baseline == "the model does not fit on one device"

    def test_what_is_left_of_an_execution_is_trained_on_one_device_too(self, monkeypatch):
        """Six batches of twelve are in the execution in which it is found out."""
        monkeypatch.setattr(distributed, "stock_steps_s", lambda *_: [1e-6] * 5)
        x, y = np.tile(models.X, (2, 1)), np.tile(models.Y, 2)
        training = Training(
            models.mlp, models.momentum, (x, y), epochs=2, batch_size=8, steps_per_execution=6
        )
        callback = tf_ooo.OOOBackprop(devices=4, check_loss=False, compare=True, profile_steps=1)
        fitted = training.piped(callback, measured_before=False)
        assert fitted.report.fell_back
        assert_near(training.stock, fitted, 1e-5)

    def test_a_fit_after_one_in_which_one_device_was_faster_is_stock(self, training, monkeypatch):
        monkeypatch.setattr(distributed, "stock_steps_s", lambda *_: [1e-6] * 5)
        callback = tf_ooo.OOOBackprop(devices=4, check_loss=False, compare=True, profile_steps=1)
        training.fit(callback)
        assert callback.report.fell_back
        assert training.fit(callback)["loss"] == training.stock.history["loss"]
