"""``mode="layerpipe"`` on logical CPU devices, which a process must set up first: see layerpipe_fit.py."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.scripts import found_by
from tests.zoo import KERAS_3

SCRIPT = Path(__file__).with_name("layerpipe_fit.py")


def check(name):
    return found_by(SCRIPT, name)[name]


def test_delays_are_twice_the_stages_after():
    """The weights, losses and delays of training by hand, whatever the processors do, with uneven batches."""
    found = check("spread_against_by_hand")
    assert len(found) == 15
    for name, one in found.items():
        assert one["distance"] < 1e-6, name
        assert one["loss"] < 1e-6, name
        assert one["moved"] > 0.05, name
        assert one["notes"] == [], name
        assert one["turns"]["out of turn"] == [], name
        assert one["turns"]["rounds"] == 3, name
        assert one["turns"]["free"] > 20, name
        sizes = one["bytes"]
        if name.endswith("ema"):  # at most one copy of the weights, however many processors there are
            assert 0 < sizes["ema"] <= one["weights_bytes"], name
        if not name.startswith("one") and not name.endswith("stash"):
            assert sizes["stash"] == 0, name
        assert one["high"] == (["CPU:1"] if "lowest dO" in name else ["CPU:2"] if "two parts" in name else [])


def test_two_versions_of_weights():
    """PipeDream-2BW: coalesced gradients one update late, as by hand, on any number of devices."""
    found = check("two_versions")
    assert len(found) == 3
    for name, one in found.items():
        assert one["distance"] < 1e-6, name
        assert one["loss"] < 1e-6, name
        assert one["matters"] > 0.01, name
        assert one["behind"] == [1], name
        assert one["variables"] == 8, name
        assert one["bytes"][0] == one["bytes"][1] == one["bytes"][2], name


def test_frozen_weights_are_not_copied_in_every_round():
    found = check("frozen_weights")
    assert found["distance"] < 1e-6
    assert found["moved"] > 0.05
    assert found["same"]
    assert found["copied"] == 1
    assert found["registers"] == []


def test_learning_rates_warm_up():
    found = check("rates_that_warm_up")
    assert found["distance"] < 1e-6
    assert found["matters"] > 0.01


@pytest.mark.slow
def test_cuts_inside_every_kind_of_layer():
    """Delays as planned also where a layer's dW needs its own dO; and on the default path, which profiles."""
    found = check("cuts_anywhere")
    assert len(found) == 6
    for name, one in found.items():
        planned = one["planned"]
        layers = {key: key if key in planned else key.rpartition("/")[0] for key in one["late"]}
        assert set(layers.values()) == set(planned), name
        assert all(late == planned[layers[key]] for key, late in one["late"].items()), name
        assert 0 < one["loss"] < 2


def test_average_of_weights():
    """Keras' use_ema averages the weights after each update, whatever the device."""
    assert check("average_of_weights")["distance"] < 1e-6


@pytest.mark.slow
def test_callback():
    found = check("callback_in_fit")
    for name, one in found.items():
        assert one["iterations"] == 5
        assert one["home"] == ["CPU:0"]
        assert one["state"].startswith("the rewritten step runs"), name
        late = {row["name"]: row["delay_steps"] for row in one["layers"]}
        assert max(late.values()) == 4
        assert set(one["delays"]) == set(one["trained"])
        assert one["losses"][-1] == pytest.approx(one["evaluated"], rel=1e-5)
        assert {key.rpartition("/")[0] for key in one["delays"]} == set(late)
        assert all(one["delays"][key] == late[key.rpartition("/")[0]] for key in one["delays"])
        assert "processor 2" in one["summary"]
        assert "not that of synchronous training" in one["notes"][0]
    assert found["stash"]["bytes"]["ema"] == 0
    assert 0 < found["ema"]["bytes"]["ema"] <= found["ema"]["weights_bytes"]
    assert any("Adam" in note for note in found["ema"]["notes"])
    assert any("BatchNormalization" in note for note in found["ema"]["notes"])
    assert found["pipedream"]["losses"] != found["stash"]["losses"]


def test_one_device_is_stock():
    assert check("one_device_is_stock") == {
        "equal": True,
        "reason": "there is one device: the stock step runs",
    }


@pytest.mark.slow
def test_nothing_is_on_its_way_at_the_end_of_an_epoch():
    assert set(check("nothing_is_on_its_way").values()) == {True}


@pytest.mark.slow
def test_resumed_where_drain_steps_end():
    found = check("resumed_in_an_epoch")
    assert found.keys() == {"stash", "ema", "latest", "2bw"}
    assert all(one == {"equal": True, "moved": True} for one in found.values()), found


@pytest.mark.skipif(KERAS_3, reason="Keras 3 has no legacy optimizers")
def test_legacy_optimizers():
    for new, legacy in check("legacy_optimizers").values():
        assert legacy == pytest.approx(new, rel=1e-4)


def test_no_more_batches_than_steps_per_epoch():
    assert check("steps_of_endless_data") == {"iterations": 10}


def test_refusals():
    found = check("refusals")
    assert found.pop("put_back")
    assert "clipping by global norm" in found["global_clipnorm"]
    assert "a LearningRateSchedule can warm up itself" in found["schedule_of_rates"]
    assert "4 processors are more than the tasks of 1 layers" in found["more_processors"]
    assert "layer 'lstm' (LSTM) has a loop" in found["loop"]
    assert "unroll=True, or train with mode='pipeline'" in found["loop"]
    assert "applies gradients twice with one optimizer" in found["twice"]
    assert "accumulate_steps=3 is not accepted with 3 devices" in found["group"]
    assert "from 4 on" in found["group"]
    assert "devices=9" in found["devices"]
    assert "batches of one kind" in found["lengths"]
    assert "drain_steps=4 is no multiple of steps_per_execution=3" in found["drain"]
    assert "'layerpipe'" in found["schedule"]
    assert "needs mode='layerpipe'" in found["weights"]
    for name in ("loss_scale", "overwritten", *(["accumulation"] if KERAS_3 else [])):
        assert "without loss scaling, gradient_accumulation_steps= and ema_overwrite_" in found[name]
