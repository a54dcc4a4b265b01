"""``mode="pipeline"`` on logical CPU devices, which a process must set up first: see pipeline_fit.py."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.scripts import found_by
from tests.zoo import KERAS_3

SCRIPT = Path(__file__).with_name("pipeline_fit.py")

# The first of several tests waits for all checks of their process, which has a limit of its own.
pytestmark = pytest.mark.timeout(1800)


def checks(devices, *names):
    return found_by(SCRIPT, str(devices), *names)


def assert_same_bits(found, devices, far=1e-5, weights_everywhere=True):
    """All schedules have the first one's bits, near those of the unsplit batch; ops are on all devices.

    Not ``weights_everywhere``: a stage may be a part of a long layer, without weights.
    """
    assert len(found) > 1
    for one in found.values():
        assert one["equal"]
        assert one["distance"] < far
        assert one["loss"] < far
        assert set(one["ops"]) == {f"CPU:{number}" for number in range(devices)}
        kinds = [set(kinds) for kinds in one["ops"].values()]
        assert {"F", "dO", "dW", "U"} <= set().union(*kinds)
        assert all({"F", "dW", "U"} <= each if weights_everywhere else "F" in each for each in kinds)
        assert one["back"] == ["CPU:0"]
        assert one["edges"] > 20
        assert one["skipped"] == []
        assert one["unordered"] == []
        assert one["uphill"] == []
        assert one["unplanned"] == []
        assert one["redundant"] == []


def test_two_devices_and_uneven_batches():
    found = checks(2, "schedules", "one_device_is_stock", "positions")
    assert_same_bits(found["schedules"], 2)
    assert_same_bits(found["positions"], 2)
    assert all(one["accuracy"] for one in found["schedules"].values())
    assert found["one_device_is_stock"] == {"mlp": True, "conv_with_skips": True, "attention": True}


@pytest.mark.slow
def test_eight_devices_and_all_schedules():
    found = checks(8, "all_schedules")["all_schedules"]
    assert len(found) == 13
    assert_same_bits(found, 8)
    assert all(one["schedule"] == name for name, one in found.items() if name != "auto")


@pytest.mark.slow
def test_skips_and_ties_on_eight_devices():
    for found in checks(8, "skips_and_ties")["skips_and_ties"]:
        assert_same_bits(found, 8, weights_everywhere=False)


@pytest.mark.slow
def test_wide_tensors_on_eight_devices():
    found = checks(8, "wide_encoder")["wide_encoder"]
    assert [stages for _, stages, _ in found] == [8, 16, 8]
    assert {devices for *_, devices in found} == {8}
    assert len({bits for bits, *_ in found}) == 1


@pytest.mark.slow
def test_batch_normalization_and_memory_limit():
    found = checks(2, *(names := ("batch_normalization", "memory_limit")))
    # Statistics of a micro-batch are not those of the batch: how far off the weights are is not the point.
    assert_same_bits(found[names[0]], 2, far=10.0)
    notes = next(iter(found[names[0]].values()))["notes"]
    assert [
        note for note in notes if note.startswith("3 BatchNormalization layers normalize each micro-batch")
    ]
    limited = found[names[1]]
    assert limited["equal"]
    assert limited["within"]
    assert limited["schedule"] != "gpipe"
    assert limited["refused"].startswith("MemoryLimitError: ")
    assert limited["short"][0].startswith("training ended after 2 steps, before the model was cut")
    before, now = limited["larger_peaks"]
    assert limited["larger"] is True or limited["larger"].startswith("MemoryLimitError: ")
    assert before != now
    assert limited["much_larger"].startswith("MemoryLimitError: ")
    assert limited["loop"].startswith("MemoryLimitError: memory_limit_bytes=10000: the sizes of ")
    assert limited["written"] == ["report.html", "schedule.html", "trace.json"]
    assert limited["tasks_drawn"] == limited["tasks"] > 0


@pytest.mark.skipif(not KERAS_3, reason="Keras 2 traces such parts otherwise")
@pytest.mark.slow
def test_functions_that_were_traced_before_see_the_moved_weights():
    names = ("traced_parts", "models_within", "plain_sgd", "several_optimizers", "own_means")
    traced, within, plain, several, means = checks(2, *names).values()
    for stock, parted in means.values():
        assert parted == pytest.approx(stock, rel=1e-5)
    assert_same_bits(traced["schedules"], 2)
    assert "is used in a tf.function that was traced before" in traced["refused"]
    assert within == [0.0] * 8
    for one in plain.values():
        assert_same_bits(one, 2)
    assert_same_bits(several["schedules"], 2)
    assert sorted(several["counts"]) == [0, 21, 21]  # MultiOptimizer's own is not used


@pytest.mark.skipif(not KERAS_3, reason="options and callbacks of Keras 3")
@pytest.mark.slow
def test_what_optimizers_and_callbacks_do():
    for name, one in checks(2, "features")["features"].items():
        assert one["weights"] < 1e-5, name
        assert one["slots"] < 1e-5, name
        for stock, parted in one["history"].values():
            assert parted == pytest.approx(stock, rel=1e-4), name


@pytest.mark.slow
def test_uneven_micro_batches_masks_and_what_keras_compiles():
    found = checks(2, *(names := ("uneven_rows", "masks", "compiled_by_keras")))
    for one in found[names[0]].values():
        assert_same_bits(one, 2)
    assert len(found["masks"]) == 1
    assert "embedding" in found["masks"][0]
    compiled = found["compiled_by_keras"]
    assert compiled["distance"] < 1e-5
    assert compiled["seen"] == [False]
    assert compiled["after"] is True
    assert len(compiled["notes"]) == 1


MODELS = (
    "tied_embedding",
    "used_twice",
    "untied_embedding",
    "constant_rows",
    "many_outputs",
    "two_inputs",
    "custom_train_step",
)


@pytest.mark.slow
@pytest.mark.parametrize("model", MODELS)
def test_models_on_three_devices(model):
    # Dropout draws other masks for micro-batches than for a batch.
    far = 10.0 if model == "two_inputs" else 1e-4
    # With three layers and three devices the loss may be a stage of its own.
    assert_same_bits(checks(3, *MODELS)[model], 3, far, weights_everywhere=False)


@pytest.mark.slow
@pytest.mark.parametrize("model", PARTS := ["frozen_backbone", "long_tail"])
def test_layers_cut_between_their_ops(model):
    found = checks(3, *PARTS)[model]
    assert_same_bits(found, 3, far=1e-4, weights_everywhere=False)
    if model == "frozen_backbone":
        names = next(iter(found.values()))["layers"]
        assert [name.partition(" (")[0] for name in names[:-2]] == [f"before {names[-2]}"] * (len(names) - 2)
        assert len(names) > 5
    elif KERAS_3:
        assert all(any(name.startswith("behind ") for name in one["layers"]) for one in found.values())


@pytest.mark.slow
@pytest.mark.parametrize("model", ["conv_with_skips", "rnn", "mixed_precision", "loops", "loops_and_skips"])
def test_models_on_two_devices(model):
    far = 0.2 if model == "mixed_precision" else 1e-4
    found = checks(2, model)[model]
    assert_same_bits(found, 2, far)
    if model == "loops":
        # Three layers' loops, forward and backward, in two micro-batches; each whole.  Keras 2 hides those of
        # LSTM and GRU in functions.
        started = {"first": (4, 8), "second": (8, 4)} if KERAS_3 else {"first": (0, 4), "second": (0, 4)}
        for name, one in found.items():
            on = dict(zip(("CPU:0", "CPU:1"), started[name.split(", ")[1]], strict=True))
            assert one["loops"] == {"started": on, "parted": 0}


@pytest.mark.skipif(KERAS_3, reason="Keras 3 has no legacy optimizers")
def test_legacy_optimizers():
    found = checks(2, "legacy_optimizers")["legacy_optimizers"]
    assert len(found) >= 8
    assert_same_bits(found, 2, far=1e-4)


FITS = ("refusals", "variables_move_and_return", "fit_again_and_executions")


@pytest.mark.slow
def test_variables_move_and_return():
    found = checks(3, *FITS)["variables_move_and_return"]
    # The first epoch's end is before the cut or behind it; the others' behind.
    assert found["during"][-1] == ["CPU:0", "CPU:1", "CPU:2"]
    assert found["after"] == ["CPU:0"]
    assert found["file"]
    assert found["file without us"]
    stopped = [value for name, value in found.items() if name.startswith("interrupted by")]
    assert stopped == [[["CPU:0", "CPU:1", "CPU:2"], ["CPU:0"]]] * 4
    assert found["trained by others"][0] == ["CPU:0"]
    assert "train_on_batch, or make_train_function, was c" in found["trained by others"][1]
    # Keras' own lines are not seen; then the next fit puts the variables back.
    assert found["unseen"] == ["CPU:0", "CPU:1", "CPU:2"]
    assert found["next fit"] == ["CPU:0"]
    assert found["trained on"]
    assert found["at the end"] == ["CPU:0"]
    assert found["data"][1:] == ["CPU:0"]


@pytest.mark.slow
def test_fit_again_and_several_steps_an_execution():
    found = checks(3, *FITS)["fit_again_and_executions"]
    assert found["equal"]
    assert found["val"] < 1e-6
    assert found["steps"] > 3
    assert found["places"] == ["CPU:0"] * 2
    # A fit with larger batches than the first is planned for as many micro-batches.
    assert found["planned"] == [2, 4]
    assert found["unordered"] == []


@pytest.mark.slow
@pytest.mark.parametrize(
    ("name", "error", "said"),
    [
        ("xla", "BackendError", "jit_compile=True"),
        ("eager", "BackendError", "run_eagerly=True"),
        ("sum", "BackendError", "reduction='sum'"),
        ("none", "BackendError", "adds up rows"),
        ("stateful", "BackendError", "make it with stateful=False"),
        ("reads", "BackendError", "again after it has applied its gradient"),
        ("device", "BackendError", "there is no 'CPU:7'"),
        ("same", "BackendError", "named twice"),
        ("many", "BackendError", "devices=4: there are 3"),
        ("replicas", "BackendError", "1 process was launched"),
        # One layer, and what stands behind its weights.
        ("layers", "OptionsError", "27 stages are more than the 9 layers"),
        ("group", "OptionsError", "group=9: 9 layers make 1 groups, fewer than the 3 devices"),
        ("text", "OptionsError", "write a list, ['CPU:0', 'CPU:1']"),
    ],
)
def test_refusals(name, error, said):
    found = checks(3, *FITS)["refusals"][name]
    assert found[0] == error
    assert said in found[1]
