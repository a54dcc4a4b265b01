"""``tf_ooo.plan(stages=..., splits=True)`` and the command's ``--stages``."""

from __future__ import annotations

import itertools
import json

import pytest
from click.testing import CliRunner
from hypothesis import given, settings
from hypothesis import strategies as st

import tf_ooo
from tf_ooo.cli import main
from tf_ooo.costs.table import CostTable
from tf_ooo.planning.choosing.on_paper import splits
from tf_ooo.planning.model.problem import Problem
from tf_ooo.planning.model.schedule import Schedule

LAYERS = [
    tf_ooo.LayerCosts(s, 2 * s, 3.0, 0.5, activation_bytes=5, weight_bytes=9, output_bytes=2, name=name)
    for name, s in zip("abcdef", (1.0, 5.0, 2.0, 1.0, 1.0, 3.0), strict=True)
]
LINK = tf_ooo.Link(0.0, 10.0)
# Each takes so many stages on two devices.
TAKES = {"gpipe": 2, "1f1b": 2, "fast_forward": 2, "zb_h1": 2, "zb_h2": 2, "zb_auto": 2, "modulo": 3,
         "zb_search": 3, "zb_interleaved": 4, "interleaved_1f1b": 4, "zb_v": 4, "v_half": 4,
         "v_min": 4, "dualpipe_v": 4}  # fmt: skip


@pytest.mark.parametrize("name", TAKES)
def test_a_cut_by_hand_in_every_schedule(name):
    """Lopsided: every stage but the last has one layer."""
    count = TAKES[name]
    stages = [layer.name for layer in LAYERS[:count]]
    planned = tf_ooo.plan(layers=LAYERS, schedule=name, devices=2, microbatches=4, link=LINK, stages=stages)
    assert planned.stages == (*((i, i) for i in range(count - 1)), (count - 1, 5))
    simulated = tf_ooo.simulate(planned, LAYERS, LINK)
    assert simulated.makespan_s >= 4 * sum(layer.busy_s for layer in LAYERS) / 2
    assert max(simulated.peak_bytes) == planned.predicted_peak_bytes


def test_by_hand():
    """1 + 5 and 2 + 1 + 1 + 3 s of forward, twice that of dO, a dW of 3 s each; two micro-batches."""
    planned = tf_ooo.plan(
        layers=LAYERS, schedule="gpipe", devices=2, microbatches=2, stages=[["b", "a"], ["c", "d", "e", "f"]]
    )
    assert planned.stages == ((0, 1), (2, 5))
    # F 6, then 7 + 7 of the second stage, its 14 + 12 twice, and the first's 12 + 6, updates of 0.5 each.
    assert tf_ooo.simulate(planned, LAYERS).makespan_s == pytest.approx(6 + 7 + 7 + 2 * 26 + 18 + 1)


def test_auto_compares_what_takes_so_many_stages():
    planned = tf_ooo.plan(layers=LAYERS, devices=2, microbatches=4, stages=["a", "b", "c", "d"])
    assert len(planned.stages) == 4
    assert TAKES[planned.policy] == 4 or planned.policy in ("modulo", "zb_search")


@pytest.mark.parametrize(
    ("asked", "message"),
    [
        (
            {"stages": ["a", "b", "c"], "schedule": "1f1b"},
            "stages: 3 are given, and this schedule takes 2",
        ),
        ({"stages": ["a", "x"]}, "stages: unknown layer 'x'"),
        ({"stages": [["a"], ["b", "c"]]}, "layer 'd' is in no stage nor are 2 more"),
        ({"stages": "ab"}, "stages='ab' is not accepted"),
        ({"stages": ["a", "b"], "mode": "layerpipe"}, "mode='layerpipe' has none"),
        (
            {"stages": ["a", "b"], "schedule": "pipedream"},
            "'pipedream' is one of mode layerpipe",
        ),
        ({"stages": ["a", "b"], "splits": True}, "no schedule, mode or stages beside it"),
        ({"splits": True, "schedule": "1f1b"}, "no schedule, mode or stages beside it"),
        (
            {"splits": True, "devices": 7, "microbatches": 3},
            "no division is possible: .*7 stages are more",
        ),
    ],
)
def test_what_is_refused(asked, message):
    with pytest.raises(tf_ooo.OptionsError, match=message):
        tf_ooo.plan(layers=LAYERS, **{"devices": 2, "microbatches": 4, **asked})


def test_layers_without_names_are_numbers():
    layers = [tf_ooo.LayerCosts(1.0, 1.0, 1.0)] * 5
    planned = tf_ooo.plan(layers=layers, schedule="1f1b", devices=2, stages=["0", "4"])
    assert planned.stages == ((0, 3), (4, 4))


@settings(max_examples=40, deadline=None)
@given(st.data())
def test_any_cut(data):
    """Planned as given, to the memory and the seconds that a simulation of it tells."""
    starts = sorted({0, *data.draw(st.lists(st.integers(1, 5), min_size=1, max_size=5))})
    bounds = tuple((a, b - 1) for a, b in itertools.pairwise([*starts, len(LAYERS)]))
    groups = [[layer.name for layer in LAYERS[a : b + 1]] for a, b in bounds]
    devices = len(bounds)
    planned = tf_ooo.plan(layers=LAYERS, schedule="zb_h1", devices=devices, microbatches=3, stages=groups)
    assert planned.stages == bounds
    assert Schedule.from_text(planned.to_text()) == planned
    simulated = tf_ooo.simulate(planned, LAYERS)
    slowest_s = max(sum(layer.busy_s for layer in LAYERS[a : b + 1]) for a, b in bounds)
    assert simulated.makespan_s >= 3 * slowest_s
    best = tf_ooo.plan(layers=LAYERS, schedule="zb_h1", devices=devices, microbatches=3)
    assert slowest_s >= max(sum(layer.busy_s for layer in LAYERS[a : b + 1]) for a, b in best.stages) - 1e-9


@settings(max_examples=30, deadline=None)
@given(
    st.lists(st.tuples(st.integers(1, 5), st.integers(0, 9)), min_size=4, max_size=8),
    st.sampled_from([2, 3, 4, 6]),
    st.sampled_from([2, 4, 6, 12]),
    st.sampled_from([tf_ooo.Link(), tf_ooo.Link(0.1, 5.0)]),
)
def test_any_splits(sizes, devices, microbatches, link):
    """Each division once; what is planned is the fastest of them, and has all of the work."""
    layers = [tf_ooo.LayerCosts(s, s, 2 * s, 1.0, weight_bytes=w, output_bytes=w) for s, w in sizes]
    rows = splits(Problem(tuple(layers), devices, microbatches, link))
    assert sorted(row.replicas for row in rows) == [n for n in range(1, devices + 1) if devices % n == 0]
    possible = [row for row in rows if row.plan is not None]
    assert possible == rows[: len(possible)]
    for row in rows:
        assert row.replicas * row.devices == devices
        assert (row.plan is None) == bool(row.reason)
    for row in possible:
        assert row.plan.trial.schedule.microbatches * row.replicas == microbatches
        assert row.plan.trial.schedule.devices == row.devices
        assert row.over_one_device <= devices + 1e-9
    if not possible:
        return
    asked = {"layers": layers, "devices": devices, "microbatches": microbatches, "link": link}
    best = tf_ooo.plan(**asked, splits=True)
    assert (best.workers, best.devices) == (rows[0].replicas, rows[0].devices)
    assert best.predicted_step_s == rows[0].step_s == min(row.step_s for row in possible)
    assert any(line.startswith("replicas x devices, the fastest is taken: ") for line in best.assumptions)
    assert Schedule.from_text(best.to_text()) == best


def test_the_command(tmp_path):
    costs = CostTable(LAYERS, LINK).save(tmp_path / "c.json")
    ask = ["plan", str(costs), "--devices", "2", "--microbatches", "4", "--json"]
    for text, bounds in (("a,c", "0-1"), ("a; b,c,d, e,f", "0-0")):
        out = tmp_path / "s.txt"
        ran = CliRunner().invoke(main, [*ask, "--stages", text, "--out", str(out)])
        assert ran.exit_code == 0, ran.stderr
        assert f"stage 0: {bounds}\n" in out.read_text()
        reasons = {row["schedule"]: row["reason"] for row in json.loads(ran.stdout)["candidates"]}
        assert "2 are given, and this schedule takes 4 on 2 devices" in reasons["zb_v"]
    ran = CliRunner().invoke(main, [*ask, "--stages", "a,z"])
    assert ran.exit_code == 2
    assert "stages: unknown layer 'z'" in ran.stderr
