"""Options that are none."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from tests.harness.drawing import Draw
from tests.malformed.case import Case, Named, written
from tests.malformed.fits import data, perceptron, refused_or_trains

MODES = ("single_device", "data_parallel", "pipeline", "layerpipe")
VALUES: tuple[Any, ...] = (
    *(None, True, -1, 0, 1.5, float("nan"), float("inf"), -0.0, 10**30, 1j),
    *("", " ", "yes", "autoo", "none", "1", "0.5", "\n", "ü" * 300, b"auto"),
    *([], [0], {}, {"a": 1}, (), (1, 2), {"x"}, object, len, range(3), NotImplemented),
)
# Each pair is fine alone.
CONTRADICTIONS: tuple[tuple[str, Mapping[str, Any], Mapping[str, Any]], ...] = (
    ("data_parallel", {"weighting": "samples"}, {"op": "Sum"}),
    ("data_parallel", {"weighting": "samples"}, {"op": "Adasum"}),
    ("data_parallel", {"k": 3}, {"schedule": "search"}),
    ("data_parallel", {"k": 0}, {"schedule": "auto"}),
    ("pipeline", {"chunks": 2}, {"schedule": "gpipe"}),
    ("pipeline", {"group": 2}, {"schedule": "zb_h1"}),
    ("pipeline", {"op": "Sum"}, {"replicas": 1}),
    ("pipeline", {"compression": "fp16"}, {"replicas": 1}),
    ("single_device", {"measure_gains_s": 2.0}, {"gains": "gains.json"}),
)
WAYS = (
    "tf_ooo.OOOBackprop(mode=mode, **given)",
    "tf_ooo.OOOBackprop(typed(**given))",
    "tf_ooo.OOOBackprop(tf_ooo.Options(mode=mode, **given))",
)
WAYS_OF_ONE_DEVICE = (
    "tf_ooo.function(abs, mode=mode, **given)",
    "tf_ooo.enabled(tf_ooo.Options(**given))",
)
WAYS_OF_A_MODE = (
    "tf_ooo.OOOBackprop(mode=mode)",
    "tf_ooo.Options(mode=mode)",
    "tf_ooo.function(abs, mode=mode)",
    "tf_ooo.enabled(mode)",
)


def drawn_options(draw: Draw) -> Case:
    """A wrong value, a misspelt or foreign name, a contradiction, or a wrong mode."""
    kinds = (_value, _value, _value, _misspelt, _foreign, _contradiction, _mode, _schedule, _place, _function)
    return draw.choice(kinds)(draw)


def _types() -> dict[str, Any]:
    import tf_ooo

    modes = (tf_ooo.SingleDevice, tf_ooo.DataParallel, tf_ooo.Pipeline, tf_ooo.LayerPipe)
    return dict(zip(MODES, modes, strict=True))


def _fit(made: Any, folder: Path) -> None:
    """A callback that is accepted trains."""
    if hasattr(made, "on_train_begin"):
        refused_or_trains(perceptron, data(), made)


def _written(python: str, named: Named, **names: Any) -> Case:
    return written("options", python, named, _fit, **names)


def _given(draw: Draw, mode: str, named: Named, **given: Any) -> Case:
    """In one of the ways in which options are given."""
    ways = WAYS + WAYS_OF_ONE_DEVICE if mode == "single_device" else WAYS
    return _written(draw.choice(ways), named, mode=mode, typed=_types()[mode], given=given)


def _value(draw: Draw) -> Case:
    mode = draw.choice(MODES)
    name = draw.choice([name for name in _types()[mode].defaults() if name != "schedule"])
    return _given(draw, mode, [[name]], **{name: draw.choice(VALUES)})


def _misspelt(draw: Draw) -> Case:
    mode = draw.choice(MODES)
    options = _types()[mode].defaults()
    name = draw.choice(list(options))
    wrong = draw.misspelt(name)
    return _given(draw, mode, [[wrong], [name]], **{wrong: options[name]})


def _foreign(draw: Draw) -> Case:
    mode, other = draw.choice(MODES), draw.choice(MODES)
    own = _types()[mode].defaults()
    name = draw.choice([name for name in _types()[other].defaults() if name not in own] or ["depth"])
    return _given(draw, mode, [[name]], **{name: draw.choice((2, "fp16", True))})


def _contradiction(draw: Draw) -> Case:
    mode, options, against = draw.choice(CONTRADICTIONS)
    return _given(draw, mode, [list(options)], **options, **against)


def _mode(draw: Draw) -> Case:
    misspelt = draw.misspelt(draw.choice(MODES))
    mode = draw.choice((*VALUES[1:], misspelt, _types()["pipeline"], "Pipeline", "auto "))
    return _written(draw.choice(WAYS_OF_A_MODE), [["mode", "enabled"]], mode=mode)


def _schedule(draw: Draw) -> Case:
    from tf_ooo.planning.policies import POLICIES

    mode, name = draw.choice(MODES), draw.choice(list(POLICIES))
    value = draw.choice((name, draw.misspelt(name), name.upper(), draw.choice(VALUES), [name]))
    return _given(draw, mode, [["schedule"]], schedule=value)


def _place(draw: Draw) -> Case:
    """By position, twice, or beside typed options."""
    typed = draw.choice(list(_types().values()))
    own = typed.__name__
    python, name = draw.choice(
        (
            ("typed(4)", own),
            ("typed('auto', 3)", own),
            ("tf_ooo.OOOBackprop(typed(), profile_steps=0)", "profile_steps"),
            ("tf_ooo.OOOBackprop(typed(), streams=2)", "streams"),
            ("tf_ooo.OOOBackprop(typed)", own),
            ("tf_ooo.OOOBackprop(tf_ooo.OOOBackprop)", "mode"),
        )
    )
    return _written(python, [[name]], typed=typed)


def _function(draw: Draw) -> Case:
    typed = draw.choice([kind for mode, kind in _types().items() if mode != "single_device"])
    value = draw.choice((3, "pipeline", "in_order", b"x", [], {}, 1.5, True, _types()["single_device"]()))
    python, name = draw.choice(
        (
            ("tf_ooo.function(value)", "tf_ooo.function"),
            ("tf_ooo.function(abs, mode=typed.mode)", typed.mode),
            ("tf_ooo.enabled(typed())", typed.mode),
            ("tf_ooo.enabled(tf_ooo.SingleDevice(profile_steps=7))", "profile_steps"),
        )
    )
    return _written(python, [[name]], typed=typed, value=value)
