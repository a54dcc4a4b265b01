"""What a policy is asked to schedule."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

from tf_ooo.costs.layer_costs import LayerCosts, Link
from tf_ooo.errors import OptionsError
from tf_ooo.planning.model.schedule import Schedule


@dataclass(frozen=True)
class Problem:
    """Layers with their costs, and what there is to run them on.

    Attributes:
        layers: costs of ONE micro-batch.
        devices: stages' devices of a pipeline, or workers of data parallel training.
        microbatches: of one step.
        link: between each two devices, in each direction.
        memory_limit_bytes: of each device; None: no limit.
        options: what the policy itself offers (``group`` of modulo, ``k`` of reverse_first_k).
        mode: what the devices are for, where a policy serves several modes; None: not said.
    """

    layers: tuple[LayerCosts, ...]
    devices: int = 1
    microbatches: int = 1
    link: Link = field(default_factory=Link)
    memory_limit_bytes: int | None = None
    options: Mapping[str, Any] = field(default_factory=dict)
    mode: str | None = None

    def option(self, name: str, default: int, least: int = 0) -> int:
        """A whole-number option of the policy; OptionsError if it is none or below ``least``."""
        value = self.options.get(name, default)
        if not isinstance(value, int) or isinstance(value, bool) or value < least:
            raise OptionsError(f"{name} must be a whole number of at least {least}, got {value!r}")
        return value


@dataclass(frozen=True)
class Policy:
    """One way to schedule: a row of the table of names.

    ``make`` returns a schedule without predictions.  It keeps the memory limit if it can, and returns
    its leanest schedule if it cannot; whoever calls it checks by simulation.  ``options`` are the
    names that ``Problem.options`` may hold.  ``auto_tasks``: above so many F, dO and dW of one stage on
    each device, planning takes more than some seconds, and ``auto`` does without; None: never.
    ``by_name``: why ``auto`` never takes it, empty where it may.  ``costs_only``: of ``modes``, those that it
    plans from layers' costs and that cannot train by it.
    """

    name: str
    modes: tuple[str, ...]
    make: Callable[[Problem], Schedule]
    options: tuple[str, ...] = ()
    auto_tasks: int | None = None
    by_name: str = ""
    costs_only: tuple[str, ...] = ()

    @property
    def trains(self) -> tuple[str, ...]:
        """The modes that can train by it."""
        return tuple(mode for mode in self.modes if mode not in self.costs_only)
