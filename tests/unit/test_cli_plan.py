"""``tf-ooo plan`` and ``tf-ooo simulate`` on cost tables, without TensorFlow."""

from __future__ import annotations

import importlib
import json
import pickle
import subprocess
import sys
from inspect import signature

import pytest
from click.testing import CliRunner

import tf_ooo
from tf_ooo.cli import main
from tf_ooo.cli.plan import plan as command
from tf_ooo.costs import LayerCosts, Link
from tf_ooo.costs.table import CostTable, GainTable
from tf_ooo.errors import OptionsError
from tf_ooo.planning.model.schedule import Schedule, Task
from tf_ooo.planning.policies import POLICIES

LAYERS = tuple(
    LayerCosts(1e-3 * (1 + i % 3), 2e-3, 1e-3, 1e-4, 3e6, 1e6, 1e5, name=f"block {i}") for i in range(8)
)


@pytest.fixture(name="costs")
def _costs(tmp_path):
    return CostTable(LAYERS, Link(1e-5, 1e9), notes=("made up",)).save(tmp_path / "costs.json")


def _run(*arguments):
    return CliRunner().invoke(main, list(map(str, arguments)), env={"COLUMNS": "160"})


def test_the_table_names_all_and_the_chosen(costs, tmp_path):
    out = tmp_path / "s.txt"
    result = _run("plan", costs, "--devices", 2, "--microbatches", 4, "--out", out)
    assert result.exit_code == 0, result.output
    policies = [name for name, policy in POLICIES.items() if "pipeline" in policy.modes]
    assert all(f" {name} " in result.output for name in policies)
    assert result.output.count("chosen") == 1
    assert "note: made up" in result.output
    schedule = Schedule.from_text(out.read_text())
    assert schedule.microbatches == 4
    assert f"wrote {out}" in result.output


@pytest.mark.parametrize("more", [(), ("--splits",)])
def test_a_long_plan_is_said_where_there_is_no_terminal(costs, monkeypatch, more):
    """One line on the standard error; a quick plan says nothing."""
    module = importlib.import_module("tf_ooo.cli.plan")
    asked = ("plan", costs, "--devices", 4, "--microbatches", 16, "--json", *more)
    monkeypatch.setattr(module, "SAID_AFTER_S", 0.0)
    slow = _run(*asked)
    assert slow.stderr == "planning 8 layers on 4 devices, 16 micro-batches: 392 tasks ...\n"
    json.loads(slow.stdout)
    monkeypatch.setattr(module, "SAID_AFTER_S", 600.0)
    assert not _run(*asked).stderr


def test_gains_of_a_file_decide(costs, tmp_path):
    gains = GainTable({("dO:2", 5): 1e-3}).save(tmp_path / "gains.json")
    out = tmp_path / "s.txt"
    result = _run("plan", costs, "--schedule", "multi_stream", "--gains", gains, "--out", out)
    assert result.exit_code == 0, result.output
    assert Task("dW", 5) in Schedule.from_text(out.read_text()).lanes[0, 1]
    gains.write_text("{}")
    result = _run("plan", costs, "--schedule", "multi_stream", "--gains", gains)
    assert result.exit_code != 0
    assert "version must be 1" in result.output


def test_json_and_files(costs, tmp_path):
    files = [tmp_path / name for name in ("t.html", "t.png", "t.json", "s.txt", "c.json")]
    flags = ("--html", "--png", "--trace", "--out", "--costs-out")
    named = [part for pair in zip(flags, files, strict=True) for part in pair]
    result = _run("plan", costs, "--devices", 2, "--schedule", "1f1b", "--microbatches", 2, "--json", *named)
    assert result.exit_code == 0, result.output
    content = json.loads(result.stdout)
    assert content["policy"] == "1f1b"
    assert [candidate["schedule"] for candidate in content["candidates"]] == ["1f1b"]
    assert len(content["peak_bytes"]) == 2
    assert sorted(content["files"]) == sorted(map(str, files))
    assert all(path.stat().st_size > 100 for path in files)
    assert CostTable.load(files[4]) == CostTable.load(costs)
    again = _run("simulate", files[3], files[4], "--trace", tmp_path / "again.json", "--json")
    for trace in (files[2], tmp_path / "again.json"):
        spans = [event for event in json.loads(trace.read_text())["traceEvents"] if event["ph"] == "X"]
        named = [span["args"]["names"] for span in spans if span["cat"] != "message"]
        assert all(name.startswith("block ") for name in named)
        assert len(set(named)) == 2  # stages
    assert json.loads(again.stdout)["makespan_s"] == pytest.approx(content["makespan_s"])


def test_the_page_says_all_that_the_table_says(costs, tmp_path):
    """The assumptions, the limit, what was compared, and where each layer is."""
    page, ask = tmp_path / "plan.html", ("--devices", 2, "--microbatches", 4, "--memory", "200MB")
    result = _run("plan", costs, *ask, "--batch", 16, "--html", page)
    assert result.exit_code == 0, result.output
    text = page.read_text()
    assumed = result.output.split("Assumed:")[1].split("Predicted")[0].strip().splitlines()
    assert all(f"<li>{line.strip()}</li>" in text for line in assumed)
    policies = [name for name, policy in POLICIES.items() if "pipeline" in policy.modes]
    assert all(f"<td>{name}</td>" in text for name in policies)
    assert text.count('class="marked"') == 1
    assert "limit 200 MB" in text
    assert all(f"<td>block {i}</td>" in text for i in range(8))
    assert "<li>made up</li>" in text
    assert "as fast as one device" in text


def test_the_page_of_a_simulation_names_layers(costs, tmp_path):
    out, page = tmp_path / "s.txt", tmp_path / "simulated.html"
    assert _run("plan", costs, "--devices", 2, "--schedule", "1f1b", "--out", out).exit_code == 0
    assert _run("simulate", out, costs, "--html", page).exit_code == 0
    assert "block 0 .. block 3 (4 layers)" in page.read_text()


def test_the_link_of_the_option_counts(costs, tmp_path):
    out = tmp_path / "s.txt"
    arguments = ("plan", costs, "--devices", 2, "--schedule", "1f1b", "--json", "--out", out)
    fast, slow = (json.loads(_run(*arguments, "--link", link).stdout) for link in ("100Gbit", "1Mbit,1ms"))
    assert slow["step_s"] > fast["step_s"]
    simulated = json.loads(_run("simulate", out, costs, "--link", "1Mbit,1ms", "--json").stdout)
    assert simulated["step_s"] == pytest.approx(slow["step_s"])


def test_near_devices_of_the_option_count(costs, tmp_path):
    out, link = tmp_path / "s.txt", ("--link", "1Mbit,1ms")
    arguments = ("plan", costs, "--devices", 4, "--schedule", "1f1b", *link, "--json", "--out", out)
    slow, near = (json.loads(_run(*arguments, *more).stdout) for more in ((), ("--near", "2x1Gbit,1us")))
    assert slow["step_s"] > near["step_s"]
    both = (*link, "--near", "2x1Gbit,1us", "--json")
    assert json.loads(_run("simulate", out, costs, *both).stdout)["step_s"] == pytest.approx(near["step_s"])
    said = _run("plan", costs, "--devices", 4, *both[:-1]).stdout
    assert "nearer ones among devices 0, 1 and devices 2, 3: link 1 Gbit/s" in " ".join(said.split())


def test_steps_and_options(costs, tmp_path):
    out = tmp_path / "s.txt"
    arguments = ("--devices", 2, "--schedule", "modulo", "--option", "group=2", "--out", out)
    assert _run("plan", costs, *arguments).exit_code == 0
    result = _run("simulate", out, costs, "--steps", 5, "--json")
    assert json.loads(result.stdout)["steps"] == 5
    assert "steady step" in _run("simulate", out, costs).output


def test_a_memory_limit_is_kept(costs):
    result = _run("plan", costs, "--devices", 2, "--microbatches", 8, "--memory", "80MB", "--json")
    content = json.loads(result.stdout)
    assert max(content["peak_bytes"]) <= 80e6
    refused = [c for c in content["candidates"] if c["reason"]]
    assert refused
    assert all(c["step_s"] is None for c in refused)


def test_each_device_keeps_its_own_memory_limit(costs, tmp_path):
    page = tmp_path / "plan.html"
    ask = ("plan", costs, "--devices", 2, "--microbatches", 8, "--memory", "30MB,500MB")
    content = json.loads(_run(*ask, "--json").stdout)
    assert content["peak_bytes"][0] <= 30e6 < content["peak_bytes"][1]
    result = _run(*ask, "--html", page)
    assert "at most 30 MB, 500 MB on the devices" in " ".join(result.output.split())
    assert "limit of device 0 30 MB" in page.read_text()
    splits = json.loads(_run(*ask, "--splits", "--json").stdout)
    replicated = next(row for row in splits["splits"] if row["replicas"] == 2)
    assert replicated["peak_bytes"] is None or max(replicated["peak_bytes"]) <= 30e6


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (("--memory", "1MB", "--devices", "2"), "raise the limit to at least"),
        (("--memory", "2MB,1MB", "--devices", "2"), "the devices have 2000000, 1000000, and each would need"),
        (("--memory", "2MB,1MB", "--devices", "3"), "2 limits are given for 3 devices; give one for each"),
        (("--memory", "2MB,", "--devices", "2"), "expected bytes such as 16GiB"),
        (("--schedule", "fastest"), "schedule='fastest' is not accepted"),
        (("--option", "grou=2"), "no schedule offers it; offered: "),
        (("--option", "group"), "expected NAME=VALUE"),
        (("--devices", "9"), "more than the 8 layers"),
        (("--link", "3 apples"), "expected a bandwidth such as 25Gbit"),
        (("--near", "4x3 apples"), "expected a bandwidth such as 25Gbit"),
        (("--near", "600GB/s"), "expected devices of a group and their link, such as 4x600GB/s,5us"),
        (("--memory", "3 apples"), "expected bytes such as 16GiB"),
        (("--measure",), "needs a saved Keras model"),
        (("--device", "h100"), "--device needs a saved Keras model"),
        (("--precision", "bf16"), "--precision needs a saved Keras model"),
    ],
)  # fmt: skip
def test_what_is_refused(costs, arguments, message):
    result = _run("plan", costs, *arguments)
    assert result.exit_code == 2
    assert message in result.stderr
    assert "Traceback" not in result.output
    assert "Predicted, the fastest first" not in result.output or "--memory" in arguments


def test_errors_name_file_line_and_op(costs, tmp_path):
    path = tmp_path / "s.txt"
    path.write_text("tf_ooo schedule v1\nmode pipeline\npolicy mine\nlane 0 0: F:0 dX:0\n")
    result = _run("simulate", path, costs)
    assert result.exit_code == 2
    assert result.stderr.startswith(f"Error: {path}: line 4: unknown op 'dX:0'")
    assert result.stderr.count("\n") == 1
    path.write_bytes(b"\xff\xfe\x00")
    assert "cannot be read" in _run("simulate", path, costs).stderr
    path.write_text("tf_ooo schedule v1\nmode pipeline\npolicy gpipe\nlane 0 0: F:0\n")
    assert f"{path}: missing: " in _run("simulate", path, costs).stderr


def test_costs_that_are_wrong_are_named(costs, tmp_path):
    costs.write_text(costs.read_text().replace('"forward_s": 0.001', '"forward_s": -1', 1))
    result = _run("plan", costs)
    assert result.exit_code == 2
    assert "block 0" in result.stderr
    assert "forward_s" in result.stderr


def test_assumptions_are_said(costs, tmp_path):
    """Before the table, in the JSON, in the schedule's file, and by the function."""
    out, ask = tmp_path / "s.txt", ("--devices", 2, "--microbatches", 4, "--memory", "200MB")
    result = _run("plan", costs, *ask, "--out", out)
    before = result.stdout[: result.stdout.index("Predicted")]
    lines = [line.strip() for line in before.splitlines()[1:]]
    assert lines == json.loads(_run("plan", costs, *ask, "--json").stdout)["assumptions"]
    assert lines == [
        "costs as given; the table says of no device",
        "2 devices, 4 micro-batches a step, of rows that the costs do not tell",
        "link 8 Gbit/s, 10 µs latency, each direction of each two devices",
        "at most 200 MB on each device",
    ]
    assert [line for line in out.read_text().splitlines() if line.startswith("#")] == [
        f"# assumed: {line}" for line in lines
    ]
    table = CostTable.load(costs)
    schedule = tf_ooo.plan(layers=table, devices=2, microbatches=4, memory_limit_bytes=200 * 10**6)
    assert list(schedule.assumptions) == lines
    assert pickle.loads(pickle.dumps(schedule)).assumptions == schedule.assumptions
    assert schedule == Schedule.from_text(out.read_text())
    assert "no link is given" in " ".join(tf_ooo.plan(layers=LAYERS, devices=2).assumptions)
    shared = tf_ooo.Link(1e-5, machines=(0, 1, 0), cores=4)
    planned = tf_ooo.plan(layers=LAYERS, devices=2, link=shared)
    assert "devices 0, 2 share the 4 cores of their machine" in planned.assumptions
    apart = tf_ooo.plan(layers=LAYERS, devices=2, link=tf_ooo.Link(1e-5, machines=(0, 1), cores=4))
    assert "share the" not in " ".join(apart.assumptions)


@pytest.mark.parametrize(
    ("given", "said"),
    [([], "0 limits are given for 2 devices"), ([1, 0], "got 0"), ("16GB", "got '16GB'")],
)
def test_limits_of_memory_that_are_none(given, said):
    with pytest.raises(tf_ooo.OptionsError, match=said):
        tf_ooo.plan(layers=LAYERS, devices=2, memory_limit_bytes=given)


def test_an_infinite_limit_is_none():
    free = tf_ooo.plan(layers=LAYERS, devices=2)
    assert tf_ooo.plan(layers=LAYERS, devices=2, memory_limit_bytes=float("inf")) == free


def test_command_and_function_have_the_same_defaults(costs):
    named = {"memory": "memory_limit_bytes"}
    of_function = {name: parameter.default for name, parameter in signature(tf_ooo.plan).parameters.items()}
    asked = command.make_context("plan", [str(costs)]).params
    of_command = {named.get(name, name): value for name, value in asked.items()}
    shared = of_command.keys() & of_function.keys() - {"options"}  # the function's are keywords
    assert shared >= {
        "schedule",
        "devices",
        "microbatches",
        "batch",
        "device",
        "precision",
        "measure",
        "link",
    }
    assert {name: of_command[name] for name in shared} == {name: of_function[name] for name in shared}
    ask = json.loads(_run("plan", costs, "--json").stdout)
    planned = tf_ooo.plan(layers=CostTable.load(costs))
    assert (planned.policy, planned.predicted_step_s) == (ask["policy"], ask["step_s"])


def test_what_the_limit_costs(costs):
    """43 MB hold 1F1B, and not what ZB-H2 wants to run ahead."""
    ask = ("plan", costs, "--devices", 4, "--microbatches", 8, "--schedule", "zb_h2")
    tight, free = (json.loads(_run(*ask, *limit, "--json").stdout) for limit in (("--memory", "34MB"), ()))
    slower = tight["step_s"] / free["step_s"] - 1
    assert slower > 0.05
    (row,) = tight["candidates"]
    assert row["slower_by_limit"] == pytest.approx(slower)
    assert free["candidates"][0]["slower_by_limit"] is None
    text = f"zb_h2 under 34 MB: {slower:.0%} slower than without the limit (46 MB)"
    assert f"note: {text}" in _run(*ask, "--memory", "34MB").output
    limited = tf_ooo.plan(
        layers=CostTable.load(costs), schedule="zb_h2", devices=4, microbatches=8,
        memory_limit_bytes=34 * 10**6,
    )  # fmt: skip
    assert limited.assumptions[-1] == text
    assert "limit" not in _run(*ask, "--memory", "60MB").output.split("Predicted")[1]


def test_throughput_and_gains_by_hand(costs):
    """Without a link, equal layers: 1F1B takes (4 + 2 - 1) rounds of 4 layers, one device 4 x 8 of them."""
    equal = [LayerCosts(1e-3, 1e-3, 1e-3)] * 8
    CostTable(equal, rows=5).save(costs)
    ask = ("plan", costs, "--devices", 2, "--microbatches", 4)
    content = json.loads(_run(*ask, "--json").stdout)
    compared = [row for row in content["candidates"] if row["step_s"] is not None]
    rows = {row["schedule"]: row for row in compared}
    assert (
        len(rows) == len(content["candidates"]) - 1
    )  # no cut can be faster than the best, so none is searched
    one_device_s = 4 * 8 * 3e-3
    for row in rows.values():
        assert row["rows_per_s"] == pytest.approx(4 * 5 / row["step_s"])
        assert row["over_one_device"] == pytest.approx(one_device_s / row["step_s"])
        assert row["over"] == "1f1b"
        assert row["over_reference"] == pytest.approx(rows["1f1b"]["step_s"] / row["step_s"])
    assert max(row["over_one_device"] for row in rows.values()) <= 2 + 1e-9
    assert "rows/s" in _run(*ask).output
    named = json.loads(_run(*ask, "--schedule", "zb_h1", "--json").stdout)["candidates"][0]
    assert (named["over"], named["over_reference"]) == ("1f1b", rows["zb_h1"]["over_reference"])


def test_rows_of_costs(costs):
    CostTable(LAYERS, rows=8).save(costs)
    assert "costs are for micro-batches of 8 rows" in _run("plan", costs, "--batch", 16).stderr
    assert _run("plan", costs, "--batch", 8).exit_code == 0
    split = ("--devices", 2, "--microbatches", 4)
    assert _run("plan", costs, *split, "--batch", 32).exit_code == 0
    assert "micro-batches of 2 rows" in _run("plan", costs, *split, "--batch", 8).stderr
    costs.write_text(costs.read_text().replace('"rows": 8', '"rows": 0'))
    assert "rows: expected a whole number of at least 1, got 0" in _run("plan", costs).stderr


def test_workers_of_data_parallel(costs):
    """Twice the rows, and a reduction that one device has not: never twice as fast."""
    CostTable(LAYERS, Link(1e-5, 1e9), rows=3).save(costs)
    ask = ("--mode", "data_parallel", "--devices", 2, "--schedule", "in_order", "--json")
    row = json.loads(_run("plan", costs, *ask).stdout)["candidates"][0]
    assert row["rows_per_s"] == pytest.approx(2 * 3 / row["step_s"])
    assert 1 < row["over_one_device"] < 2
    assert row["over_reference"] == 1


def test_settings_of_models_are_refused_without_one():
    with pytest.raises(OptionsError, match="^precision='bf16' is for a model; what is given has seconds"):
        tf_ooo.plan(layers=LAYERS, precision="bf16")
    with pytest.raises(OptionsError, match="not two of them"):
        tf_ooo.plan(layers=LAYERS, model="model.keras")


def test_a_folder_that_cannot_be_made(costs, tmp_path):
    (tmp_path / "file").write_text("")
    result = _run("plan", costs, "--html", tmp_path / "file" / "t.html")
    assert result.exit_code == 1
    assert "cannot be written" in result.stderr


def test_tensorflow_is_not_imported(costs, tmp_path):
    out = tmp_path / "s.txt"
    code = (
        "import sys\n"
        "from tf_ooo.cli import main\n"
        f"costs, out = {str(costs)!r}, {str(out)!r}\n"
        "plan = ['plan', costs, '--out', out, '--html', out + '.html']\n"
        "for args in (['-h'], plan, ['simulate', out, costs]):\n"
        "    try:\n"
        "        main(args, standalone_mode=False)\n"
        "    except SystemExit:\n"
        "        pass\n"
        "heavy = {'tensorflow', 'keras'} & set(sys.modules)\n"
        "assert not heavy, heavy\n"
    )
    run = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=800)
    assert run.returncode == 0, run.stderr
    assert out.exists()


def test_a_schedule_of_an_unknown_mode_is_named(costs, tmp_path):
    out = tmp_path / "s.txt"
    _run("plan", costs, "--devices", 2, "--microbatches", 4, "--out", out)
    out.write_text(out.read_text().replace("mode pipeline", "mode pipelnie"))
    result = _run("simulate", out, costs)
    assert result.exit_code == 2
    assert "mode='pipelnie' is not accepted (did you mean 'pipeline'?)" in result.output
    assert "Traceback" not in result.output
    assert result.output.count("\n") <= 2


@pytest.mark.parametrize("missing", ["tensorflow", "keras"])
def test_a_demo_without_tensorflow_says_what_to_install(missing, monkeypatch):
    monkeypatch.setitem(sys.modules, missing, None)
    for name in [name for name in sys.modules if name.startswith("tf_ooo.cli.demo")]:
        monkeypatch.delitem(sys.modules, name)
    result = _run("demo")
    assert result.exit_code == 2
    assert "Traceback" not in result.output
    last = result.output.splitlines()[-1]
    assert last.startswith("Error: this needs TensorFlow with Keras")
    assert f"{missing} is not installed here: pip install '.[cpu]'" in last


def test_a_worker_without_tensorflow_says_what_to_install():
    code = (
        "import sys\n"
        "sys.modules.update(dict.fromkeys(('tensorflow', 'keras')))\n"
        "from tf_ooo.cli import main\n"
        "main(['worker', '--cluster', '127.0.0.1:7001,127.0.0.1:7002', '--task', '1'])\n"
    )
    ended = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False)
    assert ended.returncode != 0
    assert ended.stderr.startswith("Error: TensorFlow cannot be imported"), ended.stderr
