"""Options that are none."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

from tests.malformed.case import Case, Draw
from tests.malformed.fits import fit_if_made

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


def drawn_options(draw: Draw) -> Case:
    """A wrong value, a misspelt or foreign name, a contradiction, or a wrong mode."""
    kinds = (_value, _value, _value, _misspelt, _foreign, _contradiction, _mode, _schedule, _place, _function)
    return draw.choice(kinds)(draw)


def _types() -> dict[str, Any]:
    import tf_ooo

    modes = (tf_ooo.SingleDevice, tf_ooo.DataParallel, tf_ooo.Pipeline, tf_ooo.LayerPipe)
    return dict(zip(MODES, modes, strict=True))


def _case(text: str, named: Any, make: Callable[[], Any]) -> Case:
    return Case("options", text, named, lambda folder: fit_if_made(make, folder))


def _way(draw: Draw, mode: str, **given: Any) -> tuple[str, Callable[[], Any]]:
    """One of the ways in which options are given: as text, and what makes them."""
    import tf_ooo

    arguments = ", ".join(f"{name}={value!r:.60}" for name, value in given.items())
    typed = _types()[mode]
    ways: list[tuple[str, Callable[[], Any]]] = [
        (f"OOOBackprop(mode={mode!r}, {arguments})", lambda: tf_ooo.OOOBackprop(mode=mode, **given)),
        (f"OOOBackprop({typed.__name__}({arguments}))", lambda: tf_ooo.OOOBackprop(typed(**given))),
        (
            f"OOOBackprop(Options(mode={mode!r}, {arguments}))",
            lambda: tf_ooo.OOOBackprop(tf_ooo.Options(mode=mode, **given)),
        ),
    ]
    if mode == "single_device":
        ways += [
            (
                f"tf_ooo.function(mode={mode!r}, {arguments})",
                lambda: tf_ooo.function(abs, mode=mode, **given),
            ),
            (
                f"tf_ooo.enabled(Options({arguments}))",
                lambda: tf_ooo.enabled(tf_ooo.Options(**given)),
            ),
        ]
    return draw.choice(ways)


def _value(draw: Draw) -> Case:
    mode = draw.choice(MODES)
    name = draw.choice([name for name in _types()[mode].defaults() if name != "schedule"])
    value = draw.choice(VALUES)
    text, make = _way(draw, mode, **{name: value})
    return _case(text, [[name]], make)


def _misspelt(draw: Draw) -> Case:
    mode = draw.choice(MODES)
    options = _types()[mode].defaults()
    name = draw.choice(list(options))
    wrong = draw.misspelt(name)
    text, make = _way(draw, mode, **{wrong: options[name]})
    return _case(text, [[wrong], [name]], make)


def _foreign(draw: Draw) -> Case:
    mode, other = draw.choice(MODES), draw.choice(MODES)
    own = _types()[mode].defaults()
    foreign = [name for name in _types()[other].defaults() if name not in own] or ["depth"]
    name = draw.choice(foreign)
    text, make = _way(draw, mode, **{name: draw.choice((2, "fp16", True))})
    return _case(text, [[name]], make)


def _contradiction(draw: Draw) -> Case:
    mode, options, against = draw.choice(CONTRADICTIONS)
    text, make = _way(draw, mode, **options, **against)
    return _case(text, [list(options)], make)


def _mode(draw: Draw) -> Case:
    import tf_ooo

    mode = draw.choice((*VALUES[1:], draw.misspelt(draw.choice(MODES)), tf_ooo.Pipeline, "Pipeline", "auto "))
    where, make = draw.choice(
        (
            ("OOOBackprop(mode=", lambda: tf_ooo.OOOBackprop(mode=mode)),
            ("Options(mode=", lambda: tf_ooo.Options(mode=mode)),
            ("tf_ooo.function(mode=", lambda: tf_ooo.function(abs, mode=mode)),
            ("tf_ooo.enabled(", lambda: tf_ooo.enabled(mode)),
        )
    )
    return _case(f"{where}{mode!r:.60})", [["mode", "enabled"]], make)


def _schedule(draw: Draw) -> Case:
    from tf_ooo.planning.policies import POLICIES

    mode, name = draw.choice(MODES), draw.choice(list(POLICIES))
    value = draw.choice((name, draw.misspelt(name), name.upper(), draw.choice(VALUES), [name]))
    text, make = _way(draw, mode, schedule=value)
    return _case(text, [["schedule"]], make)


def _place(draw: Draw) -> Case:
    """By position, twice, or beside typed options."""
    import tf_ooo

    typed = draw.choice(list(_types().values()))
    ways: tuple[tuple[str, Any, Callable[[], Any]], ...] = (
        (f"{typed.__name__}(4)", [[typed.__name__]], lambda: typed(4)),
        (f"{typed.__name__}('auto', 3)", [[typed.__name__]], lambda: typed("auto", 3)),
        (
            f"OOOBackprop({typed.__name__}(), profile_steps=0)",
            [["profile_steps"]],
            lambda: tf_ooo.OOOBackprop(typed(), profile_steps=0),
        ),
        (
            f"OOOBackprop({typed.__name__}(), streams=2)",
            [["streams"]],
            lambda: tf_ooo.OOOBackprop(typed(), streams=2),
        ),
        (f"OOOBackprop({typed.__name__})", [[typed.__name__]], lambda: tf_ooo.OOOBackprop(typed)),
        ("OOOBackprop(tf_ooo.Report)", [["mode"]], lambda: tf_ooo.OOOBackprop(tf_ooo.OOOBackprop)),
    )
    text, named, make = draw.choice(ways)
    return _case(text, named, make)


def _function(draw: Draw) -> Case:
    import tf_ooo

    value = draw.choice((3, "pipeline", "in_order", b"x", [], {}, 1.5, True, tf_ooo.SingleDevice()))
    typed = draw.choice([kind for kind in _types().values() if kind is not tf_ooo.SingleDevice])
    ways: tuple[tuple[str, Any, Callable[[], Any]], ...] = (
        (f"tf_ooo.function({value!r:.60})", [["tf_ooo.function"]], lambda: tf_ooo.function(value)),
        (
            f"@tf_ooo.function(mode={typed.mode!r})",
            [[typed.mode]],
            lambda: tf_ooo.function(abs, mode=typed.mode),
        ),
        (f"tf_ooo.enabled({typed.__name__}())", [[typed.mode]], lambda: tf_ooo.enabled(typed())),
        (
            "tf_ooo.enabled(SingleDevice(profile_steps=7))",
            [["profile_steps"]],
            lambda: tf_ooo.enabled(tf_ooo.SingleDevice(profile_steps=7)),
        ),
    )
    text, named, make = draw.choice(ways)
    return _case(text, named, make)
