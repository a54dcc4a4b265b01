"""One plan for every mode: what it holds, how often it is simulated, and what a new policy has to say."""

from __future__ import annotations

import ast
import dataclasses
import json
from pathlib import Path

import pytest
from click.testing import CliRunner

import tf_ooo
from tf_ooo.cli import main
from tf_ooo.costs.layer_costs import LayerCosts, Link
from tf_ooo.costs.table import CostTable
from tf_ooo.errors import OptionsError
from tf_ooo.modes.data_parallel import planning as data_parallel
from tf_ooo.modes.layerpipe import planning as layerpipe
from tf_ooo.modes.pipeline import planning as pipeline
from tf_ooo.modes.pipeline.mesh import make_mesh
from tf_ooo.modes.pipeline.partition import units_of
from tf_ooo.modes.pipeline.reporting import section_of
from tf_ooo.planning.choosing import plan as planning
from tf_ooo.planning.choosing.on_paper import plan_problem, problem_of
from tf_ooo.planning.choosing.plan import Candidate, choose
from tf_ooo.planning.model.problem import Problem
from tf_ooo.planning.policies import POLICIES, gpipe
from tf_ooo.planning.policies.policy import Chunks, Needs, Policy
from tf_ooo.rewriting.plan import plan

ROOT = Path(__file__).parents[2]
LAYERS = tuple(
    LayerCosts(1 + i % 3, 2, 1, 0.1, activation_bytes=8, weight_bytes=4, output_bytes=2, name=f"l{i}")
    for i in range(6)
)
LINK = Link(0.01, 1e3)


@pytest.fixture(name="simulated")
def _simulated(monkeypatch):
    """The schedules that are simulated to compare them, not those that policies simulate to make one."""
    schedules, simulate = [], planning.simulate

    def counted(schedule, *more):
        schedules.append(schedule)
        return simulate(schedule, *more)

    monkeypatch.setattr(planning, "simulate", counted)
    return schedules


def plan_layers(layers, schedule, limit=None, *, devices=1, microbatches=1, link=None):
    return plan_problem(problem_of(layers, devices, microbatches, link, limit, None), schedule)


def of_pipeline():
    return pipeline.make_plan(LAYERS, units_of(6, []), pipeline.PlanRequest("auto", 2, 4, LINK))


def of_data_parallel():
    return data_parallel.make_plan(LAYERS, LINK, 2, "auto", steps=4).plan


PLANS = {
    "paper, auto": lambda: plan_layers(LAYERS, "auto", devices=2, microbatches=4, link=LINK),
    "paper, named": lambda: plan_layers(LAYERS, "zb_h1", devices=2, microbatches=4, link=LINK),
    "paper, with a limit": lambda: plan_layers(LAYERS, "1f1b", 200, devices=2, microbatches=4),
    "pipeline": of_pipeline,
    "data parallel": of_data_parallel,
    "layerpipe": lambda: layerpipe.make_plan("auto", LAYERS, LINK, 2, 8),
}


@pytest.mark.parametrize("name", PLANS)
def test_every_schedule_is_simulated_once(name, simulated):
    chosen = PLANS[name]()
    assert chosen.schedule.predicted_step_s == chosen.step_s == chosen.trial.step_time.step_s(chosen.timeline)
    assert chosen.schedule.predicted_peak_bytes == max(chosen.timeline.peak_bytes)
    possible = [candidate for candidate in chosen.candidates if candidate.trial is not None]
    stock_too = name == "data parallel"
    assert len(simulated) == max(len(possible), 1) + stock_too
    assert len({id(schedule) for schedule in simulated}) == len(simulated)


def test_what_is_only_made_is_not_simulated(simulated):
    schedule = data_parallel.plain_schedule(4, "reverse_first_k", 2, {"k": 9})
    assert (schedule.policy, schedule.predicted_step_s) == ("reverse_first_k", None)
    assert not simulated


def test_candidates_say_why_not():
    chosen = plan_layers(LAYERS, "auto", 60, devices=2, microbatches=4)
    reasons = {candidate.name: candidate.reason for candidate in chosen.candidates}
    assert reasons[chosen.schedule.policy] == ""
    assert reasons["gpipe"].startswith("needs ")
    assert [c.step_s for c in chosen.candidates] == sorted(c.step_s for c in chosen.candidates)
    problem = Problem(LAYERS)
    with pytest.raises(OptionsError, match="no schedule is possible: a: too long; b: too short"):
        choose([Candidate("a", problem, reason="too long"), Candidate("b", problem, reason="too short")])


def test_a_reason_that_many_have_is_said_once():
    """A line for 12 schedules, and not one each."""
    with pytest.raises(OptionsError) as caught:
        plan_layers(LAYERS, "auto", devices=len(LAYERS) + 1, microbatches=4)
    said = str(caught.value)
    assert said.count("7 stages are more than the 6 layers") == 1
    assert len(said) < 400
    rows = [
        Candidate(name, Problem(LAYERS), reason=reason) for name, reason in zip("abcde", "vvwxy", strict=True)
    ]
    with pytest.raises(
        OptionsError, match="possible: a, b: v; ask for one of the 3 others by name to see why"
    ):
        choose(rows)


@pytest.mark.parametrize("schedule", [["1f1b"], {"1f1b"}, {}, None, 3])
def test_a_schedule_that_is_no_name(schedule):
    with pytest.raises(OptionsError, match="^schedule=.* is not accepted; accepted: auto, "):
        plan_layers(LAYERS, schedule)


def test_a_misspelt_argument_of_plan():
    with pytest.raises(OptionsError, match=r"unknown option micrbatches=2 \(did you mean 'microbatches'\?\)"):
        tf_ooo.plan(layers=LAYERS, micrbatches=2)


def test_policies_say_what_data_parallel_asks():
    assert data_parallel.needs_costs("auto", ())
    assert data_parallel.needs_costs("search", ())
    assert data_parallel.needs_costs("reverse_first_k", ())
    assert not data_parallel.needs_costs("reverse_first_k", ("k",))
    assert not data_parallel.needs_costs("in_order", ())
    assert {candidate.name for candidate in of_data_parallel().candidates} == {"reverse_first_k", "search"}


def _for_data_parallel(monkeypatch, make, **more):
    """A policy of data parallel that orders communication, with an option of its own."""
    policy = Policy("own", ("data_parallel",), make, ("depth",), needs=Needs(costs=True, link=True), **more)
    monkeypatch.setitem(POLICIES, "own", policy)


def test_data_parallel_hands_on_all_options_of_a_policy(monkeypatch):
    asked = []

    def make(problem):
        asked.append(dict(problem.options))
        return POLICIES["fast_forward"].make(
            Problem(problem.layers, 2, link=problem.link, mode="data_parallel")
        )

    _for_data_parallel(monkeypatch, make)
    data_parallel.make_plan(LAYERS, LINK, 2, "own", 4, options={"depth": 3, "of another": 1})
    data_parallel.plain_schedule(6, "own", 2, {"depth": 5})
    assert asked == [{"depth": 3}, {"depth": 5}]
    assert {candidate.name for candidate in of_data_parallel().candidates} == {
        "own",
        "reverse_first_k",
        "search",
    }


def test_a_pipeline_hands_on_all_options_of_a_policy(monkeypatch):
    """Besides that for the number of stages, which is that of the cut."""
    asked = []

    def make(problem):
        asked.append(dict(problem.options))
        return gpipe.make(dataclasses.replace(problem, options={}))

    chunks = Needs(chunks=Chunks((1,), group_option="group"))
    monkeypatch.setitem(POLICIES, "own", Policy("own", ("pipeline",), make, ("depth", "group"), needs=chunks))
    wanted = pipeline.PlanRequest("own", 2, 4, LINK, options={"depth": 3, "group": 3})
    assert pipeline.make_plan(LAYERS, units_of(6, []), wanted).problem.bounds == ((0, 2), (3, 5))
    assert asked == [{"depth": 3, "group": 1}]


def raising(problem):
    raise OptionsError("not for these")


@pytest.mark.parametrize(
    ("more", "why"),
    [
        ({}, "not for these"),
        ({"auto_tasks": 5}, "not tried: takes long for 6 tasks"),
    ],
)
def test_auto_of_data_parallel_goes_without_a_policy_and_says_why(monkeypatch, more, why):
    usual = of_data_parallel()
    _for_data_parallel(monkeypatch, raising, **more)
    chosen = of_data_parallel()
    reasons = {candidate.name: candidate.reason for candidate in chosen.candidates}
    assert reasons["own"].startswith(why)
    assert not reasons["search"]
    assert (chosen.schedule.policy, chosen.step_s) == (
        usual.schedule.policy,
        pytest.approx(usual.step_s, rel=0.1),
    )
    with pytest.raises(OptionsError, match="not for these"):
        data_parallel.make_plan(LAYERS, LINK, 2, "own", 4)


def test_auto_of_a_pipeline_goes_without_what_takes_long(monkeypatch):
    """Unless nothing else is possible."""
    calls = []

    def make(problem):
        calls.append(problem)
        return gpipe.make(problem)

    odd = Policy("own", ("pipeline",), make, auto_tasks=23)
    monkeypatch.setitem(POLICIES, "own", odd)
    monkeypatch.setattr(pipeline, "SCHEDULES", ("gpipe", "own"))
    reasons = {candidate.name: candidate.reason for candidate in of_pipeline().candidates}
    assert reasons == {"gpipe": "", "own": "not tried: takes long for 24 tasks; ask for it by name"}
    assert not calls
    monkeypatch.setattr(pipeline, "SCHEDULES", ("own",))
    assert of_pipeline().candidates[0].name == "own"
    assert calls


def test_a_new_policy_needs_its_row_only(monkeypatch, tmp_path):
    """Three stages on each device: the pipeline cuts for it, plan() and the command line know it."""
    triple = Policy(
        "triple", ("pipeline",), gpipe.make, ("depth",), needs=Needs(chunks=Chunks((3,), option="depth"))
    )
    seen = []

    def make(problem):
        seen.append((len(problem.layers), dict(problem.options)))
        return POLICIES["interleaved_1f1b"].make(Problem(problem.layers, 2, 4, options={"chunks": 3}))

    monkeypatch.setitem(POLICIES, "triple", Policy(**{**vars(triple), "make": make}))
    wanted = pipeline.PlanRequest("triple", 2, 4, LINK)
    chosen = pipeline.make_plan(LAYERS, units_of(6, []), wanted)
    assert seen == [(6, {"depth": 3})]
    assert len(chosen.problem.bounds) == 6
    assert plan(layers=LAYERS, schedule="triple", devices=2, microbatches=4).microbatches == 4
    costs = CostTable(LAYERS).save(tmp_path / "costs.json")
    arguments = ["plan", str(costs), "--devices", "2", "--microbatches", "4", "--option", "depth=3", "--json"]
    result = CliRunner().invoke(main, arguments)
    assert "triple" in [row["schedule"] for row in json.loads(result.stdout)["candidates"]]


def test_nobody_else_knows_a_policy_by_name():
    """No constant is a policy's name outside of the policies' own files."""
    names, strangers = set(POLICIES) - {"search", "layerpipe"}, []  # these are words and a mode, too
    for path in (ROOT / "tf_ooo").rglob("*.py"):
        if "policies" in path.parts:
            continue
        constants = [node for node in ast.walk(ast.parse(path.read_text())) if isinstance(node, ast.Constant)]
        strangers += [(path.name, each.lineno, each.value) for each in constants if each.value in names]
    assert not strangers


def test_sections_read_as_fields_and_as_json():
    chosen = make_mesh(LAYERS, units_of(6, []), pipeline.PlanRequest("auto", 2, 4, LINK), (1,))
    section = section_of(chosen, CostTable(LAYERS, LINK), ["a", "b"])
    assert section["devices"] == section.devices == ["a", "b"]
    assert section["stages"][0]["layers"] == section.stages[0].layers
    assert section["stages"][0]["sends"] == {str(to): size for to, size in section.stages[0].sends.items()}
    assert section["link"] == {"latency_s": 0.01, "bytes_per_s": 1e3, "overhead_s_per_byte": 0.0}
    assert json.loads(json.dumps(section.to_dict())) == section
    assert "reason" not in section["candidates"][0]
    free = section_of(chosen, CostTable(LAYERS), ["a", "b"])
    assert free["link"]["bytes_per_s"] is None
    with pytest.raises(KeyError):
        section["no such"]


def test_sections_of_other_modes_are_empty():
    from tf_ooo.report.report import Report

    report = Report()
    assert report.pipeline == report.layerpipe == {}
    assert not report.pipeline
    assert report.pipeline.get("stages") is None
    assert report.to_dict()["layerpipe"] == {}


@pytest.mark.parametrize(
    ("asked", "count"),
    [
        ({"devices": 2}, 8),
        ({"devices": 2, "batch": 3}, 3),
        ({"devices": 2, "microbatches": 5}, 5),
        ({"devices": 1}, 1),
        ({"devices": 2, "mode": "data_parallel"}, 1),
        ({"devices": 2, "schedule": "reverse_first_k"}, 1),
    ],
)
def test_a_pipeline_has_the_micro_batches_of_a_fit(asked, count):
    assert plan(layers=[LayerCosts(1.0, 1.0, 1.0)] * 4, **asked).microbatches == count


@pytest.mark.parametrize(("inputs", "step_s"), [((None, None, None), 16.0), (((), (), (0, 1)), 12.0)])
def test_stages_of_two_branches_run_at_once(inputs, step_s):
    """Backward of two micro-batches takes 6 s, and 3 s more for each stage that waits for the one above.

    In a chain it begins after 3 s and two stages wait; where two stand beside each other, after 2 s, and one.
    """
    layers = [LayerCosts(1.0, 2.0, 1.0, inputs=read) for read in inputs]
    for name in ("gpipe", "1f1b"):
        schedule = tf_ooo.plan(layers=layers, devices=3, microbatches=2, schedule=name)
        assert schedule.predicted_step_s == step_s
