"""Costs of stages from traces of torch.profiler, written here as torch 2.14 writes them."""

from __future__ import annotations

import json

import pytest
from click.testing import CliRunner

from tf_ooo.cli import main
from tf_ooo.costs.torch_trace import load_costs
from tf_ooo.errors import CostError


def event(name, start, duration, cat="user_annotation", **args):
    return {
        "ph": "X",
        "cat": cat,
        "name": name,
        "pid": 7,
        "tid": 7,
        "ts": start,
        "dur": duration,
        "args": args,
    }


def action(name, start, duration, waits=0.0):
    """A range that waits for a message first, and then has two ops."""
    half = (duration - waits) / 2
    return [
        event(name, start, duration),
        event("aten::addmm", start + waits, half, "cpu_op"),
        event("aten::relu", start + waits + half, half, "cpu_op"),
    ]


def write(folder, rank, *ranges):
    events = [{"ph": "M", "name": "process_name", "pid": 7, "args": {}}, *sum(ranges, [])]
    path = folder / f"rank{rank}.pt.trace.json"
    path.write_text(json.dumps({"schemaVersion": 1, "traceEvents": events}))
    return path


def seconds_of(table):
    """Return F, dO and dW of all stages, one after the other."""
    return [
        of for layer in table.layers for of in (layer.forward_s, layer.output_grad_s, layer.weight_grad_s)
    ]


def test_medians_of_each_stage_and_kind_without_what_is_waited(tmp_path):
    """Torch's I of the first stage does nothing: the range has no op."""
    first = [event("PP:0I0", 20, 1), event("PP:0SEND_F0", 25, 9), event("c10d::send", 26, 2, "cpu_op")]
    write(tmp_path, 0, action("PP:0F0", 0, 10), first, action("PP:0W0", 40, 14))
    runs = [action(f"PP:1F{m}", 100 * m, duration, waits=3) for m, duration in enumerate((13, 15, 90))]
    write(tmp_path, 1, *runs, action("PP:1I0", 400, 8, waits=2), action("PP:1W0", 500, 7))
    table = load_costs(tmp_path)
    assert seconds_of(table) == pytest.approx([10e-6, 0.0, 14e-6, 12e-6, 6e-6, 7e-6])
    assert [layer.name for layer in table.layers] == ["stage0", "stage1"]
    assert table.source == "measured"
    assert len(table.assumptions) == 1


def test_a_whole_backward_pass_is_halved_and_that_is_said(tmp_path):
    ranges = [action("PP:0F0", 0, 10), action("PP:1F0", 10, 10), action("PP:1B0", 20, 10)]
    table = load_costs(write(tmp_path, 0, *ranges, action("PP:0B0", 30, 10)))
    assert seconds_of(table) == pytest.approx([10e-6, 0.0, 10e-6, 10e-6, 5e-6, 5e-6])
    assert "half" in " ".join(table.assumptions)


def test_on_a_gpu_the_kernels_count_that_an_action_launches(tmp_path):
    """They run later than the range, and backward launches them from a thread of its own."""
    launch = {**event("cudaLaunchKernel", 22, 1, "cuda_runtime", correlation=5), "tid": 8}
    kernels = [
        event("gemm", 900, 30, "kernel", correlation=5),
        event("relu", 940, 10, "kernel", correlation=6),
        event("ncclDevKernel_SendRecv", 100, 800, "kernel", correlation=4),
    ]
    launched = [
        launch,
        event("cudaLaunchKernel", 24, 1, "cuda_runtime", correlation=6),
        event("cudaLaunchKernel", 21, 1, "cuda_runtime", correlation=4),
        event("PP:0F0", 900, 400, "gpu_user_annotation"),
    ]
    forward = [
        event("gemm", 500, 7, "kernel", correlation=1),
        event("cuLaunchKernel", 2, 1, "cuda_driver", correlation=1),
    ]
    ranges = [action("PP:0F0", 0, 10), action("PP:0B0", 20, 10), launched, kernels, forward]
    assert seconds_of(load_costs(write(tmp_path, 0, *ranges))) == pytest.approx([7e-6, 0.0, 50e-6])


@pytest.mark.parametrize(
    ("events", "words"),
    [
        ([event("Forward 0", 0, 9)], "no action of a pipeline (PP:0F0)"),
        (action("PP:1F0", 0, 9) + action("PP:1B0", 9, 9), "stage 0 has no forward or no backward; give a"),
        (action("PP:0F0", 0, 9), "stage 0 has no forward or no backward"),
        ([{"ph": "X", "name": "PP:0F0", "ts": "soon"}], "an event without ts and dur"),
    ],
)  # fmt: skip
def test_what_is_missing_is_said(tmp_path, events, words):
    path = write(tmp_path, 0, events)
    for given in (path, tmp_path):
        with pytest.raises(CostError) as error:
            load_costs(given)
        assert words in str(error.value)
        assert str(tmp_path) in str(error.value)


def test_a_file_that_is_no_trace_is_named(tmp_path):
    (tmp_path / "a.json").write_text('{"traceEvents": 3}')
    with pytest.raises(CostError, match=r"a\.json: no trace of torch\.profiler: it has no list traceEvents"):
        load_costs(tmp_path / "a.json")
    (tmp_path / "a.json").write_text("[")
    with pytest.raises(CostError, match=r"a\.json: line 1: no JSON"):
        load_costs(tmp_path)


def test_a_plan_is_made_from_a_folder_of_traces(tmp_path):
    for rank in (0, 1):
        ranges = [
            action(f"PP:{rank}F0", 0, 10),
            action(f"PP:{rank}I0", 20, 10),
            action(f"PP:{rank}W0", 40, 10),
        ]
        write(tmp_path, rank, *ranges)
    csv = tmp_path / "plan.csv"
    ask = ["plan", str(tmp_path), "--devices", "2", "--microbatches", "4", "--torch-csv", str(csv)]
    result = CliRunner().invoke(main, ask)
    assert result.exit_code == 0, result.output
    assert "a trace of torch tells seconds alone" in result.output
    assert len(csv.read_text().splitlines()) == 2
