"""Three of the paper's networks, built and measured as ``tf-ooo paper run`` does on one device."""

from __future__ import annotations

from pathlib import Path

import pytest

from tf_ooo.bench.paper.measured import Asked, rows
from tf_ooo.bench.paper.networks import NETWORKS, SINGLE

pytestmark = pytest.mark.takes(120)

EXAMPLES = Path(__file__).parents[2] / "examples/paper"


@pytest.mark.timeout(600)
@pytest.mark.parametrize(
    ("name", "settings"),
    [
        ("feed_forward", {"width": 64}),
        ("bert12", {"task": "finetune", "layers": 1}),
        ("rnn16", {"layers": 3}),
    ],
)
def test_stock_and_rewritten_steps_end_with_the_same_bits(name, settings):
    (row,) = rows(Asked(NETWORKS[name], "tiny", "generated", EXAMPLES, settings), SINGLE)
    assert row["bit_equal"]
    assert row["losses"][1] < row["losses"][0]
    assert row["settings"].items() >= settings.items()
    assert row["data"].startswith("generated")
