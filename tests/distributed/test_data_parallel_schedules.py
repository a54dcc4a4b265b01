"""The order of computation and communication: named, planned, chosen; always the bits of stock Horovod."""

from __future__ import annotations

import functools
import random
import time
from statistics import median as _median
from typing import Any

import keras
import pytest
import tensorflow as tf

import tf_ooo
from grappler_passes.analysis.steps import classify_steps, split_steps
from grappler_passes.graph.dependencies import GraphIndex
from tests.distributed import training as t
from tests.zoo import needs_keras_3
from tf_ooo.costs.layer_costs import Link
from tf_ooo.errors import OptionsError
from tf_ooo.fit import comparison, timing
from tf_ooo.fit.timing import STEPS
from tf_ooo.modes.data_parallel import planning, scheduled
from tf_ooo.planning.building.step_model import COMMUNICATION

pytest.importorskip("horovod", reason="Horovod is not installed; run: make horovod")
pytestmark = [needs_keras_3, pytest.mark.ranks(2), pytest.mark.takes(60)]

TOGETHER = 2


def rnn() -> keras.Model:
    layers = [keras.layers.Reshape((4, 3)), keras.layers.Dense(5), keras.layers.LSTM(6)]
    return keras.Sequential([keras.Input((12,)), *layers, keras.layers.Dense(4)])


MODELS = {"deep": t.deep, "rnn": rnn}
OPTIMIZERS = {
    "adam": lambda: keras.optimizers.Adam(0.01),
    "adamw": lambda: keras.optimizers.AdamW(0.01),
    "momentum": t.momentum,
}


@functools.cache
def _stock(model: str, optimizer: str, rank: int) -> list[str]:
    trained = t.compiled(MODELS[model](), OPTIMIZERS[optimizer]())
    t.stock_in_apply(trained, t.data(rank))
    return t.bits(trained)


def _against_stock(
    engine: Any, optimizer: str = "momentum", model: str = "deep", together: int = TOGETHER, **options: Any
) -> Any:
    """The bits of stock Horovod.  Returns the callback."""
    trained = t.compiled(MODELS[model](), OPTIMIZERS[optimizer](), steps_per_execution=together)
    callback = t.ours(trained, t.data(engine.rank), options=options)
    known = callback._life.mode.scheduled
    ordered = t.ordered_steps(known)
    steps = known.stock if ordered is None else ordered.steps
    assert t.communications(steps.function(steps.steps)) >= steps.steps * len(trained.trainable_weights)
    assert t.bits(trained) == _stock(model, optimizer, engine.rank)
    assert t.equal_on_all_ranks(engine, trained)
    return callback


def _ordered(callback: Any, together: int = TOGETHER) -> Any:
    """The report of steps that were ordered, in each of which something moved."""
    report = callback.report
    assert not report.fell_back, report.fallback_reason
    assert report.added_edges % together == 0
    t.assert_reordered(report, together)
    return report


def test_reverse_first_k(engine):
    report = _ordered(_against_stock(engine, "adam", schedule="reverse_first_k", k=3))
    assert report.schedule == "reverse_first_k"
    assert report.added_edges >= 8
    assert report.ops["comm"] == 10


def test_fast_forward_with_momentum(engine):
    callback = _against_stock(engine, schedule="fast_forward", profile_steps=1)
    report = _ordered(callback)
    assert report.measured_step_s is not None
    assert report.stock_step_s is not None


def test_one_step_at_a_time(engine):
    """A named schedule also applies where an execution is one step."""
    _ordered(_against_stock(engine, together=1, schedule="reverse_first_k", k=2), together=1)


def test_a_named_schedule_of_an_eager_model_is_refused(engine):
    model = t.compiled(t.deep(), "sgd", run_eagerly=True)
    with pytest.raises(OptionsError, match="runs eagerly"):
        t.ours(model, t.data(engine.rank, t.ROWS), options={"schedule": "reverse_first_k", "k": 1})


def test_k_is_chosen(engine):
    report = _ordered(_against_stock(engine, schedule="reverse_first_k"))
    assert report.predicted_step_s is not None
    assert (report.costs is not None) == (engine.rank == 0), "rank 0 plans, with the costs that it measured"
    assert len(set(engine.gather(report.planned.to_text()))) == 1


def test_search(engine, quick_plans):
    report = _ordered(_against_stock(engine, "adamw", schedule="search"))
    assert report.schedule == "search"
    assert len(set(engine.gather(report.planned.to_text()))) == 1


def test_layers_communicate_in_the_order_of_the_schedule(engine, monkeypatch):
    """A link on which one byte under way is enough: each layer waits until the last but one is through."""
    known = planning.MeasuredLink(Link(1e-4, 1e6), flight_bytes=1.0)
    monkeypatch.setattr(planning, "measure_allreduce", lambda _: known)
    callback = _against_stock(engine, schedule="reverse_first_k")
    result = t.ordered_steps(callback._life.mode.scheduled).rewritten.result
    steps = split_steps(result.graph_def)
    order = list(dict.fromkeys(task.stage for task in result.schedule.lanes[COMMUNICATION]))
    assert sorted(order) == list(range(5))
    assert len(steps) == TOGETHER
    for graph_def, graph in zip(steps, classify_steps(steps), strict=True):
        index = GraphIndex(graph_def)
        sent = [
            [name for name in graph.layers[layer].communication_ops if "Horovod" in graph.ops[name].type]
            for layer in order
        ]
        assert all(len(names) == 2 for names in sent)
        for before, after in zip(sent, sent[2:], strict=False):
            assert all(index.implied(one, other) for one in before for other in after)


def test_short_executions_between_whole_ones(engine):
    """3 steps an epoch, 2 of them together; fewer than an execution has; 4 steps, 3 of them together."""
    for steps_per_execution, steps, unroll in ((2, 3, None), (8, 3, None), (4, 4, 3)):
        model = t.compiled(t.mlp(), t.momentum(), steps_per_execution=steps_per_execution)
        options = {"schedule": "fast_forward", "profile_steps": 1, "unroll": unroll}
        report = t.ours(model, t.data(engine.rank, steps * t.ROWS), epochs=6, options=options).report
        assert report.measured_step_s is not None
        assert report.stock_step_s is not None
        assert not report.fell_back, report.fallback_reason
        assert report.added_edges > 0
        assert t.equal_on_all_ranks(engine, model)


def test_a_short_first_fit_limits_no_later_one(engine):
    model = t.compiled(t.mlp(), t.momentum(), steps_per_execution=3)
    callback = tf_ooo.OOOBackprop(mode="data_parallel", schedule="fast_forward", profile_steps=0)
    for steps in (1, 9):
        t.fit(model, t.data(engine.rank, steps * t.ROWS), [callback])
    assert callback._life.mode.scheduled.steps == 3
    _ordered(callback, 3)


def test_dump_dir_holds_the_graph_after_each_pass(engine, tmp_path):
    """Rank 0 writes them, whose order is that of all; each step by itself, and all of them together."""
    folder = tmp_path / f"rank_{engine.rank}"
    model = t.compiled(t.mlp(), t.momentum(), steps_per_execution=2)
    options = {"schedule": "fast_forward", "profile_steps": 0, "dump_dir": folder}
    _ordered(t.ours(model, t.data(engine.rank, 4 * t.ROWS), epochs=2, options=options), 2)
    written = sorted(str(path.relative_to(folder)) for path in folder.rglob("*.pbtxt"))
    passes = ("00_input", "01_annotate", "02_order")
    expected = [
        "00_input.pbtxt",
        "01_separate.pbtxt",
        "02_steps.pbtxt",
        "03_verify.pbtxt",
        *(f"step_{step:02d}/{name}.pbtxt" for step in range(2) for name in passes),
    ]
    assert written == (expected if engine.rank == 0 else [])
    if written:
        before, after = (folder / name for name in ("01_separate.pbtxt", "03_verify.pbtxt"))
        assert after.read_text().count('input: "^') > before.read_text().count('input: "^')


def test_short_fits_are_profiled_in_the_end(engine, quick_plans):
    model = t.compiled(t.deep(), t.momentum(), steps_per_execution=2)
    callback = tf_ooo.OOOBackprop(mode="data_parallel", schedule="search", profile_steps=0)
    for steps in (2, 2, 12):
        t.fit(model, t.data(engine.rank, steps * t.ROWS), [callback])
    assert _ordered(callback, 2).schedule == "search"


def test_large_gradients_in_slices(engine, quick_plans, monkeypatch):
    """A plan that cuts the largest kernels: three slices of 16 x 16, and of what does not divide by three."""
    known = {}

    def slicing(layers: Any, link: Any, workers: int, *arguments: Any) -> Any:
        options = {"communication": "ordered", "slice_bytes": 400, "evaluations": 50}
        gain = t.gaining("search", layers, link, workers, **options)
        known["parts"] = dict(gain.plan.schedule.parts)
        return gain

    monkeypatch.setattr(planning, "make_plan", slicing)
    report = _ordered(_against_stock(engine, schedule="search"))
    assert engine.rank or known["parts"]
    assert report.ops["comm"] >= 10 + 2 * 4  # of five kernels and biases at least four kernels are cut


def test_auto(engine):
    callback = _against_stock(engine, compare=True)
    report = callback.report
    if report.fell_back:  # no gain, predicted or measured: then nothing need have moved
        assert "gain" in report.fallback_reason or "ms" in report.fallback_reason
    else:
        _ordered(callback)
    said = engine.gather([report.fell_back, report.schedule, report.undecided])
    assert all(of_rank == said[0] for of_rank in said)


def test_auto_goes_back_to_one_step_at_a_time(engine, quick_plans, monkeypatch):
    """Whatever the times are here: one step counts as faster."""
    monkeypatch.setattr(scheduled, "_CLEARLY", 1e9)
    monkeypatch.setattr(comparison, "MOST_STEPS", 4)
    report = _against_stock(engine, compare=True).report
    assert report.fell_back
    assert "one step at a time took" in report.fallback_reason
    assert not report.undecided


def test_a_loops_weight_gradient_is_taken_apart(engine):
    """An LSTM's dO and dW are one loop as TensorFlow makes it."""
    options = {"schedule": "fast_forward", "profile_steps": 1, "unroll": 2}
    report = _ordered(_against_stock(engine, model="rnn", **options), 2)
    assert not report.mixed
    dense, lstm, _ = report.layers
    assert lstm["dW"] > dense["dW"]  # as one loop with dO they are as many


class Delays(keras.layers.Layer):
    """Waits for up to 10 ms, for another time on each rank, going forward and going back."""

    def call(self, x: Any) -> Any:
        @tf.custom_gradient
        def waiting(x: Any) -> Any:
            return _late(x), _late

        return waiting(x)


def _late(x: Any) -> Any:
    def wait(value: Any) -> Any:
        time.sleep(random.random() * 0.01)
        return value

    out = tf.numpy_function(wait, [x], x.dtype)
    out.set_shape(x.shape)
    return out


def test_random_delays(engine, quick_plans):
    """240 delays in 60 steps: no deadlock, and the same weights."""
    random.seed(engine.rank)

    def delayed() -> keras.Model:
        layers = [keras.layers.Dense(16), Delays(), keras.layers.Dense(16), Delays(), keras.layers.Dense(4)]
        return keras.Sequential([keras.Input((12,)), *layers])

    one, ordered = (
        t.compiled(delayed(), keras.optimizers.SGD(0.05), steps_per_execution=TOGETHER) for _ in range(2)
    )
    xy = t.data(engine.rank, 60 * t.ROWS)
    t.ours(one, xy, options={"unroll": 1})
    _ordered(t.ours(ordered, xy, options={"schedule": "search"}))
    assert t.equal_on_all_ranks(engine, ordered)
    assert t.bits(one) == t.bits(ordered)


def test_ranks_are_compared_with_one_alone(engine):
    """Steps that are undone: the same bits, and the report says how much faster all are than one."""
    report = _against_stock(engine, schedule="fast_forward", profile_steps=1, compare=True).report
    assert len(report.alone_s) >= STEPS, report.no_baseline
    assert dict(report.rows())["2 ranks"].startswith(
        f"{2 * _median(report.alone_s) / report.steps_s[0]:.2f}x"
    )
    short = _against_stock(engine, schedule="fast_forward", profile_steps=1).report
    assert "the fit is too short to measure a rank alone" in short.no_baseline


@pytest.mark.parametrize("together", [{}, {"steps_per_execution": 2, "unroll": 1}], ids=["one", "loop"])
def test_steps_that_overlap_with_none_are_compared_with_one_rank_alone(engine, together):
    """Some are timed, then steps of this rank without the others; the bits are those without that."""
    reports, weights = [], []
    for compare in (True, False):
        more = {"steps_per_execution": together.get("steps_per_execution", 1)}
        model = t.compiled(t.mlp(), t.momentum(), **more)
        options = {"compare": compare, "unroll": together.get("unroll")}
        reports.append(t.ours(model, t.data(engine.rank), options=options, epochs=3).report)
        weights.append(t.bits(model))
        assert t.equal_on_all_ranks(engine, model)
    assert weights[0] == weights[1]
    report, without = reports
    assert len(report.alone_s) >= STEPS
    assert [report.no_baseline, report.ranks] == ["", 2]
    assert "one rank with all 2 batches: " in report.headline
    assert "2 ranks" in dict(report.rows())
    assert f"({len(without.steps_s)} steps); not compared: compare=False" in without.headline


def test_a_fit_of_single_steps_that_is_too_short_to_measure_a_rank_alone_says_so(engine):
    short = t.ours(t.compiled(t.mlp(), t.momentum()), t.data(engine.rank), epochs=3).report
    assert "the fit is too short to measure a rank alone" in short.headline


@pytest.mark.parametrize(("together", "steps"), [(1, 4), (1, 66), (TOGETHER, 66)])
def test_a_short_fit_is_compared_with_a_few_steps_of_one_rank_alone(engine, monkeypatch, together, steps):
    monkeypatch.setattr(timing, "FEW", 3)
    model = t.compiled(t.mlp(), t.momentum(), steps_per_execution=together)
    report = t.ours(model, t.data(engine.rank, steps * t.ROWS)).report
    assert len(report.alone_s) >= timing.FEW, report.no_baseline
    assert "one rank with all 2 batches: " in report.ranks_gain.text
    assert t.equal_on_all_ranks(engine, model)


def test_a_step_that_communicates_by_itself_is_not_run_alone(engine):
    model = t.compiled(t.tape_model(t.deep()), t.momentum(), steps_per_execution=TOGETHER)
    options = {"schedule": "fast_forward", "profile_steps": 1, "compare": True}
    report = t.ours(model, t.data(engine.rank), options=options).report
    assert "communicates, and others may not answer" in report.no_baseline
    assert t.equal_on_all_ranks(engine, model)
