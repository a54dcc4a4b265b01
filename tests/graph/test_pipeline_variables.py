"""Variables move to their stages' devices during a fit and come back, whatever ends it; on three devices."""

from __future__ import annotations

import sys
import zipfile

import numpy as np
import pytest

from tests.graph.pipeline_fits import Training, assert_equal_bits, compiled_model, pipelined, places
from tests.graph.pipeline_graphs import Rewritten, assert_in_order
from tests.graph.pipeline_models import EVEN, X, Y, adam, mlp
from tests.zoo import keras

pytestmark = [pytest.mark.devices(3), pytest.mark.takes(40)]

ALL = ["CPU:0", "CPU:1", "CPU:2"]
HOME = ["CPU:0"]


@pytest.fixture(scope="module")
def training():
    """Return the training of a model that was taken apart before."""
    training = Training(mlp, adam, EVEN, epochs=1)
    training.piped(pipelined("gpipe"))
    return training


def test_during_a_fit_and_after_it(training):
    callback, during = training.prepared(pipelined("zb_h1")), []
    seen = keras.callbacks.LambdaCallback(
        on_epoch_end=lambda epoch, logs: during.append(places(training.model))
    )
    training.fit(callback, seen, epochs=2)
    assert during == [ALL, ALL]
    assert places(training.model) == HOME


def test_files_that_are_written_meanwhile(training, tmp_path):
    """The bits of afterwards; whole models load where nobody knows us."""
    weights, whole = str(tmp_path / "weights.weights.h5"), str(tmp_path / "model.keras")
    saving = (
        keras.callbacks.ModelCheckpoint(weights, save_weights_only=True),
        keras.callbacks.ModelCheckpoint(whole),
    )
    places_then = []
    seen = keras.callbacks.LambdaCallback(
        on_epoch_end=lambda epoch, logs: places_then.append(places(training.model))
    )
    training.fit(training.prepared(pipelined("zb_h1")), *saving, seen)
    assert places_then == [ALL]
    other = mlp()
    other.load_weights(weights)
    assert_equal_bits(training.model.get_weights(), other.get_weights())
    with zipfile.ZipFile(whole) as archive:
        texts = [archive.read(name) for name in archive.namelist() if name.endswith(".json")]
    assert len(texts) == 2
    assert not any(b"ooo" in text for text in texts)
    loaded = loaded_without_us(whole)
    assert_equal_bits(training.model.get_weights(), loaded.get_weights())
    assert_equal_bits(*([np.asarray(v) for v in m.optimizer.variables] for m in (training.model, loaded)))


def loaded_without_us(path):
    """The model of a file, while none of our modules can be found."""
    ours = {name: sys.modules[name] for name in sys.modules if name.split(".")[0] in OUR_PACKAGES}
    for name in ours:
        sys.modules[name] = None  # an import fails
    try:
        return keras.models.load_model(path)
    finally:
        sys.modules.update(ours)


OUR_PACKAGES = ("tf_ooo", "keras_callbacks", "grappler_passes")


class Interrupt(keras.callbacks.Callback):
    """Raises in one of its methods, the first time the model is distributed; notes where its weights were."""

    def __init__(self, method, error):
        super().__init__()
        self.method, self.error, self.seen = method, error, []
        setattr(self, method, self.stop)

    def stop(self, *args, **kwargs):
        now = places(self.model)
        if len(now) > 1:
            self.seen += now
            raise self.error


@pytest.mark.parametrize(
    ("method", "error"),
    [
        pytest.param("on_train_batch_end", RuntimeError("stopped here"), id="a_callback"),
        pytest.param("on_epoch_end", RuntimeError("stopped here"), id="the_end_of_an_epoch"),
        pytest.param("on_test_batch_begin", RuntimeError("stopped here"), id="the_validation"),
        pytest.param("on_train_batch_begin", KeyboardInterrupt(), id="ctrl_c"),
    ],
)
def test_interruptions(training, method, error):
    raising = Interrupt(method, error)
    with pytest.raises(type(error)) as raised:
        training.fit(training.prepared(pipelined("gpipe")), raising, epochs=3, validation_data=EVEN)
    assert raised.value is error
    # The error's frames are still alive: nothing needs the garbage collector.
    assert places(training.model) == HOME
    assert raising.seen == ALL


def test_a_callback_that_trains_by_itself(training):
    model = training.model
    meanwhile = keras.callbacks.LambdaCallback(
        on_train_batch_end=lambda n, logs: len(places(model)) > 1 and model.train_on_batch(X[:4], Y[:4])
    )
    callback = training.prepared(pipelined("gpipe"))
    training.fit(callback, meanwhile, epochs=3)
    assert places(model) == HOME
    assert any(
        note.startswith("train_on_batch, or make_train_function, was called")
        for note in callback.report.notes
    )


class Failing(keras.Model):
    """Raises in a line of Keras' own fit."""

    fails = False

    def __init__(self):
        super().__init__()
        self.inside = mlp()

    def call(self, x):
        return self.inside(x)

    def _should_eval(self, *args):
        if self.fails:
            raise RuntimeError("stopped between two calls")
        return super()._should_eval(*args)


def test_keras_own_lines_are_not_seen():
    """The next fit puts the variables back, then."""
    training = Training(Failing, adam, EVEN, epochs=1)
    model = training.model
    model.fails = True
    with pytest.raises(RuntimeError, match="stopped between two calls"):
        training.fit(pipelined("gpipe"), validation_data=(X, Y))
    assert places(model) == ALL
    model.fails = False
    before = model.get_weights()
    model.fit(X, Y, batch_size=16, verbose=0)
    assert places(model) == HOME
    assert not np.array_equal(before[0], model.get_weights()[0])


class FailingAtTheEnd(keras.optimizers.Adam):
    """Raises where fit tells it that training is over."""

    def finalize_variable_values(self, variables):
        raise RuntimeError("stopped at the end")


def test_an_optimizer_that_fails_at_the_end():
    model = compiled_model(mlp, lambda: FailingAtTheEnd(1e-2), metrics=None)
    with pytest.raises(RuntimeError, match="stopped at the end"):
        model.fit(X, Y, batch_size=16, verbose=0, callbacks=[pipelined("gpipe")])
    assert places(model) == HOME


def test_data_that_end_early_with_an_error(training):
    def rows():
        for _ in range(3):
            yield X[:16], Y[:16]
        raise ValueError("no more data")

    during = []
    seen = keras.callbacks.LambdaCallback(
        on_train_batch_end=lambda n, logs: during.append(places(training.model))
    )
    callback = training.prepared(pipelined("gpipe"))
    with pytest.raises(Exception, match="no more data"):
        training.model.fit(rows(), verbose=0, epochs=2, steps_per_epoch=5, callbacks=[callback, seen])
    assert ALL in during
    assert places(training.model) == HOME


def test_fit_again_and_several_steps_an_execution(training):
    """Two fits with one callback, validation within: the weights of one fit of as many epochs."""
    whole = training.piped(pipelined("zb_h1"), epochs=4)
    grouped = Training(mlp, adam, EVEN, epochs=2, steps_per_execution=3)
    callback = pipelined("zb_h1")
    grouped.fit(callback)
    half = grouped.model.get_weights()
    settings = {"batch_size": 16, "epochs": 2, "verbose": 0, "shuffle": False}
    history = grouped.model.fit(X, Y, **settings, callbacks=[callback], validation_data=EVEN).history
    assert_equal_bits(whole.weights, grouped.model.get_weights())
    assert not np.array_equal(half[0], whole.weights[0])
    loss, _ = grouped.model.evaluate(X, Y, batch_size=16, verbose=0)
    assert abs(history["val_loss"][-1] - loss) < 1e-6
    assert len(callback.report.pipeline["step_s"]) > 3
    assert_in_order(callback.report, 3, weights_everywhere=False)
    assert places(grouped.model) == HOME


def test_larger_batches_are_planned_for_more_micro_batches():
    training = Training(mlp, adam, (X[:12], Y[:12]), epochs=1, batch_size=2)
    callback = pipelined("zb_h1")
    training.fit(callback)
    assert callback.report.planned.microbatches == 2
    training.model.fit(X, Y, batch_size=16, epochs=1, verbose=0, shuffle=False, callbacks=[callback])
    assert callback.report.planned.microbatches == 4
    assert Rewritten(callback.report).unordered() == []
    assert places(training.model) == HOME
