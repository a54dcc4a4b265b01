"""Runs that stay, and the page that is made of them."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path

import click
import pytest
from click.testing import CliRunner

from tf_ooo.bench.report import pictures
from tf_ooo.bench.report.figures import KINDS, Figure, figures_of
from tf_ooo.bench.report.page import with_tables
from tf_ooo.bench.report.reading import runs_in
from tf_ooo.bench.report.tables import table_of, table_of_all, tables_of
from tf_ooo.bench.shared.kept import Run
from tf_ooo.bench.shared.options import json_option
from tf_ooo.bench.shared.rows import write_rows
from tf_ooo.cli import main
from tf_ooo.errors import OptionsError

DOCS = Path(__file__).parents[2] / "docs"
BY_NAME = {kind.name: kind for kind in KINDS}


@click.command("measuring")
@json_option
def measuring(json_file):
    for count in (1, 2):
        write_rows(json_file, [{"step_s": number} for number in range(count)])


def test_a_run_stays_with_what_tells_it_apart(tmp_path):
    done = CliRunner().invoke(measuring, ["--keep", str(tmp_path / "rows")])
    assert done.exit_code == 0, done.output
    (run,) = runs_in(tmp_path / "rows")
    assert run.bench == "measuring"
    assert run.rows == [{"step_s": 0}, {"step_s": 1}]
    assert run.command.startswith("tf-ooo")
    assert "cores" in run.machine
    assert "tensorflow" in run.machine
    assert len(run.commit.rstrip("+")) >= 5
    assert len(run.date) == len("2026-11-25 14:30")


def test_no_run_is_overwritten(tmp_path, monkeypatch):
    from tf_ooo.bench.shared import kept

    class Clock(kept.datetime.datetime):
        @classmethod
        def now(cls, tz=None):
            return cls(2026, 11, 25, 14, 30, tzinfo=tz)

    monkeypatch.setattr(kept.datetime, "datetime", Clock)
    asked = ["--keep", str(tmp_path)]
    assert CliRunner().invoke(measuring, asked).exit_code == 0
    again = CliRunner().invoke(measuring, asked)
    assert again.exit_code == 1
    assert "no run is overwritten" in again.output


def of_data_parallel(date, stock_s, k_s, plain_s, **ours_s):
    about = {"workload": "mlp", "mode": "data_parallel", "devices": 2, "communication": 1.0, "steps": 8}
    seconds = {"horovod": stock_s, "horovod_k": k_s, "k=0": plain_s, "local": 0.5, **ours_s}
    rows = [about | {"schedule": name, "step_s": step_s} for name, step_s in seconds.items()]
    rows[-1] |= {"predicted_step_s": 0.8, "bound_s": 0.7}
    return Run("data-parallel", date, "abc", "", "two cores", rows)


def test_the_strongest_baseline_counts_and_all_runs_are_said():
    runs = [of_data_parallel(str(day), 2.0, 1.2, 1.1, search=1.0 + day / 10) for day in range(3)]
    table = table_of(BY_NAME["data parallel"], runs)
    (line,) = table.splitlines()[2:]
    cells = [cell.strip() for cell in line.strip("|").split("|")]
    assert cells[:4] == ["mlp", "2", "1 x computing", "Horovod"]
    assert cells[5].startswith("horovod_k, 1.20 s")
    assert cells[6].startswith("search, 1.20 s")  # the last run's
    assert cells[7] == "1.00 / 1.09 / 1.20"
    assert cells[8] == "0.92 / 1.00 / 1.10"
    assert cells[9] == "-33% / -27% / -20%"
    assert cells[-1] == "3"
    assert "Efficiency" not in table


@pytest.mark.parametrize(
    ("communication_s", "asked"),
    [(0.3, "0.98"), (0.36, "1.15 on three of five"), (0.7, "0.98"), (None, "0.98")],
)
def test_what_is_asked_on_a_link_of_chosen_speed_follows_from_what_the_run_measured(communication_s, asked):
    run = of_data_parallel("1", 2.0, 1.2, 1.1, search=1.0)
    for row in run.rows:
        del row["communication"]
        row["bandwidth_bit_s"] = 2e9
        if communication_s is not None:
            row.update(communication_s=communication_s, compute_s=0.5)
    (line,) = table_of(BY_NAME["data parallel"], [run]).splitlines()[2:]
    assert f"| 2000 Mbit/s | Horovod | {asked} |" in line


def test_a_short_line_is_of_the_last_setting_and_has_the_gains_of_all():
    kind = BY_NAME["data parallel"]
    eight = of_data_parallel("2", 2.0, 1.2, 1.1, search=1.0)
    sixteen = of_data_parallel("1", 2.0, 1.5, 1.1, search=1.0)
    for row in sixteen.rows:
        row["steps"] = 16
    (line,) = table_of(kind, [sixteen, eight]).splitlines()[2:]
    assert "| horovod_k, 1.20 s | search, 1.00 s | 1.20 |" in line
    assert line.endswith("| 1 | 1.20 / 1.35 / 1.50, 2 runs |")
    long = table_of_all(kind, [sixteen, eight])
    assert [line.split(" | ")[3] for line in long.splitlines()[2:]] == ["8", "16"]
    assert "all settings" not in long


def test_orders_of_one_cpu_have_a_line_each():
    rows = [
        {"workload": name, "batch": 8, "schedule": order, "step_s": [2.0, 1.0, 3.0], "baseline_s": [2.0],
         "speedup": gain}
        for name, order, gain in (("mlp", "auto", 1.1), ("cnn", "auto", 0.9), ("mlp", "in_order", 0.8))
    ]  # fmt: skip
    table = tables_of([Run("single-cpu", "1", "abc", "", "two cores", rows)])["one cpu"]
    assert table.splitlines()[2:] == ["| auto | 2 | 0.90 / 1.00 / 1.10 | 2 |", "| in_order | 1 | 0.80 | 1 |"]


def test_a_run_without_the_strongest_baseline_is_in_no_table():
    run = of_data_parallel("1", 2.0, 1.2, 1.1, search=1.0)
    run.rows[:] = [row for row in run.rows if row["schedule"] != "horovod_k"]
    assert table_of(BY_NAME["data parallel"], [run]) == "No run of this is kept yet."


def test_ours_is_what_the_plan_takes_not_what_was_fastest():
    run = of_data_parallel("1", 2.0, 1.2, 1.1, reverse_first_k=0.9, search=1.0)
    ((figure,),) = figures_of(BY_NAME["data parallel"], [run])
    assert figure.ours == "search"


def test_collectives_have_figures_of_their_own():
    names = {"collectives_k=0": 1.5, "collectives_search": 1.25, "search": 1.0}
    run = of_data_parallel("1", 2.0, 1.2, 1.1, **names)
    horovod, collectives = (figure for (figure,) in figures_of(BY_NAME["data parallel"], [run]))
    assert (collectives.ours, collectives.alone, collectives.setting[4]) == (
        "collectives_search",
        1.2,
        "collectives",
    )
    assert (horovod.ours, horovod.setting[4]) == ("search", "Horovod")
    assert collectives.baseline == horovod.baseline == "horovod_k"


def test_layerpipe_beside_the_fastest_of_what_there_is():
    seconds = {"pipedream": 2.0, "pipedream_2bw": 1.5, "fast_forward": 1.8, "layerpipe": 1.2}
    about = {"workload": "mlp", "mode": "layerpipe", "devices": 2, "cores": 0.6}
    rows = [about | {"schedule": name, "step_s": step_s} for name, step_s in seconds.items()]
    run = Run("layerpipe", "1", "abc", "", "two cores", rows)
    ((figure,),) = figures_of(BY_NAME["layerpipe"], [run])
    assert (figure.baseline, figure.gain) == ("pipedream_2bw", 1.25)


def test_another_machine_is_another_setting():
    run = of_data_parallel("1", 2.0, 1.2, 1.1, search=1.0)
    machines = ("two x86-64 cores; Python", "AMD EPYC, 2 cores, 25 GB; Python", "ARM, 2 cores, 8 GB; Python")
    first, same, other = (replace(run, machine=machine) for machine in machines)
    assert len(figures_of(BY_NAME["data parallel"], [first, same])) == 1
    assert len(figures_of(BY_NAME["data parallel"], [first, same, other])) == 2
    assert "ARM, 2 cores" in table_of_all(BY_NAME["data parallel"], [first, other])
    assert "EPYC" not in table_of_all(BY_NAME["data parallel"], [first, same])


def test_another_size_is_another_setting():
    about = {"mode": "layerpipe", "devices": 2, "cores": 0.6, "workload": "mlp"}
    rows = [
        about | {"schedule": name, "step_s": 1.0, "batch_rows": count}
        for count in (512, 1536)
        for name in ("pipedream", "layerpipe")
    ]
    runs = [Run("layerpipe", "1", "abc", "", "two cores", part) for part in (rows[:2], rows[2:])]
    assert [figures[0].setting[3] for figures in figures_of(BY_NAME["layerpipe"], runs)] == ["512", "1536"]


def test_seconds_are_those_of_the_last_run():
    names = (("1", 2.0, 1.9), ("2", 3.0, 3.5))
    runs = [of_data_parallel(date, horovod_s, same_s, 1.1, search=1.0) for date, horovod_s, same_s in names]
    kind = BY_NAME["data parallel"]
    (line,) = table_of(kind, runs).splitlines()[2:]
    assert "| horovod_k, horovod, 3.00 s |" in line


def test_names_that_were_kept_the_wrong_way_round_are_right(tmp_path):
    kept = {"bench": "pipeline", "date": "1", "commit": "", "command": "", "machine": ""}
    (tmp_path / "run.json").write_text(json.dumps(kept | {"rows": [{"schedule": "interleaved_1f1b_fused"}]}))
    (run,) = runs_in(tmp_path)
    assert [row["schedule"] for row in run.rows] == ["interleaved_1f1b_unfused"]


def test_a_pictures_lines_say_what_tells_them_apart():
    kind = BY_NAME["pipelines"]
    cells = {
        "Workload": "mlp",
        "Devices": "2",
        "Micro-batches": "4",
        "Cores": "0.6",
        "Rows": "8",
        "Machine": "A",
    }
    changed = [
        {},
        {"Devices": "4", "Cores": "0.3"},
        {"Rows": "16"},
        {"Devices": "4", "Cores": "0.3", "Machine": "B"},
    ]
    figures = [
        Figure(tuple((cells | other)[column] for column in kind.setting), "gpipe", 2.0, "zb_v", 1.0)
        for other in changed
    ]
    assert pictures._names(kind, figures) == [
        "mlp, devices 2, rows 8, machine A",
        "mlp, devices 4, rows 8, machine A",
        "mlp, devices 2, rows 16, machine A",
        "mlp, devices 4, rows 8, machine B",
    ]


def test_sizes_of_older_runs_stand_beside_them(tmp_path):
    rows = [{"workload": "mlp", "step_s": 1.0}, {"workload": "mlp", "step_s": 2.0, "batch_rows": 8}, {}]
    (tmp_path / "rows" / "layerpipe").mkdir(parents=True)
    kept = {"bench": "layerpipe", "date": "1", "commit": "", "command": "", "machine": "", "rows": rows}
    (tmp_path / "rows" / "layerpipe" / "old.json").write_text(json.dumps(kept))
    sizes = {"layerpipe/old.json": {"mlp": {"batch_rows": 512}}}
    (tmp_path / "older_sizes.json").write_text(json.dumps(sizes))
    (run,) = runs_in(tmp_path / "rows")
    assert [row.get("batch_rows") for row in run.rows] == [512, 8, None]


def test_a_prediction_that_failed_is_counted():
    row = {"workload": "mlp", "where": "ranks", "predicted_s": 1.0, "measured_s": 1.1}
    failed = {"workload": "mlp", "repetition": 2, "failed": "no Horovod"}
    run = Run("prediction", "1", "abc", "", "two cores", [row, failed])
    table = tables_of([run])["predictions"]
    assert table.splitlines()[-1] == "| mlp | ranks | 1.00 s | 1.10 s | -9% | 1 of 1 | 1 |"
    only_failed = replace(run, rows=[failed])
    assert "0 of 0" in tables_of([only_failed])["predictions"]


def test_words_by_hand_stay():
    page = "# Mine\n\n<!-- figures: meshes -->\nold\n<!-- end of figures -->\n\nWhat it means.\n"
    once = with_tables(page, {"meshes": "| new |"})
    assert once == page.replace("old", "\n| new |\n")
    assert with_tables(once, {"meshes": "| new |"}) == once
    with pytest.raises(OptionsError, match="'meshes'.*with torch as NAME"):
        with_tables(page, {"torch": ""})
    with pytest.raises(OptionsError, match="no place for a table"):
        with_tables("# Mine", {"torch": ""})


@pytest.mark.parametrize("text", ["[1]", "{", json.dumps({"bench": "pipeline"})])
def test_other_files_are_named(text, tmp_path):
    (tmp_path / "mine.json").write_text(text)
    done = CliRunner().invoke(main, ["bench", "report", "--rows", str(tmp_path)])
    assert done.exit_code == 1
    assert "mine.json" in done.output


def test_no_runs_says_how_to_make_one(tmp_path):
    done = CliRunner().invoke(main, ["bench", "report", "--rows", str(tmp_path)])
    assert done.exit_code == 1
    assert "--keep" in done.output


def test_our_pages_have_all_runs():
    """``tf-ooo bench report --page docs/benchmarks.md --page docs/benchmarks/all.md --pictures
    docs/benchmarks/pictures`` makes them."""
    tables = tables_of(runs_in(DOCS / "benchmarks" / "rows"))
    pages = [(DOCS / name).read_text() for name in ("benchmarks.md", "benchmarks/all.md")]
    assert [with_tables(page, tables) for page in pages] == pages
    assert all(f"figures: {name} -->" in "".join(pages) for name in tables)


def test_pictures_of_all_tables(tmp_path):
    rows = str(DOCS / "benchmarks" / "rows")
    done = CliRunner().invoke(main, ["bench", "report", "--rows", rows, "--pictures", str(tmp_path)])
    assert done.exit_code == 0
    assert len(list(tmp_path.glob("*.png"))) >= 7
    assert "## pipelines" in done.output
    assert "## all of" not in done.output
