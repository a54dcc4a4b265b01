"""The paper's networks as a table, their options and predictions, and the page that is made of rows."""

from __future__ import annotations

import json
import sys
from pathlib import Path

import pytest
from click.testing import CliRunner

from tf_ooo.bench.paper import predicted, why
from tf_ooo.bench.paper.figures import PUBLISHED, figure_of, figures_of, gains_text
from tf_ooo.bench.paper.measured import Asked
from tf_ooo.bench.paper.networks import DATA_PARALLEL, NETWORKS, PIPELINE, SINGLE, SIZES
from tf_ooo.bench.paper.tables import cells_of, settings_text, tables_of
from tf_ooo.bench.planner import ooo
from tf_ooo.bench.planner.published import load
from tf_ooo.bench.report.page import with_tables
from tf_ooo.bench.report.reading import runs_in
from tf_ooo.bench.shared.kept import Run
from tf_ooo.bench.shared.scripts import loaded
from tf_ooo.cli import main
from tf_ooo.errors import OptionsError

ROOT = Path(__file__).parents[2]
EXAMPLES, DOCS = ROOT / "examples/paper", ROOT / "docs"


def invoked(*arguments):
    return CliRunner().invoke(main, ["paper", *arguments])


def test_twelve_networks_in_three_modes():
    assert len(NETWORKS) == 12
    assert {mode for network in NETWORKS.values() for mode in network.modes} == {
        SINGLE,
        DATA_PARALLEL,
        PIPELINE,
    }
    said = invoked("list")
    assert said.exit_code == 0
    assert all(name in said.output for name in NETWORKS)
    assert "growth=12 batch=32" in said.output


@pytest.mark.parametrize("name", NETWORKS)
def test_scripts_have_all_sizes_and_what_the_table_sets(name):
    network = NETWORKS[name]
    assert tuple(loaded(str(EXAMPLES / f"{network.script}.py")).SIZES) == SIZES
    for size in SIZES:
        assert Asked(network, size, "auto", EXAMPLES, {}).workload().batch > 0
    of_full = vars(Asked(network, "full", "auto", EXAMPLES, {}).workload().given())
    for run in network.runs:
        assert set(run.settings) <= set(of_full), run.name


def test_the_planners_page_and_the_table_agree():
    inputs = load(ooo.INPUTS)
    assert {mode: tuple(gains) for mode, gains in inputs["published"].items()} == PUBLISHED
    for work in inputs["data_parallel"]["workloads"]:
        runs = NETWORKS[work["model"]].runs
        assert {str(run.devices): run.k for run in runs} == work["k"]
        assert {run.settings["batch"] for run in runs} == {work["batch"]}
    for work in inputs["single_device"]:
        settings = {key: value for key, value in work.items() if key != "model"}
        assert settings in [run.settings for run in NETWORKS[work["model"]].runs]
    for work in inputs["pipeline"]["workloads"]:
        run = NETWORKS[f"bert{work['layers']}"].runs[-1]
        assert (run.devices, run.microbatches) == (work["devices"], work["microbatches"])
        assert (run.settings["width"], run.settings["heads"]) == (work["hidden"], work["heads"])


def test_settings_of_a_user_come_last():
    asked = Asked(NETWORKS["bert48"], "tiny", "generated", EXAMPLES, {"layers": 5})
    assert asked.workload().given().layers == 5
    assert Asked(NETWORKS["bert48"], "tiny", "auto", EXAMPLES, {}).workload().given().layers == 8
    assert Asked(NETWORKS["bert48"], "small", "auto", EXAMPLES, {}).workload().given().layers == 48


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (["resnet18"], "'resnet18' is none of the paper's networks; they are densenet121, "),
        (["rnn16", "--mode", "data_parallel"], "in mode data_parallel, but in pipeline; --any-mode"),
        (["bert12", "--growth", "12"], "bert has no 'growth'; it has batch, heads, "),
        (["bert12", "--option", "width"], "--option 'width': expected NAME=VALUE"),
        (["bert12", "--size", "huge"], "'huge' is not one of 'tiny', 'small', 'full'"),
        (["bert12", "--examples", "nowhere"], "nowhere/bert.py is not there: the scripts come with"),
        (["densenet121", "--growth", "0"], "0 is not in the range x>=1"),
    ],
)  # fmt: skip
def test_what_is_refused(arguments, said):
    done = invoked("run", *arguments)
    assert done.exit_code == 2
    assert said in done.output


def test_predictions_of_one_network_are_printed_and_kept(tmp_path):
    done = invoked("run", "rnn16", "--only", "predicted", "--keep", str(tmp_path))
    assert done.exit_code == 0, done.output
    assert "rnn16, pipeline: published 1.41-1.99, predicted " in done.output
    (run,) = runs_in(tmp_path)
    assert run.bench == "paper"
    assert {row["schedule"] for row in run.rows} == set(predicted.SCHEDULES)
    (figure,) = [figure for figure in figures_of([run]) if figure.network == "rnn16"]
    modulo = [row["predicted_speedup"] for row in run.rows if row["schedule"] == "modulo"]
    assert figure.predicted == tuple(modulo)
    assert not figure.measured


def test_fine_tuning_is_in_the_published_range():
    rows = list(predicted.rows(NETWORKS["bert24"], PIPELINE))
    gains = [row["predicted_speedup"] for row in rows if row["schedule"] == "modulo" and row["devices"] == 4]
    low, high = PUBLISHED[PIPELINE]
    assert low < max(gains) < high


def test_no_schedule_passes_the_bound_and_recomputing_is_a_third_more():
    rows = list(why.rows((NETWORKS["bert12"],)))
    assert all(row["predicted_speedup"] <= row["bound"] * (1 + 1e-9) for row in rows)
    base_s = {row["assumed"]: row["predicted_baseline_step_s"] for row in rows}
    assert base_s["and a GPipe that recomputes"] / base_s[why.BASE] == pytest.approx(4 / 3, rel=0.02)
    assert len(base_s) == len(why.ASSUMED)


def test_sets_that_change_nothing_have_no_row():
    of_rnn = {row["assumed"] for row in why.rows((NETWORKS["rnn16"],))}
    assert {assumed.name for assumed in why.ASSUMED} - of_rnn == {
        "and embedding and head",
        "and 25 Gbit/s, GPipe sends the shared table's gradient",
    }


def test_data_that_are_used_are_named():
    assert Asked(NETWORKS["rnn16"], "tiny", "auto", EXAMPLES, {}).workload().data_used() == (
        "shipped, Python's manual"
    )
    of_images = Asked(NETWORKS["resnet50"], "tiny", "generated", EXAMPLES, {}).workload()
    assert of_images.data_used() == "generated"


def test_a_missing_package_of_data_is_refused(monkeypatch):
    monkeypatch.setitem(sys.modules, "sklearn.datasets", None)
    with pytest.raises(OptionsError, match="the digits come with scikit-learn"):
        Asked(NETWORKS["resnet50"], "tiny", "shipped", EXAMPLES, {}).workload().data_used()


def measured_row(mode, schedule, **more):
    about = {"kind": "measured", "network": "bert12", "mode": mode, "size": "tiny", "bit_equal": True}
    about |= {"settings": {"width": 64, "layers": 3}, "microbatches": 4, "data": "generated", "took_s": 95.4}
    return {**about, "schedule": schedule, "speedup": 1.0, "losses": [2.0, 1.5], **more}


def test_ours_is_what_the_plan_takes_over_the_strongest_of_stock():
    rows = [
        measured_row(DATA_PARALLEL, "horovod", step_s=2.0),
        measured_row(DATA_PARALLEL, "horovod_k", step_s=1.5),
        measured_row(DATA_PARALLEL, "k=0", step_s=1.0, predicted_step_s=0.1),
        measured_row(DATA_PARALLEL, "search", step_s=1.2, predicted_step_s=0.8, reordering_alone=0.9),
        measured_row(DATA_PARALLEL, "reverse_first_k", step_s=1.1, predicted_step_s=0.9),
    ]
    (one_run,) = figure_of("bert12", DATA_PARALLEL, [rows]).measured
    assert (one_run.baseline, one_run.ours, one_run.gain) == ("horovod_k", "search", 1.25)
    assert one_run.alone == 0.9


def test_a_line_of_the_table():
    rows = [
        {"kind": "predicted", "schedule": "modulo", "baseline": "gpipe", "predicted_speedup": 1.5},
        {"kind": "predicted", "schedule": "modulo", "baseline": "gpipe", "predicted_speedup": 1.1},
        {"kind": "predicted", "schedule": "zb_h1", "baseline": "gpipe", "predicted_speedup": 9.0},
        measured_row(PIPELINE, "gpipe", step_s=3.0, predicted_step_s=3.0),
        measured_row(PIPELINE, "modulo", step_s=2.0, predicted_step_s=2.0, bit_equal=False),
    ]
    cells = cells_of(figure_of("bert12", PIPELINE, [rows, rows[3:]]))
    assert cells == [
        "BERT-12", "pipeline", "GPipe", "1.41-1.99", "1.10-1.50",
        "tiny: 1.50 (modulo over gpipe), 2 runs", "NO", "2.000 to 1.500",
        "layers=3 width=64; 2 devices, 4 micro-batches; generated; 95 s",
    ]  # fmt: skip
    assert gains_text([1.001, 1.004]) == "1.00"
    assert settings_text(NETWORKS["resnet50"].runs[0]) == "layers=50 batch=128, 4 GPUs, k=45"


def test_our_page_has_all_rows():
    """``tf-ooo paper report --page docs/paper.md --picture docs/images/paper.png`` makes it."""
    runs = runs_in(DOCS / "benchmarks/rows")
    tables = tables_of(runs, json.loads((DOCS / "benchmarks/planner/layerpipe.json").read_text()))
    page = (DOCS / "paper.md").read_text()
    assert with_tables(page, tables) == page
    assert all(f"figures: {name} -->" in page for name in tables)


def test_kept_predictions_are_what_the_formulas_say_now():
    figures = {
        (figure.network, figure.mode): figure for figure in figures_of(runs_in(DOCS / "benchmarks/rows"))
    }
    for name, mode in (("mobilenet_v3_large", SINGLE), ("bert12", PIPELINE)):
        rows = list(predicted.rows(NETWORKS[name], mode))
        assert figure_of(name, mode, [rows]).predicted == pytest.approx(figures[name, mode].predicted)


def test_picture(tmp_path):
    path = tmp_path / "of_all.png"
    done = invoked("report", "--rows", str(DOCS / "benchmarks/rows"), "--picture", str(path),
                   "--layerpipe", str(DOCS / "benchmarks/planner/layerpipe.json"))  # fmt: skip
    assert done.exit_code == 0, done.output
    assert "## why" in done.output
    assert path.stat().st_size > 10_000


def test_files_that_are_no_runs_are_named(tmp_path):
    (tmp_path / "mine.json").write_text(json.dumps({"bench": "paper"}))
    done = invoked("report", "--rows", str(tmp_path), "--layerpipe", str(tmp_path / "mine.json"))
    assert done.exit_code == 2
    assert "mine.json is no run that --keep wrote" in done.output


def run_of(rows):
    return Run("paper", "2026-11-26 12:00", "abc", "", "two cores", rows)


def test_runs_of_one_network_stay_apart():
    rows = [
        measured_row(PIPELINE, "gpipe", step_s=3.0, predicted_step_s=3.0),
        measured_row(PIPELINE, "zb_h1", step_s=2.0, predicted_step_s=2.0),
    ]
    other = [row | {"network": "gpt3_medium"} for row in rows]
    by_name = {figure.network: figure for figure in figures_of([run_of(rows + other), run_of(rows)])}
    assert len(by_name["bert12"].measured) == 2
    assert len(by_name["gpt3_medium"].measured) == 1
    with pytest.raises(OptionsError):
        Asked(NETWORKS["bert12"], "tiny", "auto", Path("nowhere"), {}).workload()
