"""Parts of the XLA mode that need no compiler: gains, the order of launches, plans."""

from __future__ import annotations

import pytest

from tests import hlo_order
from tf_ooo.costs.table import GainTable
from tf_ooo.errors import CostError, OptionsError
from tf_ooo.modes.by_name import Options
from tf_ooo.modes.compiled import planning
from tf_ooo.modes.compiled.measuring import in_order
from tf_ooo.planning.model.schedule import Schedule, Task, TaskList

SCHEDULED = """HloModule m, is_scheduled=true

%body (p: f32[2]) -> f32[2] {
  %p = f32[2]{0} parameter(0)
}

ENTRY %main (a: f32[2]) -> f32[2] {
  %a = f32[2]{0} parameter(0)
  %gemm = f32[2]{0} fusion(%a), kind=kCustom, calls=%body
  %start = ((f32[2]{0}), f32[2]{0}) async-start(%gemm), frontend_attributes={_xla_stream_annotation="2"}, \
metadata={op_name="dW_3"}
  %next = f32[2]{0} fusion(%gemm), kind=kLoop, calls=%body
  %convolution = (f32[2]{0}, u8[0]{0}) custom-call(%next), custom_call_target="__cudnn$conv"
  %view = f32[2]{0} get-tuple-element(%convolution), index=0
  %done = f32[2]{0} async-done(%start), metadata={op_name="dW_3"}
  ROOT %sum = f32[2]{0} fusion(%done, %view), kind=kLoop, calls=%body
}
"""


class TestOrder:
    def test_launches_of_the_entry_only(self):
        order = hlo_order.launches(SCHEDULED)
        kinds = [(launch.kind, launch.name) for launch in order]
        assert kinds == [
            ("kernel", "gemm"), ("start", "dW_3"), ("kernel", "next"), ("kernel", "convolution"),
            ("done", "dW_3"), ("kernel", "sum"),
        ]  # fmt: skip
        assert order[1].stream == 2

    def test_what_runs_beside_a_call(self):
        assert hlo_order.beside(hlo_order.launches(SCHEDULED)) == {"dW_3": 2}


class TestGains:
    def test_saved_and_loaded(self, tmp_path):
        table = GainTable({("dO:2", 3): 1e-5, ("F:0", 1): -2e-6}, "a GPU", ("edited",))
        assert GainTable.load(table.save(tmp_path / "gains.json")) == table

    def test_what_was_measured_beside_the_gains(self, tmp_path):
        table = GainTable(
            {("dO:2", 3): 1e-5, ("F:0", 1): 2e-6}, alone_s={"dW:3": 1e-4, "F:0": 0.0},
            calculated=frozenset({("F:0", 1)}), launch_s=2e-6,
        )  # fmt: skip
        text = table.save(tmp_path / "gains.json").read_text()
        assert text.count('"measured": false') == 1
        assert GainTable.load(tmp_path / "gains.json") == table

    @pytest.mark.parametrize(
        ("more", "said"),
        [({"alone_s": {"U:1": 1.0}}, "alone_s must name"), ({"alone_s": {"dW:1": -1.0}}, "alone_s of dW:1"),
         ({"launch_s": float("nan")}, "launch_s"), ({"launch_s": True}, "launch_s")],
    )  # fmt: skip
    def test_wrong_measurements(self, more, said):
        with pytest.raises(CostError, match=said):
            GainTable({}, **more)

    def test_the_best_pair_of_each_dw_is_measured_first(self):
        calculated = {("dO:1", 2): 3.0, ("dO:0", 2): 2.5, ("dO:0", 1): 1.0, ("F:0", 1): 2.0, ("F:0", 2): 2.5}
        assert in_order(calculated) == [
            ("dO:1", 2), ("F:0", 1), ("F:0", 2), ("dO:0", 1), ("dO:0", 2),
        ]  # fmt: skip

    @pytest.mark.parametrize(
        ("key", "saved_s", "said"),
        [
            (("dW:2", 3), 1.0, "region must be"),
            (("dO:2", -1), 1.0, "layer must be"),
            (("dO:2", 3), float("nan"), "must be finite"),
        ],
    )
    def test_wrong_entries(self, key, saved_s, said):
        with pytest.raises(CostError, match=said):
            GainTable({key: saved_s})

    @pytest.mark.parametrize(
        ("text", "said"),
        [
            ("{", "no JSON"),
            ("[]", "version must be 1"),
            ('{"version": 1, "gains": 3}', "expected a list"),
            ('{"version": 1, "gains": [{"region": "dO:1"}]}', "entry 0 must have"),
            (
                '{"version": 1, "gains": [{"region": "dO:1", "layer": 2, "saved_s": 1},'
                ' {"region": "dO:1", "layer": 2, "saved_s": 2}]}',
                "there twice",
            ),
        ],
    )
    def test_wrong_files_are_named(self, tmp_path, text, said):
        path = tmp_path / "gains.json"
        path.write_text(text)
        with pytest.raises(CostError, match=said) as raised:
            GainTable.load(path)
        assert str(path) in str(raised.value)

    def test_missing_file(self, tmp_path):
        with pytest.raises(CostError, match="cannot be read"):
            GainTable.load(tmp_path / "none.json")


class TestPlans:
    def test_side_lane_is_dealt_out_with_updates(self):
        side = [Task(kind, layer) for layer in (3, 2, 1) for kind in ("dW", "U")]
        made = planning.dealt_out(
            Schedule("single_device", "x", {(0, 0): TaskList([]), (0, 1): TaskList(side)}), 2
        )
        assert [str(task) for task in made.lanes[0, 1]] == ["dW:3", "U:3", "dW:1", "U:1"]
        assert [str(task) for task in made.lanes[0, 2]] == ["dW:2", "U:2"]

    def test_one_stream_changes_nothing(self):
        dealt = Schedule("single_device", "x", {(0, 1): TaskList([Task("dW", 1)])})
        assert planning.dealt_out(dealt, 1) is dealt


class TestOptions:
    @pytest.mark.parametrize(
        "wrong",
        [
            {"streams": 0},
            {"any_platform": 1},
            {"store_activations": "some"},
            {"gains": 3},
            {"measure_gains_s": -1},
            {"measure_gains_s": True},
            {"measure_gains_s": 3, "gains": "g.json"},
        ],
    )
    def test_are_checked(self, wrong):
        with pytest.raises(OptionsError, match=next(iter(wrong))):
            Options(**wrong)

    def test_multi_stream_is_of_one_device(self):
        with pytest.raises(OptionsError, match="multi_stream"):
            Options(mode="data_parallel", schedule="multi_stream")
