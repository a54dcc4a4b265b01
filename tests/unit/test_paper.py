"""The paper's networks as a table, their options and predictions, and the page that is made of rows."""

from __future__ import annotations

import json
import os
import re
import sys
from dataclasses import asdict, replace
from pathlib import Path
from unittest import mock

import keras
import pytest
import tensorflow as tf
from click.testing import CliRunner

from tf_ooo.bench.paper import command, measured, predicted, why
from tf_ooo.bench.paper.figures import PUBLISHED, figures_of, gains_text, measured_text, title_of
from tf_ooo.bench.paper.measured import EFFORTS, Asked
from tf_ooo.bench.paper.networks import DATA_PARALLEL, NETWORKS, PIPELINE, SINGLE, SIZES
from tf_ooo.bench.paper.tables import HEAD, gains_tables, lines_of, settings_text, tables_of
from tf_ooo.bench.planner import ooo
from tf_ooo.bench.planner.published import load
from tf_ooo.bench.report.page import with_tables
from tf_ooo.bench.report.reading import runs_in
from tf_ooo.bench.shared.kept import Run
from tf_ooo.bench.shared.scripts import loaded
from tf_ooo.cli import main
from tf_ooo.errors import OptionsError
from tf_ooo.modes import data_parallel

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
    for run in network.runs:
        asked = Asked(network, "full", "auto", EXAMPLES, {})
        assert set(run.settings) <= set(vars(asked.workload().given())), run.name


@pytest.mark.parametrize(
    ("name", "published"),
    [
        ("densenet121", {"growth": 12, "pixels": 224, "batch": 32}),
        ("mobilenet_v3_large", {"alpha": 0.5, "pixels": 224, "batch": 32}),
        ("resnet50", {"layers": 50, "blocks": 1.0, "width": 1.0, "pixels": 224, "batch": 128}),
        ("resnet101", {"layers": 101, "batch": 96}),
        ("resnet152", {"layers": 152, "batch": 64}),
        ("rnn16", {"layers": 16, "width": 1024, "length": 32, "batch": 64}),
        ("feed_forward", {"layers": 16, "width": 4096, "batch": 1024}),
        ("bert12", {"task": "pretrain", "layers": 12, "width": 768, "heads": 12, "batch": 16}),
        ("bert24", {"task": "pretrain", "layers": 24, "width": 1024, "heads": 16, "batch": 10}),
        ("bert36", {"task": "pretrain", "layers": 36, "width": 1024, "heads": 16, "batch": 10}),
        ("bert48", {"task": "pretrain", "layers": 48, "width": 1024, "heads": 16, "batch": 8}),
        ("gpt3_medium", {"layers": 24, "width": 1024, "heads": 16, "length": 512, "batch": 4}),
    ],
)
def test_full_is_the_published_size(name, published):
    of = vars(Asked(NETWORKS[name], "full", "auto", EXAMPLES, {}).workload().given())
    assert of.items() >= published.items()


def test_full_follows_the_published_run_that_is_asked_for(monkeypatch):
    of = Asked(NETWORKS["bert24"], "full", "auto", EXAMPLES, {"task": "finetune"})
    assert of.workload().batch == 24
    monkeypatch.setattr(os, "sched_getaffinity", lambda _: set(range(4)))
    assert (of.effort(PIPELINE).devices, of.effort(PIPELINE).microbatches) == (4, 4)
    of_many = Asked(NETWORKS["bert48"], "full", "auto", EXAMPLES, {})
    assert of_many.effort(PIPELINE) == EFFORTS["full"]  # 32 devices have no core each
    monkeypatch.setattr(os, "sched_getaffinity", lambda _: set(range(32)))
    assert (of_many.effort(PIPELINE).devices, of_many.effort(PIPELINE).microbatches) == (32, 40)
    assert Asked(NETWORKS["bert48"], "tiny", "auto", EXAMPLES, {}).effort(PIPELINE) == EFFORTS["tiny"]


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
        run = NETWORKS[f"bert{work['layers']}"].runs[0]
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
        (["bert12", "--growth", "12", "--only", "predicted"], "bert has no 'growth'; it has batch, heads, "),
        (["bert12", "--option", "task=finetuning"], "task='finetuning': expected pretrain or finetune"),
        (["bert12", "--option", "width=65"], "width=65 is no multiple of heads=2"),
        (["bert12", "--option", "hidden=40"], "hidden=40 words of texts of length=32"),
        (["bert12", "--option", "width=wide"], "width='wide': expected a whole number above 0"),
        (["densenet121", "--option", "blocks=3"], "blocks=3: expected several whole numbers above 0"),
        (["mobilenet_v3_large", "--option", "pixels=16"], "pixels=16: MobileNetV3 takes 32 or more"),
        (["resnet50", "--layers", "34"], "layers=34: a ResNet has 50, 101, 152"),
        (["resnet50", "--option", "pixels=64"], "pixels=64: above 32 a ResNet is Keras' own"),
        (["bert12", "--option", "width"], "--option 'width': expected NAME=VALUE"),
        (["bert12", "--layers", "4", "--option", "layers=6"], "layers=6': layers is 4 already; set it once"),
        (["bert12", "--option", "width=64", "--option", "width=32"], "width is 64 already; set it once"),
        (["resnet50", "--any-mode"], "--any-mode changes nothing without --mode, such as --mode pipeline"),
        (["bert12", "--size", "huge"], "'huge' is not one of 'tiny', 'small', 'full'"),
        (["bert12", "--examples", "nowhere"], "nowhere/bert.py is not there: the scripts come with"),
        (["densenet121", "--growth", "0"], "0 is not in the range x>=1"),
        (["bert12", "--only", "predicted", "--size", "tiny"], "--size changes nothing with --only predicted: "
         "predictions are of the published sizes; leave it out"),
        (["bert12", "--only", "predicted", "--data", "auto"], "--data changes nothing with --only predicted: "
         "nothing is trained; leave it out"),
    ],
)  # fmt: skip
def test_what_is_refused(arguments, said):
    done = invoked("run", *arguments)
    assert done.exit_code == 2
    assert said in done.output


@pytest.mark.parametrize("option", ["--size", "--data"])
def test_all_refuses_what_changes_no_prediction(option):
    done = invoked("all", "--only", "predicted", option, {"--size": "full", "--data": "real"}[option])
    assert done.exit_code == 2
    assert f"{option} changes nothing with --only predicted: " in done.output


def test_predictions_of_one_network_are_printed_and_kept(tmp_path):
    done = invoked("run", "rnn16", "--only", "predicted", "--keep", str(tmp_path))
    assert done.exit_code == 0, done.output
    assert "rnn16, pipeline: published 1.41-1.99, predicted " in done.output
    (run,) = runs_in(tmp_path)
    assert run.bench == "paper"
    assert {row["schedule"] for row in run.rows} == set(predicted.SCHEDULES)
    (figure,) = [figure for figure in figures_of([run]) if figure.network == "rnn16"]
    modulo = [row["predicted_speedup"] for row in run.rows if row["schedule"] == "modulo"]
    assert figure.predicted == tuple(sorted(modulo))
    assert not figure.measured
    # 4 GPUs are one machine, which may have NVLink.
    assert {row["bandwidth_bit_s"] for row in run.rows} == {2e11, 9.6e10, 2.5e10, 1e10}


def test_what_is_assumed_of_a_network_is_printed_once():
    done = invoked("run", "rnn16", "--only", "predicted")
    (of_rnn,) = NETWORKS["rnn16"].runs
    assert done.output.count(f"- {of_rnn.assumed}\n") == 1
    assert "scripts' micro-batches" not in done.output  # there is no script of it
    of_few_layers = invoked("run", "rnn16", "--layers", "2", "--only", "predicted")
    assert f"- {of_rnn.assumed}, but for what you set\n" in of_few_layers.output
    of_images = [{"assumed": run.assumed, "changed": False} for run in NETWORKS["resnet152"].runs]
    said = predicted.assumptions(NETWORKS["resnet152"], DATA_PARALLEL, of_images)
    assert said.count("batch 64; k=100, two of three layers") == 1


def test_each_task_has_its_own_predicted_range(monkeypatch):
    monkeypatch.setattr(predicted, "RATES_BYTES_PER_S", (1.25e9,))
    monkeypatch.setattr(predicted, "GPUS_OF_A_MACHINE", 0)  # without NVLink: one prediction of each
    done = invoked("run", "bert12", "--layers", "4", "--only", "predicted")
    number = r"\d\.\d\d"
    said = rf"predicted {number} \(pre-training\), {number} \(fine-tuning\); assumed:"
    assert re.search(said, done.output), done.output
    assert "- the scripts' micro-batches\n" in done.output
    assert "- fine-tuning as BERT-24's: 4 GPUs, 4 micro-batches of 24" in done.output
    of_one = invoked("run", "bert12", "--layers", "4", "--option", "task=finetune", "--only", "predicted")
    assert re.search(rf"predicted {number} \(fine-tuning\); assumed:", of_one.output), of_one.output


def test_predictions_follow_the_users_settings(tmp_path):
    done = invoked("run", "rnn16", "--layers", "3", "--only", "predicted", "--keep", str(tmp_path))
    assert done.exit_code == 0, done.output
    assert "rnn16, pipeline: other settings than the published ones, predicted " in done.output
    (run,) = runs_in(tmp_path)
    assert {(row["configuration"], row["devices"], row["changed"]) for row in run.rows} == {
        ("layers=3 width=1024 length=32 batch=64", 3, True)
    }
    assert not any(figure.predicted for figure in figures_of([run]))  # the page has the published ones


def test_each_configuration_is_predicted_once():
    network = NETWORKS["densenet121"]
    assert [run.name for run in network.runs_with({"growth": 40}, SINGLE)] == [
        "growth=40 batch=32",
        "growth=40 batch=64",
    ]
    published = network.runs_with({"growth": 24}, SINGLE)
    assert [(run.name, run.changed) for run in published] == [
        ("growth=24 batch=32", False),
        ("growth=24 batch=64", False),
    ]
    (of_task,) = NETWORKS["bert24"].runs_with({"task": "finetune"}, PIPELINE)
    assert (of_task.devices, of_task.changed) == (4, False)


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (["densenet121", "--mode", "pipeline", "--any-mode"],
         "the paper has no configuration of densenet121 in mode pipeline; nothing is predicted"),
        (["resnet50", "--option", "pixels=32", "--option", "blocks=0.5"],
         "the formulas have no 'blocks' of resnet50 but 1; nothing is predicted"),
        (["resnet50", "--option", "pixels=32"],
         "below 33 pixels resnet50 begins without the stride of 4 of the formulas; nothing is"),
        (["resnet101", "--option", "pixels=32", "--option", "width=0.5"], "no 'width' of resnet101 but 1;"),
        (["densenet121", "--option", "pixels=127"], "below 128 pixels densenet121 begins without the stride"),
        (["densenet121", "--option", "blocks=6,12"], "no 'blocks' of densenet121 but (6, 12, 24, 16);"),
        (["mobilenet_v3_large", "--option", "classes=10"], "no 'classes' of mobilenet_v3_large but 1000;"),
        (["bert12", "--layers", "1"], "bert12, pipeline: one GPU: no pipeline; nothing is predicted"),
        (["feed_forward", "--option", "pixels=224"], "no 'pixels' of feed_forward but 32; nothing"),
    ],
)  # fmt: skip
def test_why_nothing_is_predicted(arguments, said):
    done = invoked("run", *arguments, "--only", "predicted")
    assert done.exit_code == 0, done.output
    assert said in done.output
    assert "assumed:" not in done.output


@pytest.mark.parametrize(
    ("name", "settings"),
    [
        ("densenet121", {"pixels": 128, "blocks": [6, 12, 24, 16], "classes": 1000}),
        ("resnet50", {"pixels": 33, "width": 1.0}),
        ("mobilenet_v3_large", {"pixels": 32}),
        ("feed_forward", {"classes": 7, "pixels": 32}),
        ("bert12", {"vocabulary": 100, "hidden": 5}),
    ],
)
def test_settings_with_which_the_formulas_count_the_same_network(name, settings):
    network = NETWORKS[name]
    assert not predicted.why_none(network, network.modes[0], settings)
    assert next(predicted.rows(network, network.modes[0], settings))


def test_what_fits_the_heads_of_a_smaller_size_only_is_not_predicted():
    settings = {"width": 128}  # of 2 heads at tiny
    assert Asked(NETWORKS["bert12"], "tiny", "auto", EXAMPLES, settings).workload()
    reason = predicted.why_none(NETWORKS["bert12"], PIPELINE, settings)
    assert reason == "width=128 is no multiple of the published size's heads=12"
    assert not predicted.why_none(NETWORKS["bert12"], PIPELINE, settings | {"heads": 2})


def test_what_is_only_predicted_has_the_published_size():
    assert not predicted.why_none(NETWORKS["resnet50"], DATA_PARALLEL, {"pixels": 64, "blocks": 1})
    # At tiny it has a tenth of the blocks, which does not go together.
    arguments = ["resnet50", "--option", "pixels=64", "--only", "predicted"]
    done = invoked("run", *arguments, "--mode", "pipeline", "--any-mode")
    assert done.exit_code == 0, done.output


def test_fine_tuning_of_other_depths_is_assumed():
    for name in ("bert12", "bert36", "bert48"):
        (run,) = NETWORKS[name].runs_with({"task": "finetune"}, PIPELINE)
        assert (run.settings["batch"], run.devices, run.microbatches) == (24, 4, 4)
        assert run.assumed
        assert settings_text(run).endswith("(assumed)")


def test_what_is_not_known_is_no_data_set():
    network = NETWORKS["bert12"]
    assert network.data == "MRPC (fine-tuning)"
    assert network.left_open.startswith("which text pre-training reads; ")
    assert "BERT-12; data: MRPC (fine-tuning)\n" in invoked("list").output


def test_mobilenets_that_the_scripts_do_not_have_are_assumed():
    assumed = {(run.settings["alpha"], bool(run.assumed)) for run in NETWORKS["mobilenet_v3_large"].runs}
    assert assumed == {(0.25, True), (0.5, False), (1.0, False)}
    of_another = NETWORKS["mobilenet_v3_large"].runs_with({"alpha": 0.75}, SINGLE)
    assert [(run.name, run.assumed) for run in of_another] == [
        ("alpha=0.75 batch=32", ""),
        ("alpha=0.75 batch=64", ""),
    ]
    kept = run_of(list(predicted.rows(NETWORKS["mobilenet_v3_large"], SINGLE)))
    (line,) = [line for line in map(lines_of, figures_of([kept])) if line[0][0] == "MobileNetV3-Large"]
    assert "assumed" not in line[0][HEAD.index("Predicted")]  # of most there are scripts


def test_fine_tuning_is_in_the_published_range():
    rows = list(predicted.rows(NETWORKS["bert24"], PIPELINE))
    gains = [row["predicted_speedup"] for row in rows if row["schedule"] == "modulo" and row["devices"] == 4]
    low, high = PUBLISHED[PIPELINE]
    assert low < max(gains) < high


def test_layers_are_whole():
    assert why.fullest_s([1.0] * 12, 8) == 2.0
    assert why.fullest_s([1.0] * 12, 4) == 3.0
    assert why.fullest_s([5.0, 1.0, 1.0], 3) == 5.0
    assert why.fullest_s([3.0, 2.0, 2.0, 1.0], 3) == 3.0
    assert why.fullest_s([2.0, 2.0, 2.0, 2.0, 1.0], 2) == 5.0
    assert why.fullest_s([2.0, 2.0, 2.0, 2.0, 2.0], 2) == 6.0
    assert why.fullest_s([1.0, 1.0], 3) == 1.0


def test_no_schedule_passes_the_bound_and_recomputing_is_a_third_more():
    rows = list(why.rows(NETWORKS["bert12"]))
    assert all(row["predicted_speedup"] <= row["bound"] * (1 + 1e-9) for row in rows)
    base_s = {row["assumed"]: row["predicted_baseline_step_s"] for row in rows}
    assert base_s["and a GPipe that recomputes"] / base_s[why.BASE] == pytest.approx(4 / 3, rel=0.02)
    assert len(base_s) == len(why.ASSUMED)
    nvlink = [row for row in rows if row["assumed"] == "and NVLink, 200 Gbit/s"]
    assert {row["bandwidth_bit_s"] for row in nvlink} == {2e11}
    assert {row["devices"] for row in nvlink} == {4, 8}  # of one machine; more GPUs are not


def test_sets_that_change_nothing_have_no_row():
    of_rnn = {row["assumed"] for row in why.rows(NETWORKS["rnn16"])}
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
    about |= {"settings": {"width": 64, "task": "pretrain"}, "microbatches": 4, "data": "generated"}
    return {**about, "schedule": schedule, "speedup": 1.0, "losses": [2.0, 1.5], "took_s": 95.4, **more}


def run_of(rows):
    machine = "AMD EPYC, 2 cores, 25 GB; Python 3.11"
    return Run("paper", "2026-11-26 15:00", "abc", "", machine, rows)


def figure_of(*runs):
    (figure,) = [figure for figure in figures_of(runs) if figure.measured]
    return figure


def test_ours_is_what_the_plan_takes_over_the_strongest_of_stock():
    rows = [
        measured_row(DATA_PARALLEL, "horovod", step_s=2.0),
        measured_row(DATA_PARALLEL, "horovod_k", step_s=1.5),
        measured_row(DATA_PARALLEL, "k=0", step_s=1.0, predicted_step_s=0.1),
        measured_row(DATA_PARALLEL, "search", step_s=1.2, predicted_step_s=0.8, reordering_alone=0.9),
        measured_row(DATA_PARALLEL, "reverse_first_k", step_s=1.1, predicted_step_s=0.9),
    ]
    (of_run,) = figure_of(run_of(rows)).measured
    assert (of_run.baseline, of_run.ours, of_run.gain) == ("horovod_k", "search", 1.25)
    assert of_run.alone == 0.9
    with_auto = [*rows, measured_row(DATA_PARALLEL, "auto", step_s=1.5)]
    (of_run,) = figure_of(run_of(with_auto)).measured
    assert (of_run.ours, of_run.gain) == ("auto", 1.0)


def test_a_stock_step_that_auto_kept_is_said():
    rows = [
        measured_row(DATA_PARALLEL, "horovod", step_s=2.0),
        measured_row(DATA_PARALLEL, "search", step_s=2.5),
        measured_row(DATA_PARALLEL, "auto", step_s=2.1, runs="stock", reason="measured 2.5 s against 2.0 s"),
    ]
    (line,) = lines_of(figure_of(run_of(rows)))
    cells = dict(zip(HEAD, line, strict=True))
    assert cells["Measured here"] == (
        "tiny: 0.95 (auto over horovod; auto kept stock: measured 2.5 s against 2.0 s)"
    )
    assert cells["The paper's own, here"] == "search 0.80"


def test_the_plans_own_seconds_choose_and_a_plan_for_stock_is_said():
    rows = [
        measured_row(PIPELINE, "gpipe", step_s=3.0, planned_step_s=1.0, predicted_step_s=9.0),
        measured_row(PIPELINE, "modulo", step_s=2.0, planned_step_s=2.0, predicted_step_s=2.0),
        measured_row(PIPELINE, "zb_h1", step_s=1.0, planned_step_s=3.0, predicted_step_s=1.0),
    ]
    (line,) = lines_of(figure_of(run_of(rows)))
    assert line[HEAD.index("Measured here")] == "tiny: 1.50 (modulo over gpipe; plan: gpipe)"


@pytest.mark.parametrize("seconds", [{}, {"planned_step_s": None, "predicted_step_s": None}])
def test_rows_without_a_plan_are_reported(tmp_path, seconds):
    rows = [
        measured_row(PIPELINE, "gpipe", step_s=3.0, **seconds),
        measured_row(PIPELINE, "fast_forward", step_s=2.0, **seconds),
    ]
    (tmp_path / "run.json").write_text(json.dumps(asdict(run_of(rows))))
    layerpipe = str(DOCS / "benchmarks/planner/layerpipe.json")
    done = invoked("report", "--rows", str(tmp_path), "--layerpipe", layerpipe)
    assert done.exit_code == 0, done.output
    assert "tiny: 1.50 (fast_forward over gpipe) |" in done.output
    assert not figures_of([run_of(rows[:1])])[0].measured  # stock alone says nothing


def test_other_machines_tasks_and_sizes_have_lines_of_their_own():
    rows = [
        measured_row(PIPELINE, "gpipe", step_s=3.0),
        measured_row(PIPELINE, "zb_h1", step_s=2.0, planned_step_s=2.0),
    ]
    finetuned = [row | {"settings": {"task": "finetune"}} for row in rows]
    small = [row | {"size": "small"} for row in rows]
    runs = [
        run_of(rows),
        replace(run_of(rows), machine="two x86-64 cores; Python 3.11"),
        replace(run_of(rows), machine="Another, 64 cores, 99 GB; Python 3.11"),
        run_of(finetuned),
        run_of(small),
    ]
    entries = [
        (title_of(figure), entry[0].setting.machine, measured_text(entry)[:14])
        for figure in figures_of(runs)
        for entry in figure.entries
    ]
    assert entries == [
        ("BERT-12, pre-training", "AMD EPYC, 2 cores", "tiny: 1.50 / 1"),
        ("BERT-12, pre-training", "Another, 64 cores", "tiny: 1.50 (zb"),
        ("BERT-12, pre-training", "AMD EPYC, 2 cores", "small: 1.50 (z"),
        ("BERT-12, fine-tuning", "AMD EPYC, 2 cores", "tiny: 1.50 (zb"),
    ]
    assert "Another, 64 cores" in gains_tables(runs)["gains"]
    assert "2 runs" in gains_tables(runs)["earlier"]
    assert "AMD EPYC" not in gains_tables(runs[:2])["gains"]


def test_a_line_of_the_table():
    about = {"kind": "predicted", "network": "bert12", "mode": PIPELINE, "baseline": "gpipe"}
    about |= {"configuration": "task=pretrain layers=12", "schedule": "modulo"}
    measured = [
        measured_row(PIPELINE, "gpipe", step_s=3.0, predicted_step_s=3.0),
        measured_row(PIPELINE, "modulo", step_s=2.0, predicted_step_s=2.0, bit_equal=False),
    ]
    rows = [
        {**about, "devices": 4, "predicted_speedup": 1.5},
        {**about, "devices": 4, "predicted_speedup": 1.4},  # of the same configuration the last
        {**about, "devices": 8, "predicted_speedup": 1.1},
        {**about, "devices": 9, "predicted_speedup": 7.0, "changed": True},
        {**about, "predicted_speedup": 9.0, "schedule": "zb_h1"},
        *measured,
    ]
    of_gpipe = measured_row(PIPELINE, "gpipe", step_s=2.2, predicted_step_s=3.0)
    (line,) = lines_of(figure_of(run_of(rows), run_of(measured), run_of([of_gpipe, measured[1]])))
    assert dict(zip(HEAD, line, strict=True)) == {
        "Network": "BERT-12, pre-training",
        "Mode": "pipeline",
        "Over": "GPipe",
        "Published": "1.41-1.99",
        "Predicted": "1.10-1.40",
        "Measured here": "tiny: 1.10 / 1.50 / 1.50 (modulo over gpipe), 3 runs",
        "The paper's own, here": "modulo 1.10 / 1.50 / 1.50",
        "Same bits": "NO",
        "Loss": "2.000 to 1.500",
        "Trained here": "width=64 task=pretrain; 2 devices, 4 micro-batches; generated; 95 s",
        "Machine": "AMD EPYC, 2 cores",
    }
    assert gains_text([1.001, 1.004]) == "1.00"
    assert settings_text(NETWORKS["resnet50"].runs[0]) == "layers=50 batch=128, 4 GPUs, k=45"


def test_a_mode_of_the_users_own_has_no_published_range():
    rows = [measured_row(PIPELINE, "gpipe", step_s=3.0), measured_row(PIPELINE, "zb_h1", step_s=2.0)]
    (line,) = lines_of(figure_of(run_of([row | {"network": "resnet50", "settings": {}} for row in rows])))
    assert line[:5] == ["ResNet-50", "pipeline", "", "", ""]


def test_older_runs_trained_with_another_optimizer():
    rows = [measured_row(PIPELINE, "gpipe", step_s=3.0), measured_row(PIPELINE, "zb_h1", step_s=2.0)]
    older = replace(run_of(rows), date="2026-11-26 13:00")
    runs = [older, run_of(rows)]
    assert [entry[0].setting.trained.endswith("SGD of rate 0.01") for entry in figure_of(*runs).entries] == [
        True,
        False,
    ]
    assert "SGD" in gains_tables(runs)["earlier"]
    assert "SGD" not in gains_tables(runs)["gains"]
    assert gains_tables(runs[1:])["earlier"] == "No other setting was run."


def test_rows_that_name_their_optimizer_are_of_a_setting_of_their_own():
    rows = [measured_row(PIPELINE, "gpipe", step_s=3.0), measured_row(PIPELINE, "zb_h1", step_s=2.0)]
    named = [row | {"optimizer": "Adam of rate 0.0003"} for row in rows]
    older = replace(run_of(named), date="2026-11-26 13:00")  # what the row says counts, not the date
    entries = figure_of(run_of(rows), run_of(named), older).entries
    assert [(len(entry), entry[0].setting.trained.split("; ")[2:]) for entry in entries] == [
        (1, ["generated"]),
        (2, ["generated", "Adam of rate 0.0003"]),
    ]


@pytest.mark.parametrize(
    ("name", "settings", "said"),
    [
        ("resnet50", {}, "SGD of rate 0.1, momentum 0.9"),
        ("densenet121", {}, "SGD of rate 0.1"),
        ("bert12", {}, "Adam of rate 0.0003"),
        ("bert12", {"task": "finetune"}, "Adam of rate 5e-05"),
    ],
)
def test_optimizers_are_named(name, settings, said):
    assert Asked(NETWORKS[name], "tiny", "auto", EXAMPLES, settings).workload().optimizer_text() == said


def test_a_schedule_of_rates_is_named(monkeypatch):
    workload = Asked(NETWORKS["bert12"], "tiny", "auto", EXAMPLES, {}).workload()
    decay = keras.optimizers.schedules.CosineDecay(0.1, 10)
    monkeypatch.setattr(loaded(workload.script), "optimizer", lambda of: keras.optimizers.SGD(decay))
    assert workload.optimizer_text() == "SGD of rate CosineDecay"


def test_measured_rows_say_what_was_trained(monkeypatch):
    monkeypatch.setitem(measured._MEASURED, SINGLE, lambda label, effort: iter([{"schedule": "x"}]))
    (row,) = measured.rows(Asked(NETWORKS["densenet121"], "tiny", "generated", EXAMPLES, {}), SINGLE)
    assert (row["data"], row["optimizer"]) == ("generated", "SGD of rate 0.1")
    assert (row["network"], row["settings"]["growth"]) == ("densenet121", 12)


def test_the_setting_that_was_run_last_is_the_newest():
    rows = [measured_row(PIPELINE, "gpipe", step_s=3.0), measured_row(PIPELINE, "zb_h1", step_s=2.0)]
    wider = [row | {"settings": {"width": 128, "task": "pretrain"}} for row in rows]
    small = [row | {"size": "small"} for row in rows]
    figure = figure_of(*map(run_of, (rows, wider, small, rows)))
    assert [(entry[0].setting.size, len(entry)) for entry in figure.newest] == [("tiny", 2), ("small", 1)]
    assert "width=128" in gains_tables([run_of(rows), run_of(wider), run_of(rows)])["earlier"]


def test_our_page_has_all_rows():
    """``tf-ooo paper report --page docs/paper.md --picture docs/images/paper.png`` makes it."""
    runs = runs_in(DOCS / "benchmarks/rows")
    tables = tables_of(runs, json.loads((DOCS / "benchmarks/planner/layerpipe.json").read_text()))
    page = (DOCS / "paper.md").read_text()
    assert with_tables(page, tables) == page
    assert all(f"figures: {name} -->" in page for name in tables)


def test_kept_predictions_are_what_the_formulas_say_now():
    kept = {
        (figure.network, figure.mode, figure.task): figure.predicted
        for figure in figures_of(runs_in(DOCS / "benchmarks/rows"))
    }
    for name, mode in (("mobilenet_v3_large", SINGLE), ("bert12", PIPELINE)):
        for figure in figures_of([run_of(list(predicted.rows(NETWORKS[name], mode)))]):
            if figure.predicted:
                assert figure.predicted == pytest.approx(kept[name, mode, figure.task])


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


def test_without_runs_no_particular_benchmark_is_advised(tmp_path):
    done = invoked("report", "--rows", str(tmp_path))
    assert done.exit_code == 2
    advice = f"tf-ooo bench NAME --keep {tmp_path} or tf-ooo paper all --keep {tmp_path} makes some"
    assert f"no runs in {tmp_path}; {advice}" in done.output


def test_runs_of_one_network_stay_apart():
    rows = [
        measured_row(PIPELINE, "gpipe", step_s=3.0, predicted_step_s=3.0),
        measured_row(PIPELINE, "zb_h1", step_s=2.0, predicted_step_s=2.0),
    ]
    rows = [row | {"settings": {}} for row in rows]
    other = [row | {"network": "gpt3_medium"} for row in rows]
    figures = figures_of([run_of(rows + other), run_of(rows)])
    by_name = {figure.network: figure for figure in figures if figure.measured}
    assert len(by_name["bert12"].measured) == 2
    assert len(by_name["gpt3_medium"].measured) == 1
    with pytest.raises(OptionsError):
        Asked(NETWORKS["bert12"], "tiny", "auto", Path("nowhere"), {}).workload()


def test_gpipe_keeps_everything_of_published_pre_training_in_16_gb():
    needed_bytes = {
        row["network"]: row["peak_bytes"] + row["state_bytes"]
        for layers in (12, 24, 36, 48)
        for row in why.memory_rows(NETWORKS[f"bert{layers}"])
        if row["configuration"].startswith("task=pretrain")
    }
    assert len(needed_bytes) == 4
    assert max(needed_bytes.values()) < why.V100_BYTES
    # BERT-12: two layers on a GPU, 30 micro-batches of 16 x 128 words.
    kept_bytes = 2 * 30 * 16 * 128 * (34 * 768 + 5 * 12 * 128) * 2
    assert needed_bytes["bert12"] == pytest.approx(kept_bytes, rel=0.15)


def test_gpus_are_left_to_the_processes_that_measure(monkeypatch):
    hidden = mock.Mock(side_effect=RuntimeError("cannot be modified after being initialized"))
    monkeypatch.setattr(tf.config, "set_visible_devices", hidden)
    monkeypatch.setattr(measured, "rows", lambda asked, mode: [])
    monkeypatch.setattr(predicted, "RATES_BYTES_PER_S", (1.25e9,))
    monkeypatch.setattr(command, "NETWORKS", {"rnn16": NETWORKS["rnn16"]})
    for arguments in (["run", "rnn16"], ["all"]):
        assert invoked(*arguments, "--only", "predicted").exit_code == 0
        hidden.assert_not_called()
        done = invoked(*arguments, "--only", "measured")
        assert done.exit_code == 0, done.output
        hidden.assert_called_once_with([], "GPU")
        hidden.reset_mock()


def test_all_prints_its_head_once_and_a_line_for_each_network_and_task(monkeypatch):
    names = ("feed_forward", "bert12")
    monkeypatch.setattr(command, "NETWORKS", {name: NETWORKS[name] for name in names})
    monkeypatch.setattr(predicted, "RATES_BYTES_PER_S", (1.25e9,))
    done = invoked("all", "--only", "predicted")
    assert done.exit_code == 0, done.output
    lines = [line for line in done.output.splitlines() if " of 3: " not in line]
    assert [line.split("  ")[0] for line in lines] == [
        "Network",
        "FFNN",
        "BERT-12, pre-training",
        "BERT-12, fine-tuning",
    ]
    assert len({line.index(word) for line, word in zip(lines, ["Mode", *["pipeline"] * 3], strict=True)}) == 1


class Fitted:
    """A model that only keeps how it was trained."""

    def compile(self, *_, **__):
        pass

    def fit(self, x, y, **given):
        self.rows, self.given = (len(x), len(y)), given


@pytest.mark.parametrize("script", sorted({network.script for network in NETWORKS.values()}))
@pytest.mark.parametrize(("mode", "rows"), [("single_device", 5), ("pipeline", 3 * 5)])
def test_scripts_train_on_rows_of_micro_batches(monkeypatch, script, mode, rows):
    module, model = loaded(str(EXAMPLES / f"{script}.py")), Fitted()
    monkeypatch.setattr(module, "build", lambda _: model)
    monkeypatch.setattr(module.tf_ooo, "OOOBackprop", mock.Mock())
    # Devices of a process that has run something are as they are.
    monkeypatch.setattr(tf.config, "set_logical_device_configuration", lambda *_: None)
    arguments = f"--mode {mode} --microbatches 3 --batch 5 --steps 2 --data generated"
    monkeypatch.setattr(sys, "argv", [script, *arguments.split()])
    module.main()
    assert model.rows == (2 * rows, 2 * rows)
    assert model.given["batch_size"] == rows


def test_each_worker_has_as_many_steps_as_were_asked_for(monkeypatch):
    module, model = loaded(str(EXAMPLES / "feed_forward.py")), Fitted()
    monkeypatch.setattr(module, "build", lambda _: model)
    monkeypatch.setattr(module.tf_ooo, "OOOBackprop", mock.Mock())
    ranks = mock.Mock(rank=1, size=3)
    monkeypatch.setattr(data_parallel, "choose_engine", lambda _: ranks)
    arguments = "--mode data_parallel --batch 5 --steps 2 --data generated"
    monkeypatch.setattr(sys, "argv", ["feed_forward", *arguments.split()])
    module.main()
    assert model.rows == (2 * 5, 2 * 5)
    assert model.given["batch_size"] == 5


@pytest.mark.parametrize(
    ("script", "arguments", "said"),
    [
        ("bert", "--width wide", "width='wide': expected a whole number above 0"),
        ("densenet121", "--blocks 3", "blocks=3: expected several whole numbers above 0, such as 2,2"),
        ("rnn", "--layers 0 --batch 0", "layers=0: expected a whole number above 0"),
        ("rnn", "--batch -1", "batch=-1: expected a whole number above 0"),
        ("mobilenet_v3_large", "--alpha 0", "alpha=0: expected a number above 0"),
        ("bert", "--task 3", "task=3: expected a word"),
        ("bert", "--task finetuning", "task='finetuning': expected pretrain or finetune"),
        ("gpt3", "--microbatches 0", "microbatches=0: expected a whole number above 0"),
    ],
)
def test_scripts_refuse_other_kinds_in_one_line(monkeypatch, capsys, script, arguments, said):
    module = loaded(str(EXAMPLES / f"{script}.py"))
    monkeypatch.setattr(module, "build", lambda _: pytest.fail("built nonetheless"))
    monkeypatch.setattr(sys, "argv", [script, *arguments.split()])
    with pytest.raises(SystemExit, match="2"):
        module.main()
    assert capsys.readouterr().err.endswith(f"error: {said}\n")


def test_report_works_from_any_folder(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    done = invoked("report")
    assert done.exit_code == 0, done.output
    assert "## gains" in done.output
