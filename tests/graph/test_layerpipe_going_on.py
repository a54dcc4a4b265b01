"""``mode="layerpipe"``: nothing is on its way where a fit ends, is looked into, or goes on."""

from __future__ import annotations

from unittest import mock

import numpy as np
import pytest

import tf_ooo
from tests.graph.layerpipe_by_hand import same
from tests.graph.layerpipe_fit import (
    BATCH,
    Saves,
    SavesEpoch,
    SavesFile,
    convnet,
    fitted_spread,
    layerpipe,
    reloaded,
    samples,
    shortcuts,
    state_of,
    trained_weights,
    with_momentum,
)
from tests.graph.layerpipe_spread import fit_spread
from tests.zoo import keras
from tf_ooo.costs.table import CostTable
from tf_ooo.fit import distributed
from tf_ooo.hosts import cluster

pytestmark = [pytest.mark.devices(4), pytest.mark.takes(50)]


# -- looked into within an epoch -------------------------------------------------------------------


class SavesWeights(Saves):
    """Saves the weights after that batch, then takes them."""

    folder = None

    def take(self):
        self.model.save_weights(self.folder / f"{self.batch}.weights.h5")
        super().take()


class Predicts(Saves):
    """Predicts after that batch, before the weights are taken."""

    def on_train_batch_end(self, batch, logs=None):
        if self.seen + 1 == self.batch:
            self.model.predict(samples()[0], verbose=0)
        super().on_train_batch_end(batch, logs)


class Evaluates(Saves):
    """Evaluates after that batch, then takes the weights."""

    def take(self):
        self.model.evaluate(*samples(), verbose=0)
        super().take()


class Gets(Saves):
    """Asks the model for its weights after that batch, then takes them."""

    def take(self):
        self.model.get_weights()
        super().take()


class Writes(Saves):
    """Saves the model after that batch, then takes the weights."""

    folder = None

    def take(self):
        self.model.save(self.folder / "model.keras")
        super().take()


class TrainsByItself(Saves):
    """Calls train_on_batch after that batch, with rows that weigh nothing, then takes the weights."""

    def take(self):
        x, y = samples()
        self.model.train_on_batch(x[:3], y[:3], sample_weight=np.zeros(3, np.float32))
        super().take()
        self.updates -= 1


class Stops(Saves):
    """Ends training after that batch, and takes the weights at the end of the epoch."""

    def on_train_batch_end(self, batch, logs=None):
        self.model.stop_training = batch + 1 >= self.batch

    def on_epoch_end(self, epoch, logs=None):
        self.take()


class Anew(keras.callbacks.Callback):
    """Each epoch starts from the same state, with an observer of its own: as so many fits, traced once."""

    def __init__(self, observers, callback):
        super().__init__()
        self.observers, self.callback, self.notes = observers, callback, []

    def on_epoch_begin(self, epoch, logs=None):
        variables = [*self.model.variables, *self.model.optimizer.variables]
        if not epoch:
            self.start = [v.numpy() for v in variables]
        for variable, value in zip(variables, self.start, strict=True):
            variable.assign(value)
        self.observer = self.observers[epoch]
        self.observer.set_model(self.model)

    def on_train_batch_end(self, batch, logs=None):
        self.observer.on_train_batch_end(batch, logs)

    def on_epoch_end(self, epoch, logs=None):
        self.observer.on_epoch_end(epoch, logs)
        self.notes.append([note for note in self.callback.report.notes if "within an epoch" in note])


# The last of each row ends the fit, or has it go on in stock order.
OBSERVERS = (
    {"AtTheEnd": SavesWeights, "Predicts": Predicts, "Evaluates": Evaluates, "Gets": Gets, "Writes": Writes,
     "Stops": Stops},
    {"TrainsByItself": TrainsByItself},
)  # fmt: skip


@pytest.fixture(scope="module")
def observed(tmp_path_factory):
    """The observers by name, and what the report has noted after each of them."""
    SavesWeights.folder = Writes.folder = tmp_path_factory.mktemp("saved")
    observers, notes = {}, {}
    for kinds in OBSERVERS:
        named = {name: kind(5 if name == "AtTheEnd" else 2) for name, kind in kinds.items()}
        callback = layerpipe(unroll=1)
        anew = Anew(list(named.values()), callback)
        x, y = samples()
        # Asks before our callback is called: the weights must be there.
        fit_spread(
            convnet(), callback, x, y, first=[anew], batch_size=BATCH, shuffle=False, epochs=len(kinds)
        )
        observers |= named
        notes |= dict(zip(kinds, anew.notes, strict=True))
    return observers, notes


@pytest.fixture(scope="module")
def alone():
    """The weights after a fit of so many batches."""
    weights = {}

    def of(updates):
        if updates not in weights:
            model = convnet()
            fitted_spread(model, layerpipe(), rows=BATCH * updates)
            weights[updates] = trained_weights(model)
        return weights[updates]

    return of


@pytest.mark.parametrize("name", [name for kinds in OBSERVERS for name in kinds])
def test_who_looks_sees_all_updates(observed, alone, name):
    """Observers see the updates of just the batches that have come in, which are more than were reported."""
    observer = observed[0][name]
    assert observer.updates == 5 if name == "AtTheEnd" else 2 < observer.updates < 5
    assert same(observer.weights, alone(observer.updates))


def test_saving_within_an_epoch_says_what_is_ahead(observed):
    _, notes = observed
    assert notes["AtTheEnd"] == notes["Gets"] == notes["TrainsByItself"] == []
    (note,) = notes["Writes"]
    assert "BackupAndRestore" in note
    assert "with drain_steps=N" in note


def test_nothing_is_ahead_where_drain_steps_end(alone, tmp_path):
    drained, callback, saves = convnet(), layerpipe(drain_steps=4), SavesWeights(4)
    SavesWeights.folder = tmp_path
    fitted_spread(drained, callback, more=[saves])
    assert saves.updates == 4
    assert same(saves.weights, alone(4))
    assert not same(saves.weights, trained_weights(drained))
    assert not [note for note in callback.report.notes if "within an epoch" in note]


# -- one fit, or several ---------------------------------------------------------------------------


@pytest.fixture(scope="module")
def two_epochs():
    model = convnet()
    fitted_spread(model, layerpipe(2), epochs=2)
    return state_of(model)


def test_two_fits_are_one(two_epochs):
    """With masks that go on."""
    model = convnet()
    fitted_spread(model, layerpipe(2))
    after_one = state_of(model)
    fitted_spread(model, layerpipe(2))
    assert same(state_of(model), two_epochs)
    assert not same(after_one, two_epochs)


def test_several_steps_per_execution(two_epochs):
    model = convnet()
    model.compile("sgd", model.loss, metrics=["accuracy"], jit_compile=False, steps_per_execution=3)
    fitted_spread(model, layerpipe(2), epochs=2)
    assert same(state_of(model), two_epochs)


@pytest.fixture(scope="module")
def one_epoch(tmp_path_factory):
    """A model after an epoch on so many devices, and the file with its checkpoint after two batches."""
    trained = {}

    def with_options(devices, **options):
        key = devices, *options.items()
        if key not in trained:
            model, file = with_momentum(), tmp_path_factory.mktemp("epoch") / "model.keras"
            more = [SavesFile(2, file)] if options["drain_steps"] else []
            fitted_spread(model, layerpipe(devices, **options), more=more)
            trained[key] = model, file
        return trained[key]

    return with_options


@pytest.mark.parametrize(("devices", "drain_steps"), [(2, None), (3, 2)])
def test_a_fit_goes_on_from_a_checkpoint(one_epoch, devices, drain_steps):
    """At the end of an epoch; five batches each: with drain_steps the last of them is alone."""
    whole, parted = with_momentum(), reloaded(one_epoch(devices, drain_steps=drain_steps)[0])
    after_one = state_of(parted)
    fitted_spread(parted, layerpipe(devices, drain_steps=drain_steps))
    fitted_spread(whole, layerpipe(devices, drain_steps=drain_steps), epochs=2)
    assert same(state_of(whole), state_of(parted))
    assert not same(after_one, state_of(parted))


RESUMED = {
    "stash": (3, {}),
    "ema": (2, {"weights": "ema"}),
    "latest": (2, {"weights": "latest"}),
}


@pytest.mark.parametrize("name", RESUMED)
def test_resumed_where_drain_steps_end(one_epoch, name):
    """From a checkpoint within an epoch: the weights and slots of the fit that went on."""
    devices, options = RESUMED[name]
    options, (x, y) = {"drain_steps": 2, **options}, samples()
    whole, file = one_epoch(devices, **options)
    resumed = keras.models.load_model(file)
    before = resumed.get_weights()
    fit_spread(
        resumed, layerpipe(devices, **options), x[2 * BATCH :], y[2 * BATCH :], batch_size=BATCH,
        shuffle=False,
    )  # fmt: skip
    assert same(state_of(whole), state_of(resumed))
    assert not same(before, resumed.get_weights())


# -- with the costs of another fit -----------------------------------------------------------------

# With these two devices share the layers between a block's convolution and its shortcut's, which graph
# optimizers number otherwise than the trace.
SECONDS = (1, 1, 1, 1, 1, 1, 2, 3, 1, 1, 1, 1, 1)


def measured_as_made_up(step, profile, timed_s, real=distributed.measured_costs, **options):
    measured = real(step, profile, timed_s, **options)
    layers = [
        tf_ooo.LayerCosts(s, s, s, inputs=layer.inputs, name=layer.name, output_bytes=layer.output_bytes)
        for s, layer in zip(SECONDS, measured.layers, strict=True)
    ]
    return CostTable(layers, op_seconds=measured.op_seconds)


def test_a_fit_with_the_costs_of_another_is_that_fit_going_on(tmp_path):
    """Also of layers side by side, which are measured in another order, and over the same link."""
    file, whole = tmp_path / "model.keras", shortcuts()
    first = tf_ooo.OOOBackprop(mode="layerpipe", devices=2, schedule="pipedream", profile_steps=0)
    with mock.patch.object(distributed, "measured_costs", measured_as_made_up):
        fitted_spread(whole, first, 2, more=[SavesEpoch(file)])
    resumed = keras.models.load_model(file)
    costs = CostTable.load(first.report.costs.save(tmp_path / "costs.json"))
    before = resumed.get_weights()
    second = tf_ooo.OOOBackprop(mode="layerpipe", devices=2, schedule="pipedream", costs=costs)
    with mock.patch.object(cluster, "link_between", side_effect=AssertionError("measured again")):
        fitted_spread(resumed, second, 2, initial_epoch=1)
    links = [callback.report.costs.link for callback in (first, second)]
    assert [(link.latency_s, link.machines) for link in links] == [(30e-6, (0, 0))] * 2
    assert "devices share the" in first.report.summary()
    rows = [[(row["name"], row["delay_steps"]) for row in run.report.layers] for run in (first, second)]
    assert rows[0] == rows[1]
    assert first.report.planned.to_text() == second.report.planned.to_text()
    assert same(state_of(whole), state_of(resumed))
    assert not same(before, resumed.get_weights())


def test_early_stopping_puts_back_the_best_weights(one_epoch):
    """They are the weights of an epoch's end, of a fit that ends there."""
    stops = keras.callbacks.EarlyStopping("loss", mode="max", patience=1, restore_best_weights=True)
    stopped, (short, _) = with_momentum(), one_epoch(2, drain_steps=None)
    assert len(fitted_spread(stopped, layerpipe(2), epochs=4, more=[stops])["loss"]) == 2
    assert same(stopped.get_weights(), short.get_weights())
