"""Rows of the LayerPipe benchmark, from made-up times."""

from __future__ import annotations

import json

import pytest
from click.testing import CliRunner

from tf_ooo.bench import layerpipe, layerpipe_accuracy
from tf_ooo.bench.bars import save_bars
from tf_ooo.cli import main


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


def test_what_late_gradients_lose():
    lost = [("synchronous", 0.0), ("stash", 0.5), ("stash", -0.1), ("ema", 0.2), ("latest", 1.0)]
    rows = [{"training": way, "points_below_synchronous": points} for way, points in lost]
    lines = layerpipe_accuracy.summary(rows).splitlines()
    assert lines[0] == "stash: +0.20 points below synchronous on average, -0.10 to +0.50 in 2 runs"
    assert lines[1].startswith("ema: +0.20 points below synchronous on average")


@pytest.mark.alone
def test_accuracy_of_late_gradients(tmp_path):
    """Real digits, two epochs: learns something, beside stock Keras."""
    file = tmp_path / "rows.json"
    arguments = ["bench", "layerpipe", "--accuracy", "--quick", "--epochs", "2", "--json", str(file)]
    run = CliRunner().invoke(main, arguments, catch_exceptions=False)
    assert run.exit_code == 0, run.output
    rows = json.loads(file.read_text())
    assert [row["training"] for row in rows] == ["synchronous", "stash", "ema", "latest", "pipedream_2bw"]
    assert all(row["test_accuracy_percent"] > 50 for row in rows)
    assert "points below synchronous on average" in run.output
