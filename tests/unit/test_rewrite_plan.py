from __future__ import annotations

import pickle

import pytest
from hypothesis import given
from hypothesis import strategies as st

from grappler_passes.errors import PlanError
from grappler_passes.passes.rewrite_plan import RewritePlan

NAMES = st.text(min_size=1, max_size=8)
PLANS = st.builds(
    RewritePlan,
    edges=st.lists(st.tuples(NAMES, NAMES), max_size=4).map(tuple),
    kinds=st.dictionaries(NAMES, st.sampled_from(["F", "dO", "dW", "U", "comm"]), max_size=4),
    layers=st.dictionaries(NAMES, st.integers(0, 99), max_size=4),
    streams=st.dictionaries(NAMES, st.integers(0, 1), max_size=4),
    priorities=st.dictionaries(NAMES, st.integers(-9, 9), max_size=4),
    devices=st.dictionaries(NAMES, NAMES, max_size=4),
    separate=st.lists(NAMES, max_size=4).map(tuple),
)


@given(PLANS)
def test_text_round_trip(plan):
    copy = RewritePlan.from_json(plan.to_json())
    assert copy == plan
    assert hash(copy) == hash(plan)
    assert copy.to_json() == plan.to_json()
    assert pickle.loads(pickle.dumps(plan)) == plan


def test_maps_are_copied_and_read_only():
    kinds = {"a": "F"}
    plan = RewritePlan(kinds=kinds)
    kinds["b"] = "dO"
    assert plan.kinds == {"a": "F"}
    with pytest.raises(TypeError):
        plan.kinds["c"] = "F"


@pytest.mark.parametrize(
    ("text", "match"),
    [
        ("{", "not JSON"),
        ("[]", "format"),
        ('{"format": "other"}', "format"),
        ('{"format": "tf_ooo.rewrite_plan.v1", "colour": 1}', "colour"),
        ('{"format": "tf_ooo.rewrite_plan.v1", "edges": [["a"]]}', "edges"),
        ('{"format": "tf_ooo.rewrite_plan.v1", "layers": {"a": "x"}}', "layers"),
        ('{"format": "tf_ooo.rewrite_plan.v1", "layers": {"a": true}}', "layers"),
        ('{"format": "tf_ooo.rewrite_plan.v1", "separate": "a"}', "separate"),
    ],
)
def test_bad_text_is_named(text, match):
    with pytest.raises(PlanError, match=match):
        RewritePlan.from_json(text)
