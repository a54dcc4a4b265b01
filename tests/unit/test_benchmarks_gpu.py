"""Tests what is read of HLO texts, and of the spans of a GPU's streams."""

from __future__ import annotations

import gzip
import subprocess
import sys

from benchmarks.gpu import run_hlo

HLO = """HloModule step, input_output_alias={ {1}: (2, {}, may-alias), {2}: (0, {}, may-alias) }, entry={}

%call.1 (p.0: f32[2]) -> f32[2] {
  ROOT %p.0 = f32[2]{0} parameter(0)
}

ENTRY %main (x: f32[4,2], y: s32[], w: f32[2]) -> (f32[], f32[2], f32[4,2]) {
  %w = f32[2]{0} parameter(2)
  %x = f32[4,2]{1,0} parameter(0)
  %y = s32[] parameter(1)
  %copy.1 = f32[2]{0} copy(%w)
}
"""


def test_parameters_of_the_step_and_what_is_fed_back():
    assert run_hlo.parameters_of(HLO) == [("float32", (4, 2)), ("int32", ()), ("float32", (2,))]
    assert run_hlo.fed_back(HLO) == [(1, 2), (2, 0)]


def test_a_way_with_flags_has_the_same_text(tmp_path):
    (tmp_path / "net_b4_xla.hlo.gz").write_bytes(gzip.compress(HLO.encode()))
    assert run_hlo.text_of(tmp_path, "net_b4", "xla@graph") == HLO


def test_launches_in_graphs_and_beside_them():
    text = """000: kCommandBuffer [a]
    001: kCustomKernel [b]
    002: kAsyncStart [c]
        003: kConvolution [d]
    004: kAsyncDone [e]
005: kConvolution [f]
000: kCommandBuffer [g]
    006: kCopy [h]
"""
    assert run_hlo.counts_of(text) == (4, 3, 2)


def test_streams_side_by_side():
    assert run_hlo.side_by_side([(0.0, 2.0), (1.0, 3.0), (5.0, 6.0)]) == (4.0, 1.0)
    assert run_hlo.side_by_side([]) == (0.0, 0.0)


def test_neither_tensorflow_nor_keras_is_needed():
    """The machine with the card has JAX alone."""
    without = "sys.modules.update(dict.fromkeys(('tensorflow', 'keras', 'tf_keras')))"
    code = f"import sys; {without}; from benchmarks.gpu import run_hlo"
    subprocess.run([sys.executable, "-c", code], check=True)
