from __future__ import annotations

import pytest
from click.testing import CliRunner

import tf_ooo
from tf_ooo.cli import demo_run, main


def test_info():
    result = CliRunner().invoke(main, ["info"])
    assert result.exit_code == 0, result.output
    assert "loaded for CPU" in result.output


def test_demo(tmp_path):
    result = CliRunner().invoke(main, ["demo", "--epochs", "1", "--out", str(tmp_path)])
    assert result.exit_code == 0, result.output
    assert "weights bit-equal" in result.output
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
        demo_run.run_demo(file / "below", 1, "auto")
    assert "report:" not in capsys.readouterr().out
    demo_run.run_demo(tmp_path / "new", 1, "auto")
    assert "report.html" in capsys.readouterr().out
