"""Only some TensorFlows are supported; tests/graph/test_versions.py has what is said for others."""

from __future__ import annotations

import tensorflow as tf

from grappler_passes.compat import releases


def test_major_minor():
    assert releases.major_minor("2.22.0-rc1") == (2, 22)


def test_a_reason_is_news_once(monkeypatch, caplog):
    monkeypatch.setattr(releases, "_said", set())
    monkeypatch.setattr(tf, "__version__", "2.14.1")
    reason = releases.why_unsupported()
    assert reason == "TensorFlow 2.14.1 is not supported; pip install 'tensorflow>=2.15,<2.22'"
    releases.say_at_import()
    releases.say_at_import()
    assert [record.getMessage() for record in caplog.records] == [f"nothing is rewritten: {reason}"]
    assert not releases.is_news(reason)
    assert releases.is_news("another reason")
    assert releases.is_news("another reason")
