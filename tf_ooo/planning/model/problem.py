"""What a policy is asked to schedule."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from tf_ooo.costs.layer_costs import LayerCosts, Link
from tf_ooo.errors import OptionsError


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
        bounds: (first, last) layer of a model that each of ``layers`` stands for; empty: each is one.
        recompute: which layers run their forward again before their dO: ``"none"``, ``"all"`` that then keep
            less, or ``"auto"``: as few seconds as keep the memory limit.
        recomputed: the layers that do, of ``model`` if it is given; ``layers`` have the costs of that.
        plain: the layers as they are without; empty: ``layers``.
        model: with ``bounds``, the layers themselves, which are chosen from.
        fixed: layers that cannot run again.
        cut: (first, last) of ``layers`` of each stage of a pipeline; empty: the policy cuts.
    """

    layers: tuple[LayerCosts, ...]
    devices: int = 1
    microbatches: int = 1
    link: Link = field(default_factory=Link)
    memory_limit_bytes: int | None = None
    options: Mapping[str, Any] = field(default_factory=dict)
    mode: str | None = None
    bounds: tuple[tuple[int, int], ...] = ()
    recompute: str = "none"
    recomputed: tuple[int, ...] = ()
    plain: tuple[LayerCosts, ...] = ()
    model: tuple[LayerCosts, ...] = ()
    fixed: frozenset[int] = frozenset()
    cut: tuple[tuple[int, int], ...] = ()

    @property
    def own_layers(self) -> tuple[LayerCosts, ...]:
        """The layers of the model, where ``layers`` are stages of it."""
        return self.model or self.layers

    def flag(self, name: str, default: bool) -> bool:
        """A yes-or-no option of the policy; OptionsError if it is none."""
        value = self.options.get(name, default)
        if not isinstance(value, bool):
            raise OptionsError(f"{name} must be True or False, got {value!r:.60}")
        return value

    def option(self, name: str, default: int, least: int = 0) -> int:
        """A whole-number option of the policy; OptionsError if it is none or below ``least``."""
        value = self.options.get(name, default)
        if not isinstance(value, int) or isinstance(value, bool) or value < least:
            raise OptionsError(f"{name} must be a whole number of at least {least}, got {value!r}")
        return value
