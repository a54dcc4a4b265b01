"""Finds how many rows ``predict`` passes through the stages at once, to keep the limit of memory.

No TensorFlow here.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

from tf_ooo.modes.pipeline.mesh import Mesh


@dataclass(frozen=True)
class Pieces:
    """Says whether a batch passes whole, or in pieces of as many rows as fit.

    ``rows``: of a training micro-batch, which fit in any case; 0: nothing is cut.  ``most_rows``: that fit.
    """

    rows: int = 0
    most_rows: float = math.inf

    def of(self, rows: int) -> tuple[int, ...]:
        """Return rows of each piece, none empty; one: the batch passes whole."""
        fit = max(self.rows, self.most_rows)
        if not self.rows or rows <= fit:
            return (rows,)
        whole, left = divmod(rows, int(fit))
        return (int(fit),) * whole + ((left,) if left else ())


def pieces_of(mesh: Mesh, rows: int, limit_bytes: int | None) -> Pieces:
    """Make the pieces of a plan with micro-batches of up to ``rows`` rows; 0: not known, nothing is cut.

    A forward pass is taken to need, beside the weights and slots of a device, all tensors of one layer at a
    time, for which training keeps those of each layer.  Of replicas each counts as in the plan, with copies
    of what others hold.  ``limit_bytes``: of predicted peaks, on the device that has most memory; None: none.
    """
    if not rows or limit_bytes is None:
        return Pieces()
    problem, numbers = mesh.plan.problem, mesh.plan.schedule.device_of_stage
    held = [float(less) for less in problem.less_bytes] or [0.0] * mesh.chosen.devices
    of_a_row = [0.0] * mesh.chosen.devices
    for number, (first, last) in zip(numbers, problem.bounds, strict=True):
        for layer in problem.model[first : last + 1]:
            held[number] += layer.weight_bytes + layer.slot_bytes
            needed = (layer.activation_bytes + layer.output_bytes) / rows
            of_a_row[number] = max(of_a_row[number], needed)
    most = [
        (limit_bytes - there) / each if each else math.inf for there, each in zip(held, of_a_row, strict=True)
    ]
    return Pieces(rows, max(0.0, min(most)))
