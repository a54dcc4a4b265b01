"""Rows of the LayerPipe benchmark, from made-up times."""

from __future__ import annotations

import pytest

from tf_ooo.bench import layerpipe
from tf_ooo.bench.bars import save_bars


def found():
    def one(name):
        return {"schedule": name, "predicted_step_s": 0.11, "sent_bytes": 2e6}

    return {
        "devices": 3,
        "cores": 0.3,
        "link": {"latency_s": 1e-3, "bytes_per_s": 1e9},
        "times": {
            "serial": [0.3, 0.28, 0.32],
            "pipedream": [0.15, 0.16, 0.14],
            "layerpipe": [0.12, 0.1, 0.13],
        },
        "runs": {name: one(name) for name in ("pipedream", "layerpipe")},
    }


def test_rows(capsys, tmp_path):
    rows = layerpipe.rows_of(found(), "mlp")
    ours = rows[1]
    assert ours["speedup"] == pytest.approx(1.25)
    assert ours["efficiency"] == pytest.approx(0.3 / (3 * 0.12))
    assert (ours["step_s_min"], ours["step_s_max"]) == (0.1, 0.13)
    assert "1.25x pipedream" in capsys.readouterr().out
    save_bars(rows, tmp_path / "rows.png")
    assert (tmp_path / "rows.png").stat().st_size > 1000
