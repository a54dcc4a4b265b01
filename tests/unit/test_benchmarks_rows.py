"""Rows of benchmarks, the gains that are computed from them, and the page."""

import datetime
import os

import numpy as np
import pytest
from click.testing import CliRunner

from benchmarks.__main__ import lines_of, main
from benchmarks.cases import NOBODY, OURS, PYTORCH, STOCK, Case, Measured, Way, WayRun, take_turns
from benchmarks.kept import LOST, NO_DIFFERENCE, WON, compared, gain_of, read, rows_of, write
from benchmarks.processes import BenchmarkError, command, result_of
from benchmarks.report import tables
from benchmarks.report.pictures import draw

WAYS = (Way("gpipe", PYTORCH), Way("one device", STOCK), Way("auto", OURS), Way("unfused", NOBODY))
BEGAN = datetime.datetime(2026, 1, 2, 3, 4, 5, tzinfo=datetime.UTC)


def a_case(name="mlp", mode="pipeline"):
    return Case(name, mode, "workers", WAYS, {"model": "net", "devices": 4}, turns=8)


def measured(auto=1.0, gpipe=1.2, **more):
    noise = [1, 1.01, 0.99, 1.02, 1, 0.98, 1.03, 1]
    seconds = {"gpipe": gpipe, "one device": 4.0, "auto": auto, "unfused": 1.05}
    ways = {
        name: WayRun([value * n for n in noise], 1.1 * value, bits=7 if name == "auto" else 8,
                     about={"fused": name == "gpipe"})
        for name, value in seconds.items()
    }  # fmt: skip
    return Measured(ways, stock_bits=7, cores=0.3, **more)


@pytest.fixture
def rows():
    won, lost = a_case(), a_case("cnn")
    return [
        *rows_of("pipelines", won, measured(), BEGAN),
        *rows_of("pipelines", lost, measured(auto=1.5), BEGAN),
    ]


def test_turns_begin_one_way_further():
    ran = []
    steps = {name: (lambda name=name: ran.append(name) or float(len(ran))) for name in "abc"}
    kept = take_turns(steps, 4)
    assert "".join(ran) == "abcbcacababc"
    assert kept["a"] == [1, 6, 8, 10]


def test_a_gain_is_the_median_of_pairs():
    ours = np.linspace(1, 2, 11)
    gain = gain_of(1.3 * ours, ours)  # by medians alone the spread would drown it
    assert gain.ratio == pytest.approx(1.3)
    assert (gain.low, gain.high) == pytest.approx((1.3, 1.3))
    assert gain.verdict == WON
    assert gain_of(0.9 * ours, ours).verdict == LOST
    assert gain_of([1.1, 0.9, 1.2, 0.8, 1.0, 1.05], [1.0] * 6).verdict == NO_DIFFERENCE


def test_few_pairs_have_no_verdict():
    gain = gain_of([2.0] * 5, [1.0] * 5)
    assert gain.ratio == 2
    assert np.isnan(gain.low)
    assert gain.verdict == NO_DIFFERENCE
    with pytest.raises(ValueError, match="2 turns of the baseline and 1 of ours"):
        gain_of([1, 2], [1])


def test_the_interval_is_that_of_a_bootstrap_by_hand():
    random = np.random.default_rng(3)
    ours, baseline = random.uniform(1, 1.2, 20), random.uniform(1.1, 1.4, 20)
    gain = gain_of(baseline, ours)
    medians = np.median(random.choice(baseline / ours, (20_000, 20)), axis=1)
    assert (gain.low, gain.high) == pytest.approx(tuple(np.percentile(medians, [2.5, 97.5])), abs=0.01)


def test_ours_is_beside_the_strongest_baseline_of_its_run(rows):
    first, second = compared(rows)
    assert (first.baseline.way, first.gain.verdict) == (
        "gpipe",
        WON,
    )  # "unfused" is faster, and nobody has it
    assert (second.baseline.way, second.gain.verdict) == ("gpipe", LOST)
    assert first.predicted == pytest.approx(1.2)


def test_torch_is_compared_by_efficiency():
    rows = rows_of("torch", a_case(mode="torch"), measured(gpipe=2.0), BEGAN)
    for row in rows:
        row.about["serial_s"] = 6.0 if row.way == "gpipe" else 3.0  # its kernels take twice as long
    assert compared(rows)[0].gain.ratio == pytest.approx(1.0)


def test_bits_need_a_partner():
    rows = {row.way: row for row in rows_of("s", a_case(), measured(), BEGAN)}
    assert rows["auto"].bits == "stock"
    assert rows["gpipe"].bits == "differs"
    assert rows["gpipe"].same_bits_as == ["one device", "unfused"]
    without = rows_of("s", a_case(), Measured({"auto": WayRun([1.0], bits=7)}), BEGAN)
    assert without[0].bits is None
    assert without[0].same_bits_as == []


def test_rows_are_kept_once_and_read_again(rows, tmp_path):
    path = write(rows[:4], tmp_path, BEGAN)
    assert path == tmp_path / "pipelines" / "2026-01-02_030405_mlp.json"
    assert read(tmp_path) == rows[:4]
    with pytest.raises(FileExistsError):
        write(rows[:4], tmp_path, BEGAN)


def test_cases_and_results_survive_the_way_to_a_process_and_back():
    for value in (a_case(), measured()):
        assert result_of(command("copy:copy", value), os.environ) == value


def test_a_process_that_fails_says_what_it_printed():
    with pytest.raises(BenchmarkError, match="a process failed:\n(?s:.)*no number"):
        result_of(command("builtins:float", "no number"), os.environ)
    with pytest.raises(BenchmarkError, match="took more than 0.1 s"):
        result_of(command("time:sleep", 60), os.environ, timeout_s=0.1)


def test_the_tables_count_losses(rows):
    result = tables.result(tables.frame_of(rows)).iloc[0]
    assert result["Middle setting"] == "cnn"  # the lower one of two
    assert result["Lost"] == "1 of 2"
    assert result["All settings"] == "0.80 to 1.20"
    assert result["Command"] == "`run pipelines`"
    assert list(tables.losses(tables.frame_of(rows))["Setting"]) == ["cnn"]


def test_parts_of_a_gain(rows):
    parts = tables.parts(rows).iloc[0]
    assert (parts["Model"], parts["Settings"], parts["Devices"]) == ("net", 2, "4")
    assert parts["Over the best fused"] == "0.80 to 1.20"
    assert parts["Over the best unfused"] == "0.70 to 1.05"


def test_predictions_are_beside_the_median(rows):
    errors = tables.predictions(rows)["error"]
    assert errors.round(3).unique().tolist() == [0.1]
    assert tables.prediction_table(rows).iloc[0]["Within 5%"] == 0


def test_pages_and_pictures(rows, tmp_path):
    text = "before\n<!-- table: losses -->\nold\n<!-- end of table -->\nafter\n"
    written = tables.with_tables(text, tables.tables_of(rows))
    assert "old" not in written
    assert "| cnn | `gpipe` | 0.80 (0.80 to 0.80) |" in written
    assert tables.with_tables(written, tables.tables_of(rows)) == written
    draw(rows, tmp_path)
    assert {path.name for path in tmp_path.iterdir()} == {"forest.png", "predictions.png"}


def test_what_a_run_prints(rows):
    lines = list(lines_of(rows[:4]))
    assert lines[0].startswith("auto")
    assert lines[-1] == "auto is 1.200 (1.200 to 1.200) times as fast as gpipe: won"


def test_the_command_line(rows, tmp_path):
    write(rows[:4], tmp_path, BEGAN)
    done = CliRunner().invoke(main, ["report", "--rows", str(tmp_path)])
    assert done.exit_code == 0, done.output
    assert "## result" in done.output
    empty = tmp_path / "empty"
    empty.mkdir()
    assert "no rows are kept" in CliRunner().invoke(main, ["report", "--rows", str(empty)]).output
