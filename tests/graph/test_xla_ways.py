"""Several ways to compile a step: those that fail are left out, the fastest is kept and reported."""

from __future__ import annotations

import dataclasses

import pytest
import tensorflow as tf
from keras import layers
from xla_steps import ASKED, assert_near, plain_step, uncompilable

import tf_ooo
from tests import zoo
from tf_ooo.errors import BackendError, GraphError, MemoryLimitError
from tf_ooo.fit.comparison import REWRITTEN, STOCK
from tf_ooo.modes.by_name import Options
from tf_ooo.modes.compiled import controller
from tf_ooo.modes.compiled.controller import DELAYED, JOINT, RECOMPUTED, ways
from tf_ooo.modes.compiled.session import CONCURRENT, CONCURRENT_FLAGS
from tf_ooo.modes.compiled.step import StreamStep

pytestmark = [zoo.needs_xla_streams, pytest.mark.takes(45)]
ANY = {"any_platform": True, "compare": True}


def failing(error):
    def rewrite(graph_def, fetches, dump_dir):
        raise error

    return rewrite


@pytest.fixture
def only(monkeypatch):
    """Has these ways compared, with other rewrites where they are given."""

    def set_ways(*names, **rewrites):
        made = {way.name: way for way in ways(Options(any_platform=True), 2)}
        chosen = [dataclasses.replace(made[n], rewrite=rewrites.get(n, made[n].rewrite)) for n in names]
        monkeypatch.setattr(controller, "ways", lambda options, steps, session: chosen)
        return made

    return set_ways


def trained(count, sizes=(6,), **options):
    """The step, after so many calls on batches of these sizes in turn, and the model."""
    model, plain, x, y = plain_step()
    step = tf_ooo.function(plain, jit_compile=True, **(ANY | options))
    for number in range(count):
        size = sizes[number % len(sizes)]
        step(tf.constant(x[:size]), tf.constant(y[:size]))
    return step, model


@pytest.fixture(scope="module")
def stock_weights():
    """The weights after so many calls of the stock step on batches of these sizes in turn; compiled once."""
    model, plain, x, y = plain_step()
    step, start = tf.function(plain, jit_compile=True), model.get_weights()

    def after(count, sizes=(6,)):
        model.set_weights(start)  # its optimizer, plain gradient descent, keeps nothing
        for number in range(count):
            size = sizes[number % len(sizes)]
            step(tf.constant(x[:size]), tf.constant(y[:size]))
        return model.get_weights()

    return after


def test_auto_compares_and_keeps_one():
    """Stock, stock with XLA's own concurrency, and ours; of each the report says what XLA made of it."""
    report = trained(40)[0].report
    assert not report.undecided
    assert report.stock_step_s is not None
    for name in (REWRITTEN, JOINT, RECOMPUTED, CONCURRENT):
        assert f"{name} " in report.compared
        assert report.compiled[name]["total_bytes"] > 0
    assert report.compared in report.summary()
    assert report.compiled[CONCURRENT]["flags"] == list(CONCURRENT_FLAGS)
    assert report.compiled[STOCK]["flags"] == []
    assert report.stock_predicted_peak_bytes == report.compiled[STOCK]["total_bytes"]


class TestFailures:
    @pytest.mark.parametrize("error", [ValueError("no such plan"), GraphError("no such plan")])
    def test_one_way_that_fails_leaves_the_others(self, only, error, stock_weights):
        only(REWRITTEN, DELAYED, **{DELAYED: failing(error)})
        step, model = trained(40)
        assert not step.report.undecided
        assert step.report.measured_step_s is not None
        left_out = [note for note in step.report.notes if note.startswith(f"{DELAYED}: left out:")]
        assert left_out
        assert left_out[0].endswith("no such plan")
        assert step.report.moved_ops > 0, "of the way that was compared"
        assert_near(model.get_weights(), stock_weights(40))

    def test_xla_s_own_concurrency_is_compared_where_nothing_can_be_moved(self, only):
        only(
            REWRITTEN, JOINT, CONCURRENT, **dict.fromkeys((REWRITTEN, JOINT), failing(GraphError("nothing")))
        )
        report = trained(40)[0].report
        assert report.measured_step_s is not None
        assert report.compiled[CONCURRENT]["total_bytes"] > 0
        if report.fell_back:
            assert report.fallback_reason.startswith("nothing; ")
        else:
            assert report.way == report.schedule == CONCURRENT
            assert report.moved_ops == 0
            assert f"runs ({CONCURRENT})" in report.state

    def test_a_step_of_one_op(self):
        square = tf_ooo.function(lambda x: x * x, jit_compile=True, **ANY)
        for _ in range(40):
            assert float(square(tf.constant(3.0))) == 9.0
        assert not square.report.undecided
        assert any("not a training graph" in note for note in square.report.notes)

    @pytest.mark.parametrize("names", [(REWRITTEN,), (REWRITTEN, JOINT)])
    def test_ways_that_xla_cannot_compile(self, only, names, stock_weights):
        """The rewrites work, their first runs do not: the stock step trains and nothing is timed as ours."""
        made = only()
        only(*names, **{name: uncompilable(made[name].rewrite) for name in names})
        step, model = trained(6)
        assert step._step.choice == STOCK
        assert "nobody_knows" in step.report.fallback_reason
        assert step.report.measured_step_s is None
        assert step.report.fell_back, "what was moved is in no graph that runs"
        assert_near(model.get_weights(), stock_weights(6))
        with pytest.raises(BackendError, match="nobody_knows"):
            trained(6, strict=True)

    def test_strict_raises_what_is_wrong_with_the_graph_at_once(self):
        square = tf_ooo.function(lambda x: x * x, jit_compile=True, strict=True, **ANY)
        with pytest.raises(GraphError, match="not a training graph"):
            square(tf.constant(3.0))

    def test_a_step_that_cannot_be_traced_is_traced_once_for_all_ways(self):
        _, plain, x, y = plain_step()
        traced = []

        def broken(x, y):
            traced.append(x)
            if len(traced) > 1:  # the first trace is TensorFlow's own, of the stock step
                raise ValueError("not again")
            return plain(x, y)

        step = tf_ooo.function(broken, jit_compile=True, **ANY)
        for _ in range(7):
            step(tf.constant(x), tf.constant(y))
        assert len(traced) == 2
        assert "not again" in step.report.fallback_reason


class TestKept:
    @pytest.mark.parametrize("kept", [REWRITTEN, RECOMPUTED])
    def test_the_report_is_that_of_the_way_that_is_kept(self, only, kept):
        only(REWRITTEN, RECOMPUTED)
        step, _ = trained(8)
        controller, report = step._step, step.report
        controller._keep_rewritten(which=kept)
        (compiled,) = controller.steps[kept]._made.values()
        assert report.rewritten_graph is compiled.step_graph.graph_def
        assert report.moved_ops == compiled.step_graph.result.moved_ops
        assert report.way == kept
        assert ("kept of several ways", kept) in report.rows()

    def test_notes_and_medians_outlive_another_shape(self, only):
        only(REWRITTEN, JOINT, **{JOINT: failing(ValueError("no such plan"))})
        step, _ = trained(6)
        step._step._keep_rewritten(which=REWRITTEN)
        step.report.notes.append("of somebody else")
        _, _, x, y = plain_step()
        before = step.report.rewritten_graph
        step(tf.constant(x[:4]), tf.constant(y[:4]))
        assert step.report.rewritten_graph is not before
        notes = "\n".join(step.report.notes)
        assert "of somebody else" in notes
        assert notes.count("no such plan") == notes.count("barriers") == 1

    def test_uneven_batches_are_compared_with_their_like(self, only, stock_weights):
        """Batches of six and of two take turns: each way runs on both."""
        only(REWRITTEN)
        step, model = trained(40, sizes=(6, 2))
        times = step._step.comparison.times
        assert times.done
        for runs in times._rounds[0]._runs.values():
            assert runs.keys() == {STOCK, REWRITTEN}
        assert step.report.moved_ops > 0
        assert_near(model.get_weights(), stock_weights(40, (6, 2)))


class TestMemoryLimit:
    def limited(self, monkeypatch, over, limit_bytes=10**6):
        """Ways that XLA says need more than the limit, as the stock step does."""

        def check(self, made, args, kwargs):
            self.session.stock_bytes["all"] = 2 * limit_bytes
            if self.way.name in over:
                raise MemoryLimitError(limit_bytes, limit_bytes + len(self.way.name))

        monkeypatch.setattr(StreamStep, "_check_memory", check)

    def test_the_way_that_stays_within_it_is_kept(self, monkeypatch, only, stock_weights):
        only(REWRITTEN, RECOMPUTED)
        self.limited(monkeypatch, {REWRITTEN})
        step, model = trained(4, sizes=(6, 4), memory_limit_bytes=10**6)
        assert step._step.choice == step.report.way == RECOMPUTED
        assert "the stock order's predicted peak" in step.report.kept_because
        assert step.report.moved_ops > 0
        assert_near(model.get_weights(), stock_weights(4, (6, 4)))

    def test_stock_with_concurrency_may_be_the_one(self, monkeypatch, only):
        only(REWRITTEN, CONCURRENT)
        self.limited(monkeypatch, {REWRITTEN})
        assert trained(2, memory_limit_bytes=10**6)[0].report.way == CONCURRENT

    def test_none_does(self, monkeypatch, only):
        only(REWRITTEN, RECOMPUTED)
        self.limited(monkeypatch, {REWRITTEN, RECOMPUTED})
        with pytest.raises(MemoryLimitError):
            trained(1, memory_limit_bytes=10**6)

    def test_another_takes_over_for_larger_inputs(self, monkeypatch, only):
        only(REWRITTEN, RECOMPUTED)
        self.limited(monkeypatch, set())
        step, _ = trained(2, sizes=(4,), memory_limit_bytes=10**6)
        assert step._step.choice == REWRITTEN
        self.limited(monkeypatch, {REWRITTEN})
        _, _, x, y = plain_step()
        step(tf.constant(x), tf.constant(y))
        assert step._step.choice == step.report.way == RECOMPUTED
        assert step.report.kept_because == f"{REWRITTEN} needs more than memory_limit_bytes"

    def test_new_inputs_while_a_failed_way_is_gone(self, only, stock_weights):
        """They are planned first: with a way that is still there."""
        only(REWRITTEN, RECOMPUTED, **{REWRITTEN: failing(ValueError("no such plan"))})
        step, model = trained(3, sizes=(6, 4, 5), memory_limit_bytes=10**8)
        assert f"{REWRITTEN}: left out: ValueError: no such plan" in step.report.notes
        assert step.report.moved_ops > 0, f"by {RECOMPUTED}"
        assert_near(model.get_weights(), stock_weights(3, (6, 4, 5)))


def test_options_that_have_no_effect_are_named(tmp_path):
    report = trained(2, dump_dir=tmp_path, batch_size=6)[0].report
    said = [note for note in report.notes if "has no effect with jit_compile=True" in note]
    assert [note.split("=")[0] for note in said] == ["batch_size"]
    # Whereas this has: a folder for each way that was compiled.
    assert (tmp_path / "rewritten" / "00_input.pbtxt").exists()


def test_fit_compares_batches_of_one_size(only):
    """An epoch is a batch of four and one of two."""
    only(REWRITTEN)
    weights = []
    for callbacks in ([], [tf_ooo.OOOBackprop(**ANY)]):
        model, x, y = zoo.compiled(
            lambda: zoo.stack(zoo.features(7), layers.Dense(5), layers.Dense(4)), "sgd", jit_compile=True
        )
        zoo.make_variables(model, x, y)
        model.fit(x, y, batch_size=4, epochs=6, shuffle=False, verbose=0, callbacks=callbacks)
        weights.append(model.get_weights())
    assert callbacks[0].report.moved_ops > 0
    assert_near(*weights)
    runs = callbacks[0]._life.mode.controller.comparison.times._rounds[0]._runs
    assert sorted(samples for _, samples in runs) == [2.0, 4.0]
    assert all(turns.keys() == {STOCK, REWRITTEN} for turns in runs.values())


@pytest.mark.parametrize("strict", [True, False])
def test_one_way_has_no_name_in_the_report(strict):
    assert trained(1, **(ASKED | {"strict": strict}))[0].report.way == ""
