from __future__ import annotations

import dataclasses

import pytest

from grappler_passes.passes.rewrite_plan import RewritePlan

MAPPINGS = [item.name for item in dataclasses.fields(RewritePlan) if item.name != "edges"]


@pytest.mark.parametrize("name", MAPPINGS)
def test_maps_are_copied_and_read_only(name):
    given = {"b": 1, "a": 0}
    plan = RewritePlan(**{name: given})
    given["c"] = 2
    assert list(getattr(plan, name).items()) == [("b", 1), ("a", 0)]
    with pytest.raises(TypeError):
        getattr(plan, name)["c"] = 2


def test_plans_are_equal_by_value():
    plan = RewritePlan(edges=(("a", "b"),), kinds={"a": "F"})
    assert plan == dataclasses.replace(plan)
    assert plan != dataclasses.replace(plan, kinds={"a": "dO"})


def test_nodes_with_an_attribute():
    plan = RewritePlan(
        kinds={"a": "F"}, layers={"b": 0}, streams={"c": 1}, priorities={"d": 0}, stages={"e": 1}
    )
    assert plan.annotated_nodes == set("abcde")
    assert RewritePlan(devices={"a": "x"}, joins={"b": ""}).annotated_nodes == set()
