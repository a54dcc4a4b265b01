"""Replicas times stages, by hand."""

from __future__ import annotations

import json

import pytest
from click.testing import CliRunner

from tf_ooo.cli import main
from tf_ooo.costs import LayerCosts, Link
from tf_ooo.costs.table import CostTable
from tf_ooo.planning.choosing.on_paper import splits
from tf_ooo.planning.model.problem import Problem

# Unequal: 2 + 3 + 1 and 4 + 1 + 1 s a micro-batch.
LAYERS = (LayerCosts(2, 3, 1, 0.5, weight_bytes=100), LayerCosts(4, 1, 1, 0.25, weight_bytes=40))
LINK = Link(0.0, 10.0)


def test_replicas_of_one_device_by_hand():
    """Four micro-batches: two each of 12 s, updates of 0.75 s; a ring of two sends 2 x 70 of 140 bytes."""
    known = {split.replicas: split for split in splits(Problem(LAYERS, 2, 4, LINK))}
    assert known.keys() == {1, 2}
    assert known[2].allreduce_s == pytest.approx(14)
    assert known[2].step_s == pytest.approx(2 * 12 + 0.75 + 14)
    assert known[2].over_one_device == pytest.approx((4 * 12 + 0.75) / known[2].step_s)
    assert known[1].allreduce_s == 0
    assert known[1].step_s >= 24


def test_every_division_the_fastest_first():
    rows = splits(Problem(LAYERS * 3, 6, 12, LINK))
    assert {(row.replicas, row.devices) for row in rows} == {(1, 6), (2, 3), (3, 2), (6, 1)}
    assert [row.step_s for row in rows] == sorted(row.step_s for row in rows)
    for row in rows:
        assert row.plan.trial.schedule.microbatches * row.replicas == 12
        assert row.over_one_device <= 6 + 1e-9


def test_what_is_impossible_says_why():
    rows = {row.replicas: row for row in splits(Problem(LAYERS, 4, 2, LINK))}
    assert "2 micro-batches cannot be dealt out evenly to 4 replicas" in rows[4].reason
    assert "more than the 2 layers" in rows[1].reason
    assert rows[2].plan is not None


def test_the_command(tmp_path):
    costs = CostTable(LAYERS, LINK, rows=3).save(tmp_path / "c.json")
    ask = ["plan", str(costs), "--devices", "2", "--microbatches", "4", "--splits"]
    content = json.loads(CliRunner().invoke(main, [*ask, "--json"]).stdout)
    assert [row["per_s"] for row in content["splits"]] == [12 / row["step_s"] for row in content["splits"]]
    shown = CliRunner().invoke(main, ask).output
    assert shown.count("best") == 1
    assert "averaged after the step" in shown
    for more in (["--schedule", "1f1b"], ["--mode", "layerpipe"], ["--stages", "0,1"]):
        said = CliRunner().invoke(main, [*ask, *more]).stderr
        assert "no schedule, mode or stages beside it" in " ".join(said.split())
    assert "--splits prints one table: no files" in CliRunner().invoke(main, [*ask, "--out", "s.txt"]).stderr
