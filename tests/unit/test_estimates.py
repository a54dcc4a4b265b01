"""Tests what is said beforehand of how long a fit takes to begin."""

from __future__ import annotations

import pytest

from tf_ooo.fit import estimates, progress


def test_more_micro_batches_take_longer_than_stock():
    few, many = (estimates.micro_batches_s(2.0, count) for count in (2, 8))
    assert estimates.stock_s(few, 2) < few < many
    assert estimates.stock_s(few, 2) == pytest.approx(estimates.stock_s(many, 8))
    assert estimates.placing_s(many) < many


@pytest.mark.parametrize(
    ("one_s", "ours_s", "said"),
    [
        (0.3, 0.1, "; it pays from about 300 steps on"),
        (0.1005, 0.1, "; it pays from about 120,000 steps on"),
        (0.1, 0.1, "; one device is predicted to be as fast"),
        (0.0, 0.1, ""),
        (0.1, None, ""),
    ],
)
def test_from_how_many_steps_on_a_pipeline_pays(one_s, ours_s, said):
    assert estimates.pays_from(60.0, one_s, ours_s) == said


def test_an_estimate_is_said_at_once(monkeypatch, capsys):
    monkeypatch.setattr(progress, "AFTER_S", 0.05)

    def fit(verbose):
        with progress.said("placing the step", 40.0, "; it pays from about 900 steps on"):
            pass

    def shorter(verbose):
        with progress.said("placing the step", 0.01):
            pass

    fit(verbose=2)
    shorter(verbose=2)
    begun, ended = capsys.readouterr().err.splitlines()
    assert begun == "tf_ooo: placing the step, about 40 s; it pays from about 900 steps on ..."
    assert ended.startswith("tf_ooo: placing the step: 0.")
