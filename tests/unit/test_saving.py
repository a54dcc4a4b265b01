"""Files of models whose weights are on other devices."""

from __future__ import annotations

import os

import pytest

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
    """A new file, another format, and a file that is not to be overwritten, which Keras asks about."""
    seen = []
    save = replacing(lambda path, overwrite=True: seen.append(path))
    kept, other = tmp_path / "kept.keras", tmp_path / "other.txt"
    kept.touch(), other.touch()
    for path in (tmp_path / "new.keras", other, tmp_path):
        save(path)
    save(kept, overwrite=False)
    save(kept, False)
    assert seen == [tmp_path / "new.keras", other, tmp_path, kept, kept]
