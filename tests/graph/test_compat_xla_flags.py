"""XLA's flags: what an upgrade breaks."""

from __future__ import annotations

import pytest
import tensorflow as tf

from tests.zoo import needs_xla_streams
from tf_ooo.compat import xla
from tf_ooo.errors import BackendError
from tf_ooo.modes.compiled.session import watched


@needs_xla_streams
class TestFlags:
    """Flags of XLA for one compilation; a failure: the two functions are gone, or TensorFlow copies flags."""

    def compiled(self, number):
        run = tf.function(lambda x: x @ x + number, jit_compile=True)
        return run(tf.ones((2, 2)))

    def test_they_can_be_changed(self):
        assert xla.why_flags_are_fixed() is None

    def test_they_hold_inside_and_are_gone_behind(self, tmp_path):
        before = xla.flags_of_process()
        with xla.added([f"--xla_dump_to={tmp_path}"]):
            self.compiled(1.0)
        written = len(list(tmp_path.iterdir()))
        assert written
        self.compiled(2.0)
        assert len(list(tmp_path.iterdir())) == written
        assert xla.flags_of_process() == before

    def test_flags_of_the_process_hold_again(self, tmp_path):
        users, ours = tmp_path / "users", tmp_path / "ours"
        with xla.added([f"--xla_dump_to={users}"]):
            with xla.added([f"--xla_dump_to={ours}"]):
                self.compiled(3.0)
            assert not users.exists()
            self.compiled(4.0)
            assert users.exists()

    def test_a_failure_inside_puts_them_back(self):
        before = xla.flags_of_process()
        with pytest.raises(KeyError), xla.added(["--xla_dump_hlo_as_text"]):
            raise KeyError
        assert xla.flags_of_process() == before

    def test_where_they_are_fixed(self, monkeypatch):
        monkeypatch.setattr(xla, "_LIBRARIES", ("libnothing.so",))
        assert "does not export" in xla.why_flags_are_fixed()
        raises = pytest.raises(BackendError, match="--xla_dump_hlo_as_text: this TensorFlow")
        with raises, xla.added(["--xla_dump_hlo_as_text"]):
            pass

    def test_what_was_compiled_says_its_bytes(self):
        with watched() as watch:
            self.compiled(5.0)
        assert watch.module is not None
        assert watch.module.total_bytes >= 2 * 16, "the report of XLA's memory use has another form"
