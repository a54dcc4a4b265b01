from __future__ import annotations

import pytest
from click.testing import CliRunner
from rich.console import Console

import tf_ooo
from tf_ooo.cli import demo_run, main


def test_info():
    result = CliRunner().invoke(main, ["info"])
    assert result.exit_code == 0, result.output
    assert "loaded for CPU" in result.output


def test_demo(tmp_path, monkeypatch):
    # A checkout in the folder that it is called from is not what was installed.
    (tmp_path / "tf_ooo").mkdir()
    (tmp_path / "tf_ooo" / "__init__.py").write_text("raise ImportError('nothing is compiled here')")
    monkeypatch.chdir(tmp_path)
    result = CliRunner().invoke(main, ["demo", "--epochs", "1", "--out", str(tmp_path)])
    assert result.exit_code == 0, result.output
    emulated, real = result.output.split("This machine's own device")
    assert "times as fast as 1F1B, with the same bits" in emulated
    assert [emulated.count(f"device {number} ") for number in (1, 2, 3, 4)] == [3, 2, 2, 2]
    assert "weights bit-equal" in real
    assert (tmp_path / "report.html").exists()


def test_out_is_a_file(tmp_path):
    path = tmp_path / "file"
    path.write_text("")
    result = CliRunner().invoke(main, ["demo", "--out", str(path)])
    assert result.exit_code == 1
    assert "is a file" in result.output


def test_demo_says_that_the_report_was_not_written(tmp_path, monkeypatch, capsys):
    file = tmp_path / "file"
    file.write_text("")
    monkeypatch.setattr(demo_run, "train", lambda *_: ({"loss": [1.0], "accuracy": [0.5]}, []))
    with pytest.raises(tf_ooo.BackendError, match="no report was written.*--out"):
        demo_run.run_real(Console(soft_wrap=True), file / "below", 1, "auto")
    assert "report:" not in capsys.readouterr().out
    demo_run.run_real(Console(soft_wrap=True), tmp_path / "new", 1, "auto")
    assert "report.html" in capsys.readouterr().out
