"""Plain data that passes and planners share cannot be changed behind their backs."""

from __future__ import annotations

import dataclasses

import pytest

from grappler_passes.order import OrderPass
from grappler_passes.rewrite_plan import RewritePlan
from grappler_passes.verify import VerifyPass
from tf_ooo.data_parallel.ordering import _Ordered
from tf_ooo.layerpipe.delays import Register
from tf_ooo.lowering import TaskOps
from tf_ooo.memory import MemoryCurve
from tf_ooo.pipeline.ordering import LaneOrder
from tf_ooo.relation import Edges


@pytest.mark.parametrize(
    "value",
    [
        Edges([0], [1], None, "why"),
        MemoryCurve([0.0], [1.0]),
        TaskOps({}, (), {}, {}),
        LaneOrder(),
        Register(0, "a", "", 0, 1),
        OrderPass(RewritePlan()),
        VerifyPass(None),
        _Ordered(None, None, {}, {}, 0, ()),
    ],
    ids=lambda value: type(value).__name__,
)
def test_frozen(value):
    name = dataclasses.fields(value)[0].name
    with pytest.raises(dataclasses.FrozenInstanceError):
        setattr(value, name, None)
