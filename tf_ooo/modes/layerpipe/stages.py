"""Says which processor runs what of a layer, and in which round.

Time goes in rounds.  A batch that enters in round n is in its forward pass on processor p in round n + p
and in its backward pass in round n + 2 (P - 1) - p, P being the number of processors: each round every
processor works on other batches, and reads only what was made in rounds before.  The gradient of a layer
that stands on processor p is applied 2 (P - 1 - p) rounds after its forward pass (LayerPipe2,
arXiv 2512.08160: twice the number of stages after the layer).  No TensorFlow here.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from tf_ooo.planning.model.schedule import Schedule

# The part nearer to the loss of a dO in two parts, and what comes before it.
HIGH = "dO/high"


@dataclass(frozen=True)
class Stages:
    """Says where the tasks of layers run.

    Attributes:
        of: ``{(kind, layer): processor}`` for F, dO and dW, and HIGH; of a dO in two parts that of the part
            nearer to the input.  An update runs with its dW.
        shares: ``{layer: (share, processor)}`` of dO in two parts: the part nearer to the loss.
    """

    processors: int
    of: Mapping[tuple[str, int], int]
    shares: Mapping[int, tuple[float, int]]

    def backward_round_on(self, processor: int) -> int:
        """The round of all backward passes on a processor."""
        return 2 * (self.processors - 1) - processor

    def stages_after(self, layer: int) -> int:
        """S(l) of LayerPipe2: processors between the layer and the loss."""
        return self.processors - 1 - min(self.of["F", layer], self.of["dW", layer])

    def delay_steps(self, layer: int) -> int:
        """Return how many steps after its forward pass a layer's gradient is applied: 2 S(l)."""
        return 2 * self.stages_after(layer)

    def read_round(self, layer: int) -> int:
        """Return when the forward pass' weights are read: one round before, if they come from afar."""
        return self.of["F", layer] - (self.of["F", layer] != self.of["dW", layer])

    def round_of(self, kind: str, layer: int) -> int:
        """Return the round of a task, counted from that in which its batch comes in."""
        if kind == "U":
            return self.read_round(layer) + self.delay_steps(layer)
        return self.of["F", layer] if kind == "F" else self.backward_round_on(self.of[kind, layer])


def stages_of(schedule: Schedule, layers: int) -> Stages:
    """Return the stages of a ``layerpipe`` or ``pipedream`` schedule."""
    of: dict[tuple[str, int], int] = {}
    parts: dict[int, list[tuple[int, int]]] = {}
    for (device, _), tasks in schedule.lanes.items():
        for task in tasks:
            if task.microbatch or task.kind == "U":
                continue
            for layer in schedule.layers_of(task.stage):
                of[task.kind, layer] = device
                if task.kind == "dO":
                    parts.setdefault(layer, []).append((task.part, device))
    shares = {}
    for layer, placed in parts.items():
        if len(placed) > 1:
            (_, low), (_, high) = sorted(placed)[0], sorted(placed)[-1]
            of["dO", layer] = low
            if low != high:
                shares[layer] = (schedule.parts["dO", layer][-1], high)
                of[HIGH, layer] = high
    processors = 1 + max(device for device, _ in schedule.lanes)
    for layer in range(layers):  # without work, and so in no lane
        known = next((of[kind, layer] for kind in ("F", "dW", "dO") if (kind, layer) in of), None)
        before = of.get(("F", layer - 1), 0)
        for kind in ("F", "dO", "dW"):
            of.setdefault((kind, layer), before if known is None else known)
    return Stages(processors, of, shares)
