"""Files of models whose weights are on other devices."""

from __future__ import annotations

import os
import socket
import subprocess
from pathlib import Path

import pytest

from tf_ooo.fit import guard
from tf_ooo.fit.guard import replacing


def writing(text, error=None):
    """Empties the file first, as Keras does."""

    def save(filepath, overwrite=True, more=None):
        with open(filepath, "w") as file:
            file.write(text)
            if error is not None:
                raise error
        return more

    return replacing(save)


@pytest.mark.parametrize("name", ["model.keras", "model.weights.h5"])
def test_a_file_gives_way_when_the_new_one_is_whole(tmp_path, name):
    path = tmp_path / name
    assert writing("first")(path, more=7) == 7
    path.chmod(0o640)
    assert writing("second")(str(path), True) is None
    assert path.read_text() == "second"
    assert path.stat().st_mode & 0o777 == 0o640
    with pytest.raises(RuntimeError, match="lost"):
        writing("thi", RuntimeError("lost"))(filepath=path)
    assert path.read_text() == "second"
    assert os.listdir(tmp_path) == [name]


def test_links_lead_to_the_file_that_is_replaced(tmp_path):
    path, link = tmp_path / "model_1.keras", tmp_path / "last.keras"
    path.write_text("first")
    link.symlink_to(path)
    writing("second")(link)
    assert link.is_symlink()
    assert path.read_text() == "second"


def test_what_is_no_file_of_keras_is_left_to_keras(tmp_path):
    """Another format, what is not on a disk, and a file about which Keras asks whether to overwrite it."""
    seen = []
    save = replacing(lambda path, overwrite=True: seen.append(path))
    kept, other = tmp_path / "kept.keras", tmp_path / "other.txt"
    kept.touch(), other.touch()
    lost = tmp_path / "no folder" / "new.keras"
    for path in (lost, "gs://bucket/new.keras", other, tmp_path):
        save(path)
    save(kept, overwrite=False)
    save(kept, False)
    assert seen == [lost, "gs://bucket/new.keras", other, tmp_path, kept, kept]


def test_a_new_file_has_its_name_when_it_is_whole(tmp_path):
    path = tmp_path / "1.keras"
    seen = []

    def save(filepath, overwrite=True):
        with open(filepath, "w") as file:
            file.write("half")
            seen.append(path.exists())
            raise RuntimeError("lost")

    with pytest.raises(RuntimeError, match="lost"):
        replacing(save)(path)
    assert seen == [False]
    assert os.listdir(tmp_path) == []
    writing("whole")(path, False)  # nothing to ask about
    assert path.read_text() == "whole"


def test_what_a_killed_process_left_goes_with_the_next_saving(tmp_path):
    """A file of another host, or of a process that runs, stays."""
    host, path = socket.gethostname(), tmp_path / "{epoch}[1].keras"
    dead = subprocess.Popen(["true"])
    dead.wait()
    left = tmp_path / f".{host}.{dead.pid}.{path.name}"
    kept = [tmp_path / f".{host}.1.{path.name}", tmp_path / f".elsewhere.{dead.pid}.{path.name}"]
    for file in (left, *kept):
        file.touch()
    writing("whole")(path)
    assert {file.name for file in tmp_path.iterdir()} == {path.name, *(file.name for file in kept)}


def exporting(files):
    def export(filepath, error=None):
        for name, text in files.items():
            file = Path(filepath) / name
            file.parent.mkdir(parents=True, exist_ok=True)
            file.write_text(text)
        if error is not None:
            raise error

    return replacing(export)


def files_of(folder):
    return {str(f.relative_to(folder)): f.read_text() for f in folder.rglob("*") if f.is_file()}


@pytest.mark.parametrize("exchanges", [True, False])
def test_a_folder_gives_way_when_the_new_one_is_whole(tmp_path, monkeypatch, exchanges):
    if not exchanges:  # as on a system that cannot do both at once
        monkeypatch.setattr(guard.ctypes, "CDLL", lambda name: None)
    path = tmp_path / "exported"
    exporting({"saved_model.pb": "first", "variables/data": "first"})(path)
    (path / "more").mkdir()
    (path / "more" / "notes").write_text("mine")
    (path / "labels.txt").write_text("mine")
    with pytest.raises(RuntimeError, match="full"):
        exporting({"saved_model.pb": "secon"})(path, error=RuntimeError("full"))
    assert files_of(path)["saved_model.pb"] == "first"
    exporting({"saved_model.pb": "second", "variables/data": "second"})(str(path))
    of_somebody_else = {"more/notes": "mine", "labels.txt": "mine"}
    assert files_of(path) == {"saved_model.pb": "second", "variables/data": "second", **of_somebody_else}
    assert os.listdir(tmp_path) == ["exported"]


def test_a_folder_is_not_taken_for_a_file(tmp_path):
    path = tmp_path / "exported"
    (path / "inside").mkdir(parents=True)

    def export(filepath):
        Path(filepath).write_text("onnx")

    with pytest.raises(IsADirectoryError):
        replacing(export)(path)
    assert (path / "inside").is_dir()
    assert os.listdir(tmp_path) == ["exported"]
