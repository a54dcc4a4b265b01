"""Tests what is said beforehand of how long a fit takes to begin."""

from __future__ import annotations

import pytest

from tf_ooo.fit import timing


def test_more_micro_batches_take_longer_than_stock():
    few, many = (timing.micro_batches_s(2.0, count) for count in (2, 8))
    assert timing.stock_s(few, 2) < few < many
    assert timing.stock_s(few, 2) == pytest.approx(timing.stock_s(many, 8))
    assert timing.placing_s(many) < many


@pytest.mark.parametrize(
    ("one_s", "ours_s", "said"),
    [
        (0.3, 0.1, "; it pays from about 300 steps on"),
        (0.1005, 0.1, "; it pays from about 120,000 steps on"),
        (0.1, 0.1, "; no gain over one device is predicted"),
        (0.1, None, ""),
    ],
)
def test_from_how_many_steps_on_a_pipeline_pays(one_s, ours_s, said):
    assert timing.pays_from(60.0, one_s, ours_s) == said


def test_an_estimate_is_said_at_once(monkeypatch, capsys):
    monkeypatch.setattr(timing, "AFTER_S", 30.0)

    def fit(verbose, about_s):
        with timing.said("placing the step", about_s, "; it pays from about 900 steps on"):
            pass

    fit(2, 40.0)
    fit(2, 20.0)
    begun, ended = capsys.readouterr().err.splitlines()
    assert begun == "tf_ooo: placing the step, about 40 s; it pays from about 900 steps on ..."
    assert ended.startswith("tf_ooo: placing the step: 0.")
