"""The demo's strips have one scale, and its verdict says whose weights differ."""

from __future__ import annotations

from tf_ooo.demo.strips import strips, verdict
from tf_ooo.demo.training import AUTO, ONE_F_ONE_B, STOCK, Trained

ONE = Trained(STOCK, [0.8], [(0, "F", 0.0, 0.4), (0, "dW", 0.4, 0.8)])
OTHER = Trained(ONE_F_ONE_B, [0.4], [(0, "F", 0.0, 0.2), (1, "dO", 0.2, 0.4)], 1e-7, True)
OURS = Trained(AUTO, [0.2, 0.1, 0.2], [(0, "F", 0.0, 0.1), (1, "dW", 0.1, 0.2)], 1e-7, True)


def test_a_row_for_each_device_on_one_scale():
    rows = [row.plain for row in strips([ONE, OTHER, OURS], 11 + 16)]
    assert rows == [
        "stock fit, one device: 800.00 ms a step",
        "  device 1 FFFFFFFFWWWWWWWW",
        "1F1B, as PyTorch and Megatron run it: 400.00 ms a step",
        "  device 1 FFFF\N{MIDDLE DOT}\N{MIDDLE DOT}\N{MIDDLE DOT}\N{MIDDLE DOT}",
        "  device 2 \N{MIDDLE DOT}\N{MIDDLE DOT}\N{MIDDLE DOT}\N{MIDDLE DOT}OOOO",
        "tf_ooo, schedule='auto': 200.00 ms a step",
        "  device 1 FF\N{MIDDLE DOT}\N{MIDDLE DOT}",
        "  device 2 \N{MIDDLE DOT}\N{MIDDLE DOT}WW",
        rows[-1],
    ]
    assert "output gradient (dO)" in rows[-1]


def test_a_verdict():
    assert verdict([ONE, OTHER, OURS]) == (
        "auto is 2.00 times as fast as 1F1B, with the same bits, and 4.00 times as fast as stock on one "
        "device, whose weights differ by at most 1e-07 (micro-batches add up in another order)"
    )
    other_weights = Trained(AUTO, [0.2], [], 0.1, False)
    assert "with OTHER WEIGHTS" in verdict([ONE, OTHER, other_weights])
