"""Tests what XLA's dumps say of a compiled step.

``tests/golden/xla``: an MLP of four layers of 512 and one of 10, batch 8, Adam, compiled for an H100 by the
compiler of TensorFlow 2.21's GPU wheel: as Keras has it, and with its dW on a side stream.
"""

from __future__ import annotations

from pathlib import Path

import pytest

from tf_ooo.compat import xla
from tf_ooo.modes.compiled.session import CompiledModule, read_dump, read_thunks, watched

GOLDEN = Path(__file__).parents[1] / "golden" / "xla"


def test_the_stock_step_is_one_graph():
    assert read_dump(GOLDEN / "stock") == CompiledModule(38, 38, 1, 0, 13822040)


def test_streams_leave_the_graphs():
    found = read_dump(GOLDEN / "streams")
    assert found == CompiledModule(39, 20, 2, 8, 17057904)
    assert found.share_in_graphs == pytest.approx(20 / 39)
    assert found.text == "20 of 39 kernels (51%) in 2 CUDA graphs, 8 on side streams; 17.06 MB"


def test_what_follows_a_body_is_on_the_main_stream():
    """By hand: a graph of two, a call of two, two kernels outside, a graph of one, a copy outside."""
    text = """000: kCommandBuffer
    001: kKernel	, kernel = a
    002: kCopy

003: kWaitForStreams
000: kSequential    	  004: kKernel	, kernel = b
  005: kGemm

006: kKernel        	, kernel = c
007: kConvolution
000: kCommandBuffer
    008: kKernel	, kernel = d
009: kCopy
"""
    assert read_thunks(text) == CompiledModule(launches=8, in_graphs=3, graphs=2, on_side_streams=2)


NEWER = """000: kCommandBuffer [source       | next=006 (1) ] 
    001: kCustomKernel [source        | next=002 (1) ] a grid: [1, 1, 1] threads: [1, 1, 1]
    002: kAsyncStart   [prev=001 (1)  | next=005 (1) ] stream=computation_stream[1], async_id=2
        003: kCustomKernel [source | sink] b grid: [64, 1, 1] threads: [64, 1, 1]
    004: kCopy         [prev=001 (1)  | sink         ] kCopy
    005: kAsyncDone    [source        | sink         ] async_id=2
006: kConvolution   [prev=000 (1) | next=007 (2) ] kConvolution
007: kAsyncStart    [prev=006 (1) | next=018 (18)] stream=computation_stream[1], async_id=7
    008: kConvolution  [source       | next=009 (1)] kConvolution
    009: kCustomKernel [prev=008 (1) | sink        ] c grid: [64, 1, 1] threads: [64, 1, 1]
010: kWhile         [prev=006 (1) | next=018 (1)]
condition:
    011: kCustomKernel [source | sink] loop_compare_fusion grid: [1, 1, 1] threads: [1, 1, 1]
  body:
    000: kCommandBuffer [source | sink] 
        012: kCustomKernel [source | sink] d grid: [1, 1, 1] threads: [1, 1, 1]
    013: kConvolution  [source | sink] kConvolution
014: kAsyncStart    [prev=006 (1) | next=018 (18)] stream=computation_stream[2], async_id=14
    000: kCommandBuffer [source | sink] 
        015: kCustomKernel [source | sink] e grid: [1, 1, 1] threads: [1, 1, 1]
    016: kConvolution  [source | sink] kConvolution
017: kAsyncDone     [source       | sink         ] async_id=14
018: kAsyncDone     [source       | sink         ] async_id=7
"""


def test_newer_xla_nests_what_is_in_a_call():
    """By hand: a, b, the copy, d and e are in graphs; 008, c, e and 016 on side streams, b is not."""
    assert read_thunks(NEWER) == CompiledModule(launches=11, in_graphs=5, graphs=3, on_side_streams=4)


def test_newer_xla_writes_no_passes_that_change_nothing_and_bytes_by_space(tmp_path):
    (tmp_path / "module_1.step.thunk_sequence.txt").write_text(NEWER)
    report = "Memory Space: default (color=0)\nTotal bytes: 4453276 (4.25MiB)\n\n"
    (tmp_path / "module_1.step.memory-usage-report.txt").write_text(report + report.replace("445", "111"))
    assert read_dump(tmp_path) == CompiledModule(11, 5, 3, 4, 4453276 + 1113276)


def test_nothing_was_written(tmp_path):
    assert read_dump(tmp_path) is None
    assert CompiledModule().share_in_graphs is None
    assert CompiledModule(total_bytes=2_000_000).text == "2 MB"


def test_the_users_own_dump_goes_where_they_said(monkeypatch, tmp_path):
    monkeypatch.setattr(xla, "flags_of_process", lambda: f"--xla_dump_to={tmp_path}")
    with watched() as watch:
        pass
    assert watch.module is None
