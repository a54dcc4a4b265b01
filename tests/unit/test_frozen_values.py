"""Plain data that passes and planners share cannot be changed behind their backs."""

from __future__ import annotations

import dataclasses
import importlib
import pkgutil

import pytest

from grappler_passes import passes
from grappler_passes.passes.base import Pass
from grappler_passes.passes.rewrite_plan import OrderPass, RewritePlan
from grappler_passes.passes.steps import Additions
from grappler_passes.passes.verify import VerifyPass
from tf_ooo.modes import compiled, layerpipe
from tf_ooo.modes.data_parallel.ordering import _Ordered
from tf_ooo.modes.layerpipe.cutting import Register
from tf_ooo.planning.model.memory import MemoryCurve
from tf_ooo.planning.model.relation import Edges
from tf_ooo.rewriting.lowering import LaneOrder, TaskOps


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


def _passes(kind=Pass):
    for below in kind.__subclasses__():
        yield below
        yield from _passes(below)


def test_every_pass_is_frozen():
    for room in (passes, compiled, layerpipe):
        for module in pkgutil.iter_modules(room.__path__, f"{room.__name__}."):
            importlib.import_module(module.name)
    ours = [kind for kind in _passes() if kind.__module__.split(".")[0] in ("grappler_passes", "tf_ooo")]
    assert len(ours) > 20
    assert all(kind.__dataclass_params__.frozen for kind in ours), ours
