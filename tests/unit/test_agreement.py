"""Ranks that differ are refused, in words that say who and where; and what may differ is let pass."""

from __future__ import annotations

from types import SimpleNamespace

import keras
import numpy as np
import pytest
import tensorflow as tf

from grappler_passes.graph.training_graph import Layer, Op, OpKind, TrainingGraph, Variable
from tests import zoo
from tf_ooo.compat import keras_compiled
from tf_ooo.errors import GraphError, OptionsError
from tf_ooo.fit.comparison import REWRITTEN, STOCK, StepComparison, slowest
from tf_ooo.fit.mode import Experiment, Training
from tf_ooo.modes.by_name import Options
from tf_ooo.modes.data_parallel import agreement, profiling
from tf_ooo.modes.data_parallel.ordering import digest
from tf_ooo.modes.data_parallel.profiling import Ordered, OrderedSteps, Planned, Profiling, Single
from tf_ooo.modes.data_parallel.scheduled import ScheduledSteps
from tf_ooo.planning.model.schedule import Schedule, Task, TaskList
from tf_ooo.report.report import Report
from tf_ooo.rewriting.result import RewriteResult


class Told:
    """An engine whose other ranks say what they are made to say."""

    def __init__(self, *others):
        self.others, self.rank, self.size = others, 0, 1 + len(others)

    def gather(self, value):
        return [value, *self.others]


def refused(mine, *others):
    with pytest.raises(OptionsError) as caught:
        agreement.refuse_different([mine, *others])
    return str(caught.value).removeprefix("the ranks do not train the same thing: ")


def test_ranks_that_say_the_same_go_on():
    mine = {"a": 1, "b": [[1, 2], [3]], "c": {"d": None}}
    agreement.refuse_different([mine])
    agreement.refuse_different([mine, dict(mine), dict(mine)])


def test_each_difference_is_named():
    mine = {"a": 1, "b": [1, 2], "c": {"d": {"e": "x"}}}
    assert refused(mine, mine, mine | {"a": 2}) == "rank 2 has a 2, rank 0 has 1"
    assert refused(mine, mine | {"b": [1, 3]}) == "rank 1 has b [1, 3], rank 0 has [1, 2]"
    assert refused(mine, mine | {"c": {"d": {"e": "y"}}}) == 'rank 1 has c.d.e "y", rank 0 has "x"'
    assert refused(mine, {"b": [1, 2], "c": mine["c"]}) == "rank 1 has a null, rank 0 has 1"
    assert refused({"a": 1}, {"a": 1, "z": 0}) == "rank 1 has z 0, rank 0 has null"
    assert refused({"a": {"b": 1}}, {"a": 3}) == 'rank 1 has a 3, rank 0 has {"b": 1}'


def test_lists_of_parts_are_compared_part_by_part():
    mine = {"layers": [{"class": "Dense"}, {"class": "ReLU"}], "weights": [[3, "f"], [4, "g"]]}
    other = {"layers": [{"class": "Dense"}, {"class": "ELU"}], "weights": [[3, "f"], [4, "h"]]}
    assert refused(mine, other) == (
        'rank 1 has layers[1].class "ELU", rank 0 has "ReLU"; '
        'rank 1 has weights[1] [4, "h"], rank 0 has [4, "g"]'
    )
    fewer = {"layers": mine["layers"][:1], "weights": mine["weights"]}
    assert refused(mine, fewer) == "rank 1 has 1 layers, rank 0 has 2"
    # A list of plain values is shown whole, or how it begins.
    assert refused({"a": [1, 2]}, {"a": [1]}) == "rank 1 has a [1], rank 0 has [1, 2]"
    assert refused({"a": [[1], 2]}, {"a": []}) == "rank 1 has 0 a, rank 0 has 2"
    assert refused({"a": 3}, {"a": [[1]]}) == "rank 1 has a [[1]], rank 0 has 3"


@pytest.mark.parametrize(("length", "shown"), [(78, "x" * 78 + '"'), (79, "x" * 76 + "...")])
def test_long_values_are_cut(length, shown):
    assert refused({"a": "x" * length}, {"a": "y"}) == f'rank 1 has a "y", rank 0 has "{shown}'


def test_three_differences_are_shown():
    mine, other = dict.fromkeys("abc", 1), dict.fromkeys("abc", 2)
    assert refused(mine, other).count(";") == 2
    assert "more" not in refused(mine, other)
    four = refused(mine | {"d": 1}, other | {"d": 2})
    assert four.endswith("rank 1 has c 2, rank 0 has 1 (and 1 more differences)")
    five = refused(mine | {"d": 1, "e": 1}, other | {"d": 2, "e": 2})
    assert five.endswith("rank 1 has c 2, rank 0 has 1 (and 2 more differences)")


def test_what_is_said_of_a_batch():
    """Rows count, other sizes do not; what has no shape, or an unknown one, says nothing."""
    f, i = tf.float32.as_datatype_enum, tf.int64.as_datatype_enum
    spec = ({"a": tf.TensorSpec((8, 3)), "b": tf.TensorSpec((None, 2))}, tf.TensorSpec((), tf.int64))
    assert agreement.batch_of(spec) == [[f, 2, 8], [f, 2, None], [i, 0, None]]
    assert agreement.batch_of([tf.TensorSpec(None), None, np.zeros((5,), "int64")]) == [[i, 1, 5]]
    assert agreement.batch_of(tf.SparseTensorSpec((4, 7))) == [[f, 2, 4]]


def test_what_may_differ_is_left_out_of_a_config():
    config = {
        "name": "dense_7", "seed": 3, "units": 4, "inner": [{"vocabulary": "x", "rate": 0.5}, float("nan")],
        "batch_shape": (8, 3), "function": {"class_name": "__lambda__", "config": {"value": "gA=="}},
        "own": {"class_name": "__lambda__", "config": 1}, "pair": (1, {"name": "n"}),
    }  # fmt: skip
    assert agreement._nameless(config) == {
        "units": 4, "inner": [{"rate": 0.5}, "nan"], "own": "lambda", "pair": [1, {}],
    }  # fmt: skip
    assert agreement._nameless(2.5) == 2.5
    assert agreement._nameless({"class_name": "Dense", "config": {"units": 3}})["config"] == {"units": 3}


def test_losses_are_told_by_name():
    def own(y, p):
        return y - p

    class Loss:
        pass

    losses = {"a": "mse", "b": [own, None, (Loss(),)]}
    assert agreement._loss(losses) == {"a": "mse", "b": ["own", None, ["Loss"]]}
    assert agreement._loss(None) is None


def test_learning_rates_may_differ_and_their_schedules_may_not():
    config = {
        "name": "n",
        "learning_rate": 0.1,
        "inner": {"learning_rate": 0.2, "momentum": 0.9, "name": "m"},
    }
    assert agreement._without_rates(config) == {"inner": {"momentum": 0.9}}
    schedule = {"learning_rate": {"class": "Decay", "learning_rate": 0.1, "name": "d"}, "clip": [1]}
    assert agreement._without_rates(schedule) == schedule | {"clip": [1]}


def test_an_optimizer_by_its_config():
    class Odd(keras.optimizers.SGD):
        def get_config(self):
            return {"momentum": np.float32(0.5), "rule": object(), "learning_rate": 0.1, "name": "n"}

    class Shy(keras.optimizers.SGD):
        def get_config(self):
            raise NotImplementedError

    for optimizer, own in (
        (Odd(), {"momentum": 0.5, "rule": "object"}),
        (Shy(), {"config": "not serializable"}),
    ):
        count = len(keras_compiled.state_of(optimizer))
        said = agreement._optimizer(optimizer)
        assert said == {"class": type(optimizer).__name__, "state variables": count} | own


@pytest.mark.skipif(not zoo.KERAS_3, reason="config of Keras 3")
def test_what_is_said_of_a_model():
    def described(units=4, activation="relu", loss="mse", trainable=True, **more):
        model = keras.Sequential([keras.Input((3,)), keras.layers.Dense(units, activation=activation)])
        model.layers[0].trainable = trainable
        model.compile(keras.optimizers.SGD(0.1, momentum=0.5), loss, jit_compile=False, **more)
        return vars(agreement.description_of(model, [model.optimizer], {"op": "Sum"}))

    mine = described()
    assert mine["weights"] == [[[3, 4], "float32", True, "kernel"], [[4], "float32", True, "bias"]]
    assert mine["versions"]["tensorflow"] == tf.__version__
    assert mine["versions"]["keras"] == f"{keras.__name__} {keras.__version__}"
    assert mine["versions"]["python"].count(".") == 1
    assert (mine["loss"], mine["steps_per_execution"], mine["run_eagerly"]) == ("mse", 1, False)
    dense = next(layer for layer in mine["layers"] if layer["class"] == "Dense")
    assert (dense["units"], dense["activation"]) == (4, "relu")
    assert "name" not in dense
    assert mine["optimizers"][0]["class"] == "SGD"
    assert mine["optimizers"][0]["momentum"] == 0.5
    agreement.refuse_different([mine, described()])
    for other, said in (
        (described(units=5), "weights[0]"),
        (described(activation="elu"), "activation"),
        (described(loss="mae"), "loss"),
        (described(trainable=False), "weights"),
        (described(steps_per_execution=2), "steps_per_execution"),
        (described(run_eagerly=True), "run_eagerly"),
        (described(loss_weights=[2.0]), "loss_weights"),
    ):
        assert said in refused(mine, other)


@pytest.mark.skipif(not zoo.KERAS_3, reason="config of Keras 3")
def test_settings_of_losses_and_what_layers_have_learned():
    def described(from_logits=True, words=("a", "b"), scale=1.0, class_weight=None):
        inputs = keras.Input((1,), dtype="string"), keras.Input((3,))
        normalization = keras.layers.Normalization()
        normalization.adapt(np.arange(12.0).reshape(4, 3) * scale)
        looked_up = keras.layers.StringLookup(vocabulary=list(words))(inputs[0])
        both = [keras.layers.Embedding(9, 3)(looked_up), normalization(inputs[1])]
        model = keras.Model(inputs, keras.layers.Dense(2)(both[0][:, 0] + both[1]))
        loss = keras.losses.SparseCategoricalCrossentropy(from_logits=from_logits)
        model.compile("sgd", loss, jit_compile=False)

        def fit(class_weight):
            return vars(agreement.description_of(model, [model.optimizer], {}))

        return fit(class_weight)

    mine = described()
    agreement.refuse_different([mine, described()])
    for other, said in (
        (described(from_logits=False), "rank 1 has loss.from_logits false, rank 0 has true"),
        (described(words=("b", "a")), "vocabulary"),
        (described(scale=2.0), "learned statistics"),
        (described(class_weight={0: 1.0, 1: 3.0}), "class_weight"),
    ):
        assert said in refused(mine, other)


@pytest.mark.skipif(not zoo.KERAS_3, reason="config of Keras 3")
def test_of_a_layer_with_parts_the_parts_speak():
    class Own(keras.layers.Layer):
        def get_config(self):
            return {"secret": 1}

    class Shy(keras.layers.Dense):
        def get_config(self):
            raise NotImplementedError

    assert agreement._layer(Own()) == {"class": "Own"}
    assert agreement._layer(Shy(3)) == {"class": "Shy"}
    inner = keras.layers.Dense(3)
    wrapped = agreement._layer(keras.layers.TimeDistributed(inner))
    assert wrapped == {"class": "TimeDistributed"}
    assert agreement._layer(inner)["units"] == 3


def result_of(stages=(1, 0), kinds=(OpKind.WEIGHT_GRAD,), layers=((1, 0, 0),), shape=(3,), edges=4):
    """Return what a rank has made of its graph."""
    ops = {f"op{n}": Op(f"op{n}", "Any", kind) for n, kind in enumerate(kinds)}
    rows = tuple(
        Layer(i, (f"v{i}",), ("w",) * counts[0], ("u",) * counts[1], ("c",) * counts[2])
        for i, counts in enumerate(layers)
    )
    variables = tuple(Variable(f"v{i}", f"h{i}", shape) for i in range(len(layers)))
    schedule = Schedule("data_parallel", "p", {(0, 0): TaskList([Task("dW", stage) for stage in stages])})
    return RewriteResult(TrainingGraph(ops, rows, variables), schedule, object(), 0, edges, 0.0)


OTHER_PLANS = {
    "order": {"stages": (0, 1)},
    "ops": {"kinds": (OpKind.UPDATE,)},
    "number of ops": {"kinds": (OpKind.WEIGHT_GRAD,) * 2},
    "dW": {"layers": ((2, 0, 0),)},
    "updates": {"layers": ((1, 1, 0),)},
    "communication": {"layers": ((1, 0, 1),)},
    "layers": {"layers": ((1, 0, 0), (1, 0, 0))},
    "shapes": {"shape": (4,)},
    "edges": {"edges": 5},
}


@pytest.mark.parametrize("other", OTHER_PLANS)
def test_another_plan_has_another_digest(other):
    mine, theirs = digest(result_of()), digest(result_of(**OTHER_PLANS[other]))
    assert mine == digest(result_of())
    assert mine != theirs
    assert len(mine) == len(theirs) == 8


class Requested:
    """Steps whose graphs a request has just rewritten; nothing is compiled."""

    def __init__(self, result, failure=""):
        self.result = self.latest = result
        self.failure, self.failed, self.closed = failure, "", False
        self.steps = SimpleNamespace(traced=0, first_s=0.0)

    def close(self):
        self.closed = True


def ordered_of(engine, result, failure=""):
    return OrderedSteps(Requested(result, failure), engine, Report(mode="data_parallel"))


def said(result, failed=""):
    return Ordered(failed, digest(result)).encoded()


def test_ranks_with_the_same_digest_run_the_planned_order():
    ordered = ordered_of(Told(said(result_of()), said(result_of())), result_of())
    planned = object()
    ordered._report.change(timeline=planned)
    assert not ordered.why_apart()
    assert ordered._report.timeline is planned  # the page and the trace draw it
    assert ordered._report.added_edges == 4


def test_a_rank_with_another_digest_is_named():
    """Rank 2 of 4 and rank 3: the first."""
    other = said(result_of(stages=(0, 1)))
    ordered = ordered_of(Told(said(result_of()), other, other), result_of())
    assert ordered.why_apart() == "rank 2 has another graph than rank 0 (2 of 4 have)"


def test_a_rank_that_failed_is_heard():
    assert ordered_of(Told(said(result_of(), "no plan here")), result_of()).why_apart() == "no plan here"
    assert ordered_of(Told(said(result_of())), result_of(), "it broke").why_apart() == "it broke"


def steps_of(engine, strict=False, **options):
    """Scheduled steps that have been profiled; nothing is compiled."""
    steps = object.__new__(ScheduledSteps)
    steps.functions, steps.report = SimpleNamespace(engine=engine), Report(mode="data_parallel")
    steps.options = Options(mode="data_parallel", strict=strict, **options)
    steps.comparison = StepComparison(steps.options, steps.report, ranks=engine)
    steps._stock_predicted_s = None
    steps.stock, steps.steps = SimpleNamespace(traced=0), 2
    steps.experiment = Experiment(Training())
    return steps


def test_ranks_that_run_other_graphs_go_back():
    steps, ordered = steps_of(Told()), ordered_of(Told(), result_of())
    steps.cannot_order("they differ", ordered)
    assert steps.report.fell_back
    assert steps.report.fallback_reason == "they differ"
    assert ordered.rewritten.closed
    assert steps.experiment.phase.step is steps.stock
    with pytest.raises(GraphError, match="they differ"):
        steps_of(Told(), strict=True).cannot_order("they differ", ordered)


def test_what_auto_did_without_is_noted():
    """On all ranks, by rank 0's word; nothing is predicted to be gained here."""
    steps = steps_of(Told(), schedule="auto", profile_steps=0)
    plan = result_of().schedule.to_text()
    notes = ["schedule x was not compared: too odd"]
    steps.take(Planned(schedule=plan, step_s=2.0, stock_s=2.0, notes=notes), Single(steps.stock))
    assert steps.report.notes == ["schedule x was not compared: too odd"]
    assert steps.report.fallback_reason == "no gain is predicted (0.0%)"


def test_a_small_predicted_gain_is_tried():
    steps, ordered = steps_of(Told(), schedule="auto", profile_steps=0), ordered_of(Told(), result_of())
    steps._ordered_steps = lambda plan, schedule: ordered
    plan = Planned(schedule=result_of().schedule.to_text(), step_s=1.98, stock_s=2.0)
    steps.take(plan, Single(steps.stock))
    assert not steps.report.fell_back
    assert steps.experiment.phase.ordered is ordered


@pytest.mark.parametrize("strict", [False, True])
@pytest.mark.parametrize(
    ("mine", "theirs", "said"),
    [
        ("", "no graph there", "no graph there"),
        ("", "", "GraphError: the step was not profiled: nobody ran it"),
        ("here", "", "here"),
    ],
)
def test_where_a_rank_has_no_plan_all_keep_the_stock_order(monkeypatch, strict, mine, theirs, said):
    """Rank 0 has no profile, unless it has failed before; strict: all raise."""
    steps = steps_of(Told(Planned(failed=theirs).encoded()), strict=strict, schedule="fast_forward")
    probe = Requested(None, "nobody ran it")
    probe.failed, probe.steps = mine, lambda batches: "logs"
    probe.steps.first_s = 0.0
    monkeypatch.setattr(profiling, "RewrittenSteps", lambda *arguments: probe)
    steps.functions.model = steps.functions.source = None
    profile = Profiling(steps.functions, steps.options, steps.report, 2, steps.take)
    if theirs:
        profile._plan_on_rank_0 = lambda link: Planned()
    if strict:
        with pytest.raises(GraphError, match=f"^no plan: {said}$"):
            profile.run(["batch"])
    else:
        assert profile.run(["batch"]) == "logs"
    assert probe.closed
    assert steps.report.fell_back
    assert steps.report.fallback_reason == f"no plan: {said}"
    assert steps.experiment.phase.step is steps.stock


def test_the_slowest_rank_counts():
    assert slowest([[1.0, 5.0, 2.0], [3.0, 4.0, 2.5]]) == [3.0, 5.0, 2.5]
    assert slowest(iter([[1.0], [0.5], [0.75]])) == [1.0]
    # It has as many samples as all have.
    assert slowest([[1.0, 2.0], [3.0]]) == [3.0]


# So many pairs are surely enough.
PAIRS = 10


def decided(mine, *others):
    """(whether the planned order is kept, the report) of each rank's seconds, ``{which: seconds}``."""
    engine, ordered = Told(*others), ordered_of(Told(), result_of())
    steps = steps_of(engine, schedule="auto")
    single = Single(steps.stock, [mine["single"]])
    for pair in range(1 + PAIRS):  # the first one warms up
        for which in (STOCK, REWRITTEN):
            engine.others = [(theirs[which] if pair else 99.0, False) for theirs in others]
            steps.comparison.add(which, mine[which], traced=False)
    engine.others = [{"single": [theirs["single"]]} for theirs in others]
    steps.decide(steps.comparison.verdict({"single": single.seconds}), ordered, single)
    return not steps.report.fell_back, steps.report


def times(stock_s, rewritten_s, single_s=9.0):
    return {STOCK: stock_s, REWRITTEN: rewritten_s, "single": single_s}


def test_the_planned_order_has_to_be_faster_on_the_slowest_rank():
    kept, report = decided(times(1.0, 0.5), times(0.9, 0.4))
    assert kept
    assert (report.stock_step_s, report.measured_step_s) == (1.0, 0.5)
    # Faster here, slower there: every rank waits for the slower.
    kept, report = decided(times(1.0, 0.5), times(1.0, 1.2))
    assert not kept
    assert (report.stock_step_s, report.measured_step_s) == (1.0, 1.2)
    kept, report = decided(times(1.0, 1.2), times(1.3, 0.5))
    assert kept
    assert (report.stock_step_s, report.measured_step_s) == (1.3, 1.2)


def test_one_step_at_a_time_has_to_be_faster_on_the_slowest_rank():
    assert decided(times(1.0, 0.5, 0.3), times(0.9, 0.4, 0.6))[0]
    kept, report = decided(times(1.0, 0.5, 0.3), times(0.9, 0.4, 0.4))
    assert not kept
    assert report.fallback_reason == "one step at a time took 400.00 ms, several together 500.00 ms"
