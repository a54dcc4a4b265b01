"""Rows of the LayerPipe benchmark, from made-up times."""

from __future__ import annotations

import json

import pytest

from tests.graph.layerpipe_spread import assert_spread, recorded
from tf_ooo.bench.layerpipe import accuracy
from tf_ooo.bench.layerpipe.rows import rows_of, text_of
from tf_ooo.bench.shared.bars import save_bars
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


def test_rows(tmp_path):
    rows = rows_of(found(), "mlp")
    ours = rows[1]
    assert ours["speedup"] == pytest.approx(1.25)
    assert ours["efficiency"] == pytest.approx(0.3 / (3 * 0.12))
    assert (ours["step_s_min"], ours["step_s_max"]) == (0.1, 0.13)
    assert "1.25x pipedream" in text_of(ours)
    save_bars(rows, tmp_path / "rows.png")
    assert (tmp_path / "rows.png").stat().st_size > 1000


def test_what_late_gradients_lose():
    lost = [("synchronous", 0.0), ("stash", 0.5), ("stash", -0.1), ("ema", 0.2), ("latest", 1.0)]
    rows = [{"training": way, "points_below_synchronous": points} for way, points in lost]
    lines = accuracy.summary(rows).splitlines()
    assert lines[0] == "stash: +0.20 points below synchronous on average, -0.10 to +0.50 in 2 runs"
    assert lines[1].startswith("ema: +0.20 points below synchronous on average")


@pytest.mark.alone
def test_accuracy_of_late_gradients(tmp_path, capsys):
    """Real digits, two epochs on two devices: learns something, beside stock Keras."""
    file = tmp_path / "rows.json"
    options = ["--accuracy", "--quick", "--epochs", "2", "--devices", "2"]
    with recorded() as spreads:
        main(["bench", "layerpipe", *options, "--json", str(file)], standalone_mode=False)
    rows = json.loads(file.read_text())
    assert [row["training"] for row in rows] == ["synchronous", "stash", "ema", "latest", "pipedream_2bw"]
    assert all(row["test_accuracy_percent"] > 50 for row in rows)
    assert all(len(row["percent_by_epoch"]) == 2 for row in rows)
    assert [row["points_below_synchronous"] for row in rows] == [
        rows[0]["test_accuracy_percent"] - row["test_accuracy_percent"] for row in rows
    ]
    assert len(spreads) == 4
    for made in spreads:
        assert_spread(made, 2)
    said = capsys.readouterr().out
    assert all(f"{row['training']:14s} {row['test_accuracy_percent']:.2f}%" in said for row in rows)
    assert said.count("points below synchronous on average") == 4
