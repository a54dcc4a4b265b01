"""Plain data that passes and planners share cannot be changed behind their backs."""

from __future__ import annotations

import dataclasses

import pytest

from grappler_passes.passes.order import OrderPass
from grappler_passes.passes.rewrite_plan import RewritePlan
from grappler_passes.passes.steps import Additions
from grappler_passes.passes.verify import VerifyPass
from tf_ooo.modes.data_parallel.ordering import _Ordered
from tf_ooo.modes.layerpipe.registers import Register
from tf_ooo.planning.model.memory import MemoryCurve
from tf_ooo.planning.model.relation import Edges
from tf_ooo.rewriting.lanes import LaneOrder
from tf_ooo.rewriting.lowering import TaskOps


@pytest.mark.parametrize(
    "value",
    [
        Edges([0], [1], None, "why"),
        MemoryCurve([0.0], [1.0]),
        TaskOps({}, (), None),
        LaneOrder(),
        Register(0, "a", "", 0, 1),
        OrderPass(RewritePlan()),
        VerifyPass(None),
        _Ordered(None, None, None, Additions({}, {}), ()),
    ],
    ids=lambda value: type(value).__name__,
)
def test_frozen(value):
    name = dataclasses.fields(value)[0].name
    with pytest.raises(dataclasses.FrozenInstanceError):
        setattr(value, name, None)
