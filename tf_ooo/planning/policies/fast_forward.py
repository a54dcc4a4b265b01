"""Fast-forwards gradients: all dO of a model, or of a stage's micro-batch, then its dW (EuroSys 2022)."""

from __future__ import annotations

from collections.abc import Sequence

from tf_ooo.planning.building.pipeline import MODE, StagedLayers, paced
from tf_ooo.planning.building.step_model import one_worker
from tf_ooo.planning.model.problem import Problem
from tf_ooo.planning.model.schedule import Schedule, Task
from tf_ooo.planning.policies import one_f_one_b
from tf_ooo.planning.policies.policy import Policy


def make(problem: Problem) -> Schedule:
    """Return a pipeline for several devices or micro-batches, unless another mode is asked for."""
    several = problem.devices > 1 or problem.microbatches > 1
    if problem.mode == MODE or (problem.mode is None and several):
        # The bubble is (p - 1)(F + dO) on p equal stages, for any costs; at most p micro-batches are in
        # flight, and fewer under a memory limit, down to one.
        return paced("fast_forward", StagedLayers.of(problem), one_f_one_b.pace(problem))
    layers = range(len(problem.layers))
    sent = [Task("comm", layer) for layer in layers]
    return one_worker("fast_forward", problem, _order(layers[::-1]), sent)


def _order(backward_layers: Sequence[int]) -> list[Task]:
    """Return all dO first; then dW, lowest layer first, as the next forward needs its weights first."""
    output_grads = [Task("dO", layer) for layer in backward_layers]
    return output_grads + [Task("dW", layer) for layer in sorted(backward_layers)]


POLICY = Policy(
    "fast_forward",
    ("single_device", "data_parallel", "pipeline"),
    make,
    backward_order=lambda layers, tasks: [task for task in _order(layers) if task in tasks],
)
