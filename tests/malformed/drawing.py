"""A malformed input from a number."""

from __future__ import annotations

from collections.abc import Callable, Mapping

from tests.harness.drawing import Cases, Draw
from tests.malformed.case import Case
from tests.malformed.clusters import drawn_clusters
from tests.malformed.commands import drawn_commands
from tests.malformed.costs import drawn_costs
from tests.malformed.models import drawn_models
from tests.malformed.options import drawn_options
from tests.malformed.ports import drawn_ports
from tests.malformed.schedules import drawn_schedules

AREAS: Mapping[str, Callable[[Draw], Case]] = {
    "options": drawn_options,
    "costs": drawn_costs,
    "schedules": drawn_schedules,
    "commands": drawn_commands,
    "models": drawn_models,
    "clusters": drawn_clusters,
    "ports": drawn_ports,
}
# Each ten numbers are of these, in this order.
TURNS = (
    *("options", "costs", "models", "commands", "schedules"),
    *("clusters", "ports", "costs", "options", "commands"),
)


def area_of(number: int) -> str:
    """Return the area of the input of this number."""
    return TURNS[number % len(TURNS)]


CASES = Cases(lambda draw: AREAS[area_of(draw.number)](draw))
drawn = CASES.drawn
