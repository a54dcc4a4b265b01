"""Random set-ups on two ranks, in an order of ours beside stock Horovod.  `make fuzz` runs others."""

from __future__ import annotations

import os
import signal

import pytest

from tests.fuzz.drawing import cases, drawn
from tests.fuzz.program import program
from tests.fuzz.running import GOOD, run
from tests.fuzz.setups import Output, Ranks, Setup
from tests.fuzz.several import setting_of
from tests.harness.children import Children, Outcome
from tests.zoo import needs_keras_3

pytest.importorskip("horovod", reason="Horovod is not installed; run: make horovod")
pytestmark = [needs_keras_3, pytest.mark.takes(40)]


def with_horovod(number):
    return pytest.param(number, marks=pytest.mark.ranks(2), id=f"{number}")


def with_both(number):
    return pytest.param(number, marks=pytest.mark.ranks(2, "both"), id=f"{number}")


@pytest.mark.parametrize("number", [with_horovod(1), with_horovod(3), with_both(21), with_both(22)])
def test_the_bits_of_stock_horovod(number):
    setup = drawn(number, "data_parallel")
    outcome = run(setup)
    assert outcome.kind == GOOD, f"{outcome.text}\n{program(setup)}"


def small(ranks):
    lines = ("input_0 = h = keras.Input((7,))", 'h = layers.Dense(units=5, activation="tanh")(h)')
    values = 'random.normal(size=(rows, {})).astype("float32")'
    output = Output("keras.losses.MeanSquaredError()", values.format(3))
    sgd = "keras.optimizers.SGD(learning_rate=0.02)"
    return Setup(5, lines, (values.format(7),), (output,), sgd, ranks=ranks)


@pytest.fixture
def averages_are_wrong(monkeypatch):
    from tf_ooo.hosts.ranks.horovod_engine import HorovodEngine

    combine = HorovodEngine.combine

    def wrong(self, *arguments):
        return combine(self, *arguments) * (1.0001 + 1e-4 * self.rank)

    monkeypatch.setattr(HorovodEngine, "combine", wrong)


@pytest.mark.ranks(2)
def test_a_planted_fault_is_found_on_both_ranks(averages_are_wrong):
    outcome = run(small(Ranks(schedule="reverse_first_k", k=1)))
    assert outcome.kind == "not the same bits"
    assert "kernel" in outcome.text


def test_minimal_keeps_the_option_that_matters():
    def has_fault(setup):
        return "compression='fp16'" in program(setup) and "clipnorm" in program(setup)

    number = next(n for n in range(10**6) if has_fault(drawn(n, "data_parallel")))
    smallest = cases("data_parallel").minimal(number, has_fault)
    assert smallest.ranks == Ranks(smallest.ranks.launch, compression="fp16")
    assert smallest.steps_per_execution == 1
    assert "horovodrun -np 2 " in program(smallest).splitlines()[0]


def dies_or_hangs(setup):
    if os.environ["HOROVOD_RANK"] == "1":
        if setup.number == 1:
            os.kill(os.getpid(), signal.SIGKILL)
        if setup.number == 2:
            signal.pause()
    return Outcome(GOOD)


def test_a_rank_that_dies_or_hangs_is_a_failure_and_the_next_set_up_runs():
    children = Children(
        dies_or_hangs,
        lambda setup: setting_of(setup.ranks, 0),
        limit_s=lambda setup: 1.0 if setup.number == 2 else 200.0,
    )
    outcomes = [children.run(drawn(number, "data_parallel")) for number in range(4)]
    children.close()
    assert [outcome.kind for outcome in outcomes] == [GOOD, "dies", "hangs", GOOD]
    assert "SIGKILL" in outcomes[1].text


@pytest.mark.ranks(2)
@pytest.mark.parametrize("number", [3, 65, 423])  # the last one's train_step is a tf.function, under auto
def test_what_users_write_themselves_has_the_bits_of_stock_horovod(number):
    from tests.fuzz.kinds.drawing import drawn
    from tests.fuzz.kinds.judging import run

    setup = drawn(number, "data_parallel")
    outcome = run(setup)
    assert outcome.kind == GOOD, f"{setup}: {outcome.text}"
