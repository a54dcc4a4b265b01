from __future__ import annotations

from click.testing import CliRunner

from tf_ooo.cli import main


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
