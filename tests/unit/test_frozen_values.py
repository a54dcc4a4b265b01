"""Plain data that passes and planners share cannot be changed behind their backs."""

from __future__ import annotations

import dataclasses
import importlib
import pkgutil

from grappler_passes import passes
from grappler_passes.passes.base import Pass
from tests.mutation.targets import TESTS
from tf_ooo.modes import compiled, layerpipe


def test_what_is_not_frozen_collects():
    changed = set()
    for path in TESTS:
        module = importlib.import_module(path.removesuffix(".py").replace("/", "."))
        own = [kind for kind in vars(module).values() if getattr(kind, "__module__", "") == module.__name__]
        data = [kind for kind in own if dataclasses.is_dataclass(kind)]
        changed |= {kind.__name__ for kind in data if not kind.__dataclass_params__.frozen}
    assert changed == {"GradientFlow", "_Applied", "_Part"}


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
