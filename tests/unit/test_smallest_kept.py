"""The limit that a refusal names holds in the next fit too, whose costs are measured again."""

from __future__ import annotations

import dataclasses
import random

import pytest

from tf_ooo import LayerCosts, Link
from tf_ooo.errors import MemoryLimitError
from tf_ooo.modes.pipeline.mesh import make_mesh
from tf_ooo.modes.pipeline.partition import units_of
from tf_ooo.modes.pipeline.planning import PlanRequest

# Dense layers with Adam: a replica's device holds more beside its plan than in it.
WEIGHT_BYTES, ROWS_BYTES = 4_198_400.0, 196_608.0
ENDS = LayerCosts(
    3e-5, 9e-5, 3e-5, 2e-4, activation_bytes=ROWS_BYTES, weight_bytes=3e4, slot_bytes=6e4,
    forward_bytes=ROWS_BYTES, weight_grad_bytes=ROWS_BYTES,
)  # fmt: skip
WIDE = LayerCosts(
    1e-3, 1e-3, 1e-3, 1.3e-2, activation_bytes=2 * ROWS_BYTES, weight_bytes=WEIGHT_BYTES,
    slot_bytes=2 * WEIGHT_BYTES, output_bytes=ROWS_BYTES, forward_bytes=ROWS_BYTES,
    weight_grad_bytes=2 * ROWS_BYTES,
)  # fmt: skip
LAYERS = (
    dataclasses.replace(ENDS, output_grad_s=0.0, output_bytes=ROWS_BYTES, weight_bytes=1e5, slot_bytes=2e5),
    dataclasses.replace(WIDE, activation_bytes=ROWS_BYTES, weight_grad_bytes=ROWS_BYTES, forward_bytes=0.0),
    *[WIDE] * 6,
    ENDS,
)
PARTS = ("forward_s", "output_grad_s", "weight_grad_s", "update_s")


def layers(seed):
    """Return layers of the same sizes; each part takes up to ten times as long as in another measurement."""
    random_of = random.Random(seed)
    return tuple(
        dataclasses.replace(
            layer, **{part: getattr(layer, part) * random_of.uniform(0.3, 3) for part in PARTS}
        )
        for layer in LAYERS
    )


@pytest.mark.parametrize("replicas", [1, 2])
def test_what_a_refusal_names_is_enough_for_other_costs(replicas):
    def planned(seed, limit_bytes):
        wanted = PlanRequest("auto", 2, 8, Link(0.005, 1e9), memory_limit_bytes=limit_bytes)
        return make_mesh(layers(seed), units_of(9, []), wanted, (replicas,))

    with pytest.raises(MemoryLimitError) as refused:
        planned(0, 1000)
    smallest = refused.value.smallest_bytes
    for seed in range(1, 4):
        assert planned(seed, smallest).peak_bytes <= smallest
