"""The golden schedules against the papers' closed forms and a simulator that shares no code with ours.

``times_of`` reads the text of a golden file alone and knows five sentences about tasks, from Zero Bubble
(arXiv 2401.10241, section 2) and PipeDream: see tests/golden/README.md.
"""

from __future__ import annotations

import itertools
import re
from pathlib import Path

import pytest

from tf_ooo.costs.layer_costs import LayerCosts
from tf_ooo.planning.model.schedule import Schedule
from tf_ooo.planning.simulation.simulator import simulate

GOLDEN = Path(__file__).parents[1] / "golden"
# F, dO and dW of each layer, in seconds; the same as in the tests that make these files.
SIX_EQUAL = [(3, 4, 2)] * 6
EIGHT_UNEQUAL = [(1, 2, 1), *[(1, 1, 1)] * 6, (2, 1, 3)]
THREE_UNEQUAL = [(1, 2, 3), (2, 1, 1), (4, 6, 4)]


def lanes_of(text):
    """[[(kind, stage, micro-batch), ...] of each device]."""
    lanes = re.findall(r"^lane \d+ 0: (.*)$", text, re.MULTILINE)
    tasks = [re.findall(r"(\w+):(\d+)@(\d+)", lane) for lane in lanes]
    return [[(kind, int(stage), int(number)) for kind, stage, number in lane] for lane in tasks]


def stages_of(text, layers):
    """Seconds of F, dO and dW of each stage."""
    spans = re.findall(r"^stage \d+: (\d+)-(\d+)$", text, re.MULTILINE) or [
        (i, i) for i in range(len(layers))
    ]
    parts = [layers[int(first) : int(last) + 1] for first, last in spans]
    return [tuple(sum(column) for column in zip(*part, strict=True)) for part in parts]


def waits_for(task, last_stage, fused):
    """Return what a task needs of others, whatever the order on the devices."""
    kind, stage, number = task
    if kind == "F":  # the activations of the stage below
        return [("F", stage - 1, number)] if stage else []
    if kind == "dO":  # its own activations, and the gradient from the stage above, sent after dW if fused
        above = [("dO", stage + 1, number), *([("dW", stage + 1, number)] if fused else [])]
        return [("F", stage, number), *(above if stage < last_stage else [])]
    return [("dO", stage, number)] if kind == "dW" else []  # U stands behind its dW


def times_of(text, layers):
    """{task: (start, end)}: each device runs its list in order, each task as early as it can."""
    stages, lanes, times = stages_of(text, layers), lanes_of(text), {}
    fused = "fused_backward yes" in text
    free_s, places = [0.0] * len(lanes), [0] * len(lanes)
    while any(place < len(lane) for place, lane in zip(places, lanes, strict=True)):
        before = list(places)
        for device, lane in enumerate(lanes):
            while places[device] < len(lane):
                task = lane[places[device]]
                needed = waits_for(task, len(stages) - 1, fused)
                if not all(other in times for other in needed):
                    break
                start = max([free_s[device], *(times[other][1] for other in needed)])
                seconds = dict(zip(("F", "dO", "dW"), stages[task[1]], strict=True)).get(task[0], 0)
                times[task] = (start, start + seconds)
                free_s[device], places[device] = start + seconds, places[device] + 1
        assert places != before, "deadlock"
    return times


def stored_at_most(text, layers):
    """The most layers whose activations a device holds at once: from the F of a stage to its dW's end."""
    spans = re.findall(r"^stage \d+: (\d+)-(\d+)$", text, re.MULTILINE)
    count = [int(last) - int(first) + 1 for first, last in spans] or [1] * len(layers)
    peaks = []
    for lane in lanes_of(text):
        held = peak = 0
        for kind, stage, _ in lane:
            held += count[stage] * (kind == "F")
            peak = max(peak, held)
            held -= count[stage] * (kind == "dW")
        peaks.append(peak)
    return max(peaks)


def predicted(text, name):
    (value,) = re.findall(rf"^{name} (\S+)$", text, re.MULTILINE)
    return float(value)


SEVERAL_STAGES = ("interleaved_1f1b", "modulo", "zb_interleaved")


# p = 3 devices, m = 5 micro-batches; F, dO, dW of a stage of two layers: 6, 8, 4 s.
@pytest.mark.parametrize(
    ("name", "step_s", "stored"),
    [
        ("gpipe", (5 + 3 - 1) * (6 + 8 + 4), 2 * 5),  # (m + p - 1)(F + dO + dW); all m are stored
        ("1f1b", (5 + 3 - 1) * (6 + 8 + 4), 2 * 3),  # the same; p are stored
        ("fast_forward", 5 * 18 + (3 - 1) * (6 + 8), 2 * 3),  # 1F1B's bubble without the dW
        ("zb_h1", 5 * 18 + (3 - 1) * (6 + 8 - 4), 2 * 3),  # Zero Bubble, table 1
        ("zb_h2", 5 * 18 + (3 - 1) * (6 + 8 - 2 * 4), 2 * 5),  # table 1; 2p - 1 = m are stored
        ("zb_auto", 5 * 18 + (3 - 1) * (6 + 8 - 2 * 4), 2 * 5),  # not slower than either
        # Two chunks a device, of one layer each: 3, 4, 2 s.  The last device begins at 2 * 3 and has no gap;
        # after its 90 s the last gradient goes through two devices, 2 * (4 + 2) s.
        # Device 0 runs all ten forward passes before a backward pass.
        ("interleaved_1f1b", 2 * 3 + 5 * 18 + 2 * (4 + 2), 2 * 5),
        # Groups of three micro-batches and of two, with two chunks in flight; device 0 waits 20 s, see below.
        ("modulo", 5 * 18 + 20, 2 * 3),
        # The last device begins at 2 * 3, as no other order lets it begin earlier, and has no gap.
        ("zb_interleaved", 2 * 3 + 5 * 18, 9),
    ],
)
def test_pipelines(name, step_s, stored):
    text = (GOLDEN / f"pipeline_{name}.txt").read_text()
    times = times_of(text, SIX_EQUAL)
    makespan_s = max(end for _, end in times.values())
    peak = stored_at_most(text, SIX_EQUAL)
    assert makespan_s == predicted(text, "predicted_step_s")
    assert peak == predicted(text, "predicted_peak_bytes")
    assert (makespan_s, peak) == (step_s, stored)
    _all_tasks_once(text, stages=6 if name in SEVERAL_STAGES else 3, microbatches=5)


def test_the_waits_of_modulo():
    """Device 0 holds layers 0 and 3, the last one 2 and 5.

    After three forward passes of either, 18 s, the first gradient comes down through layers 5 and 4, 2 * 4 s.
    The next ones come 3 + 4 s after one another, as the last device has a forward pass between two dO, and dO
    and dW here are 6 s: 1 s at 32, and one at 39 before layer 0's first, which has come through 2 and 1.
    Layer 3's last forward pass waits until layer 2's has ended at 74; then as in the first group.
    """
    text = (GOLDEN / "pipeline_modulo.txt").read_text()
    times = times_of(text, SIX_EQUAL)
    lane = [times[task] for task in lanes_of(text)[0]]
    waits = [(end, start) for (_, end), (start, _) in itertools.pairwise(lane) if start > end]
    assert waits == [(18, 18 + 2 * 4), (32, 33), (39, 40), (73, 74), (77, 77 + 2 * 4), (91, 92)]
    assert sum(start - end for end, start in waits) == 20


@pytest.mark.parametrize("name", ["zb_v", "v_half", "v_min", "dualpipe_v"])
def test_v_shapes(name):
    """Down the devices and up again: stage s and 5 - s on one device; unequal layers."""
    text = (GOLDEN / f"{name}.txt").read_text()
    layers = [LayerCosts(*costs, activation_bytes=1) for costs in EIGHT_UNEQUAL]
    timeline = simulate(Schedule.from_text(text), layers)
    times = times_of(text, EIGHT_UNEQUAL)
    assert max(end for _, end in times.values()) == timeline.makespan_s
    assert stored_at_most(text, EIGHT_UNEQUAL) == max(timeline.peak_bytes)
    assert [sorted({stage for _, stage, _ in lane}) for lane in lanes_of(text)] == [[0, 5], [1, 4], [2, 3]]
    # Device 0 computes 1 + 2 + 1 s of stage 0 and 2 + 1 + 3 s of stage 5 for each of six micro-batches.
    assert 60 <= timeline.makespan_s < 60 + 6
    _all_tasks_once(text, stages=6, microbatches=6)


@pytest.mark.parametrize(("name", "period_s"), [("pipedream", 14), ("layerpipe", 8)])
def test_late_gradients(name, period_s):
    """The work of the slowest device for a batch, which is the period.

    PipeDream's has layer 2, 4 + 6 + 4 s.  LayerPipe shares it: F and dW of layer 2 are 8 s on one device, its
    dO with dO and dW of layer 1 are 8 s on another, the rest, 1 + 2 + 2 + 3 s, are 8 s on the third.
    """
    text = (GOLDEN / f"{name}.txt").read_text()
    seconds = {(k, s): THREE_UNEQUAL[s][i] for i, k in enumerate(("F", "dO", "dW")) for s in range(3)}
    work_s = [sum(seconds.get(task[:2], 0) for task in lane) for lane in lanes_of(text)]
    assert max(work_s) == 5 * period_s
    times = times_of(text, THREE_UNEQUAL)
    timeline = simulate(Schedule.from_text(text), [LayerCosts(*costs) for costs in THREE_UNEQUAL])
    assert max(end for _, end in times.values()) == timeline.makespan_s
    assert len([task for lane in lanes_of(text) for task in lane if task[0] == "U"]) == 3 * 5
    _all_tasks_once(text, stages=3, microbatches=5)


def _all_tasks_once(text, stages, microbatches):
    tasks = [task for lane in lanes_of(text) for task in lane if task[0] != "U"]
    expected = {(k, s, m) for k in ("F", "dO", "dW") for s in range(stages) for m in range(microbatches)}
    assert len(tasks) == len(expected)
    assert set(tasks) == expected
