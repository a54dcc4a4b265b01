"""Tests what XLA's dumps say of a compiled step.

``tests/golden/xla``: an MLP of four layers of 512 and one of 10, batch 8, Adam, compiled for an H100 by the
compiler of TensorFlow 2.21's GPU wheel: as Keras has it, and with its dW on a side stream.
"""

from __future__ import annotations

from pathlib import Path

import pytest

from tf_ooo.compat import xla_flags
from tf_ooo.modes.compiled.captured import CompiledModule, read_dump, read_thunks, watched

GOLDEN = Path(__file__).parents[1] / "golden" / "xla"


def test_the_stock_step_is_one_graph():
    assert read_dump(GOLDEN / "stock") == CompiledModule(38, 38, 1, 0, 13822040)


def test_streams_leave_the_graphs():
    found = read_dump(GOLDEN / "streams")
    assert found == CompiledModule(39, 20, 2, 8, 17057904)
    assert found.share_in_graphs == pytest.approx(20 / 39)
    assert found.text() == "20 of 39 kernels (51%) in 2 CUDA graphs, 8 on side streams; 17.06 MB"


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


def test_nothing_was_written(tmp_path):
    assert read_dump(tmp_path) is None
    assert CompiledModule().share_in_graphs is None
    assert CompiledModule(total_bytes=2_000_000).text() == "2 MB"


def test_the_users_own_dump_goes_where_they_said(monkeypatch, tmp_path):
    monkeypatch.setattr(xla_flags, "flags_of_process", lambda: f"--xla_dump_to={tmp_path}")
    with watched() as watch:
        pass
    assert watch.module is None
