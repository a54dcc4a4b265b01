"""Schedules of one's own, from a file, on three logical devices."""

from __future__ import annotations

import re

import pytest

import tf_ooo
from tests.graph.pipeline_fits import Training, assert_equal_bits, assert_same_bits, fits_of, pipelined
from tests.graph.pipeline_models import EVEN, UNEVEN, eight_layers, momentum
from tf_ooo.compat import keras_variables

pytestmark = [pytest.mark.devices(3), pytest.mark.takes(60)]

BATCHES = 4


def lane(stage, order):
    return f"lane {stage} 0: " + " ".join(f"{kind}:{stage}@{batch}" for kind, batch in order) + f" U:{stage}"


def own_text(stages=()):
    """Return a schedule that no policy makes: backward from the last micro-batch on, dW in mixed order."""
    forward = [("F", batch) for batch in range(BATCHES)]
    output = [("dO", batch) for batch in reversed(range(BATCHES))]
    weights = [("dW", batch) for batch in (2, 0, 3, 1)]
    both = [(kind, batch) for batch in reversed(range(BATCHES)) for kind in ("dO", "dW")]
    lanes = [
        lane(0, forward + output + weights),
        lane(1, forward + both),
        lane(2, forward + output + weights),
    ]
    head = ["tf_ooo schedule v1", "mode pipeline", "policy mine", f"microbatches {BATCHES}"]
    return "\n".join([*head, *(f"stage {i}: {a}-{b}" for i, (a, b) in enumerate(stages)), *lanes]) + "\n"


@pytest.fixture(name="training", scope="module")
def _training():
    return Training(eight_layers, momentum, EVEN, epochs=2)


def own(path, **options):
    """Return a callback that takes the schedule of a file; fits of named ones look at the loss."""
    return pipelined(path, check_loss=False, **options)


@pytest.fixture(name="named", scope="module")
def _named(training):
    return fits_of(training, "gpipe", "zb_h1")


@pytest.fixture(name="file")
def _file(tmp_path):
    def write(text):
        path = tmp_path / "mine.txt"
        path.write_text(text)
        return path

    return write


def test_an_own_schedule_has_the_bits_of_the_named_ones(training, named, file):
    """Cut by costs, by the file, and by names: a path, and its text."""
    by_costs, by_file = file(own_text()), str(file(own_text()).with_name("cut.txt"))
    layers = [row.name for row in named["gpipe"].report.layers]
    with open(by_file, "w", encoding="utf-8") as cut:
        cut.write(own_text([(0, 1), (2, 2), (3, len(layers) - 1)]))
    fits = {
        **named,
        "costs": training.piped(own(by_costs)),
        "file": training.piped(own(by_file)),
        "names": training.piped(own(by_costs, stages=[layers[:3], layers[3:4], layers[4:]])),
    }
    for name, held in (("file", [2, 1, len(layers) - 3]), ("names", [3, 1, len(layers) - 4])):
        report = fits[name].report
        assert report.schedule == "mine"
        assert [len(stage.layers) for stage in report.pipeline.stages] == held
        assert len(report.planned.lanes[1, 0]) == 3 * BATCHES + 1
    assert_same_bits(training, fits, far=None, weights_everywhere=False)


def test_what_a_report_planned_runs_again(training, named, file):
    """Its stages hold the model's layers, so that it can be simulated with the report's costs, too."""
    report = named["zb_h1"].report
    planned = report.planned
    assert planned.stages[-1][1] == len(report.layers) - 1
    costs = report.costs
    assert tf_ooo.simulate(planned, costs).makespan_s == pytest.approx(report.predicted_step_s)
    again = training.piped(own(file(planned.to_text())))
    assert again.report.planned.lanes == planned.lanes
    assert again.report.planned.stages == planned.stages
    assert_equal_bits(again.weights, named["zb_h1"].weights)


def test_fewer_micro_batches_in_the_last_batch(file):
    """4 rows in the last batch of 52: the schedule's tasks of other micro-batches are not there."""
    training = Training(eight_layers, momentum, UNEVEN, epochs=1)
    fits = fits_of(training, "gpipe", "1f1b", check_loss=False)
    fits["mine"] = training.piped(own(file(own_text())))
    assert_same_bits(training, fits, far=None, weights_everywhere=False)


def test_a_file_that_is_changed_between_two_fits(training, file):
    path = file(own_text())
    callback = own(path)
    training.piped(callback)
    first = callback.report.planned
    file(own_text([(0, 0), (1, 1), (2, len(callback.report.layers) - 1)]))
    training.fit(callback)
    last = len(callback.report.layers) - 1
    assert first.stages != callback.report.planned.stages == ((0, 0), (1, 1), (2, last))


REFUSED = {
    "the number of micro-batches": (
        lambda text: text.replace("microbatches 4", "microbatches 8"),
        {},
        r"line 4: microbatches 8: the fit has microbatches=4; give microbatches=8",
    ),
    "the number of devices": (
        lambda text: text,
        {"devices": 2},
        r"line 5: lanes of devices 0, 1, 2: the fit has 2, each with a lane.*give devices=3",
    ),
    "an unknown task": (lambda text: text.replace("dW:1@2", "dX:1@2"), {}, r"line 6: unknown op 'dX:1@2'"),
    "a missing task": (lambda text: text.replace(" dW:1@2", ""), {}, r"line 6: missing: dW:1@2"),
    "no update": (lambda text: text.replace(" U:2", ""), {}, r"line 7: missing: U:2"),
    "a stage too much": (
        lambda text: text.replace("F:2@0", "F:7@0"),
        {},
        r"line 7: missing: F:2;",
    ),
    "a deadlock": (
        lambda text: text.replace("F:0@1", "dO:0@0 F:0@1").replace(" dO:0@0 dW", " dW"),
        {},
        r"line [567]: cycle: .* waits for ",
    ),
    "two lanes on a device": (
        lambda text: text + "lane 2 1: F:3@0\n",
        {},
        r"line 8: lane 2 1: a fit runs one lane on each device",
    ),
    "another mode": (
        lambda text: text.replace("mode pipeline", "mode layerpipe"),
        {},
        r"line 2: mode layerpipe",
    ),
    "an asynchronous one": (
        lambda text: text.replace("policy mine", "policy mine\nasynchronous yes"),
        {},
        r"line 4: asynchronous: a fit runs no such schedule",
    ),
    "no schedule": (lambda text: "gpipe\n", {}, r"line 1: not a schedule"),
    "stages beside stages": (
        lambda text: own_text([(0, 0), (1, 1), (2, 7)]),
        {"stages": ["a", "b", "c"]},
        r"line 5: the file has 'stage' lines, and stages= is given",
    ),
    "other layers": (
        lambda text: own_text([(0, 0), (1, 1), (2, 30)]),
        {},
        r"line 7: stages hold 31 layers, the model has 8 .*end with layer 7",
    ),
    "names of other stages": (
        lambda text: text,
        {"stages": 2},  # of the model's layers the first two
        r"the schedule has 3 stages, stages= names 2",
    ),
}


@pytest.mark.parametrize("case", REFUSED)
def test_what_is_refused_before_any_step_has_trained(training, file, case):
    """Each in one line that names the file's line; the model is as it was."""
    change, options, message = REFUSED[case]
    if options.get("stages") == 2:
        paths = [keras_variables.path_of(variable) for variable in training.model.trainable_variables]
        options = {"stages": list(dict.fromkeys(path.split("/")[-2] for path in paths))[:2]}
    training.restore()
    path = file(change(own_text()))
    with pytest.raises(tf_ooo.ScheduleError) as raised:
        training.fit(own(path, **options))
    text = str(raised.value)
    assert text.startswith(str(path))
    assert re.search(message, text), text
    assert "\n" not in text
    assert int(training.model.optimizer.iterations) == 0
    assert_equal_bits(training.model.get_weights(), training.untrained)


def test_no_such_file(training, tmp_path):
    with pytest.raises(tf_ooo.ScheduleError, match=r"nowhere.txt'?: there is no such file; .*by name: auto"):
        training.fit(own(tmp_path / "nowhere.txt"))


def test_a_limit_that_it_does_not_keep(training, file):
    """It is run as it is written, or not at all."""
    with pytest.raises(tf_ooo.MemoryLimitError) as raised:
        training.fit(own(file(own_text()), memory_limit_bytes=1000))
    smallest = raised.value.smallest_bytes
    assert training.piped(own(file(own_text()), memory_limit_bytes=smallest)).report.schedule == "mine"
