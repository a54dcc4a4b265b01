"""The user page of the planner and the example without a model do what they say."""

from __future__ import annotations

import re
import subprocess
import sys
from pathlib import Path

import pytest

from tf_ooo.costs import LayerCosts
from tf_ooo.planning.model.schedule import Schedule
from tf_ooo.planning.policies import POLICIES
from tf_ooo.planning.simulation.simulator import simulate

ROOT = Path(__file__).parents[2]
PAGE = (ROOT / "docs" / "planner.md").read_text()
DETAILS = (ROOT / "docs" / "details" / "planner.md").read_text()
BLOCK = re.compile(r"^```\w*\n(.*?)^```", re.DOTALL | re.MULTILINE)


def test_every_schedule_is_in_the_table():
    section = PAGE.partition("\n## Schedules\n")[2].partition("\n## ")[0]
    rows = [line for line in section.splitlines() if line.startswith("|")]
    for name, policy in POLICIES.items():
        row = next((row for row in rows if f"`{name}`" in row), "")
        assert row, name
        assert all(f"`{option}`" in row for option in policy.text_options), row


def test_the_text_form_runs():
    block = next(block for block in BLOCK.findall(PAGE) if "schedule v1" in block)
    layers = [LayerCosts(0.125, 0.125, 0.125, 0.125)] * 16
    assert simulate(Schedule.from_text(block), layers).makespan_s == pytest.approx(8)


def test_every_field_and_picture_is_there():
    named = set(re.findall(r"`(\w+)`", DETAILS))
    assert set(LayerCosts.__dataclass_fields__) - {"name"} <= named
    assert all((ROOT / "docs" / path).exists() for path in re.findall(r"!\[.*?\]\((.*?)\)", PAGE))


def test_example(tmp_path):
    example = ROOT / "examples" / "06_plan_only.py"
    run = subprocess.run(
        [sys.executable, str(example)], capture_output=True, text=True, cwd=tmp_path, timeout=800
    )
    assert run.returncode == 0, run.stderr
    assert re.search(r"gpipe +needs [0-9.]+ GB", run.stdout)
    assert re.search(r"zb_h1 +[0-9.]+ s", run.stdout)
    assert "auto took " in run.stdout
    files = sorted(path.name for path in tmp_path.iterdir())
    assert files == ["plan_only.html", "plan_only.png", "plan_only.txt", "plotly.min.js"]
