from __future__ import annotations

import contextlib
import itertools
import pathlib

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tf_ooo.costs.layer_costs import LayerCosts, Link
from tf_ooo.errors import MemoryLimitError, OptionsError
from tf_ooo.planning.building import step_model
from tf_ooo.planning.building.search_order import best_order
from tf_ooo.planning.building.step_model import StepModel
from tf_ooo.planning.model.problem import Problem
from tf_ooo.planning.model.schedule import Schedule, Task
from tf_ooo.planning.policies import search
from tf_ooo.planning.simulation.simulator import simulate, validate
from tf_ooo.rewriting.plan import plan

GOLDEN = pathlib.Path(__file__).parent.parent / "golden"
# F, dO, dW, U seconds; with 2 workers and 1 byte/s an allreduce of n bytes takes n seconds.
HAND = [
    LayerCosts(1, 2, 3, 0.5, weight_bytes=4, activation_bytes=10),
    LayerCosts(2, 3, 1, 0.5, weight_bytes=6, activation_bytes=20),
    LayerCosts(4, 5, 2, 0.5, weight_bytes=5, activation_bytes=40),
]
LINK = Link(0.0, 1.0)


def period_s(schedule, layers=HAND, link=LINK):
    return simulate(schedule, layers, link, steps=4).steady_step_s


def planned(policy, layers=HAND, link=LINK, **options):
    return plan(layers=layers, schedule=policy, devices=2, link=link, mode="data_parallel", **options)


def test_stock_by_hand():
    # Backward 0..16: dW2 ends at 7, dW1 at 11, dW0 at 16.  Link: 7-12, 12-18, 18-22.  U0 ends at 22.5,
    # all updates are done then, forward takes 7.
    assert period_s(planned("in_order")) == 29.5


def test_no_barrier_by_hand():
    # It is as before, but F0 waits for U0 at 22.5 anyway: layer 0 is communicated last.
    assert period_s(planned("in_order", barrier=False)) == 29.5


def test_barrier_costs_what_it_must():
    # k=3: dO end at 10, dW0 13, dW1 14, dW2 16.  Link: 13-17, 17-23, 23-28; updates 17.5, 23.5, 28.5.
    # Without a barrier: F0 17.5-18.5, F1 23.5-25.5, F2 28.5-32.5.  With one: 28.5 + 7 = 35.5.
    free = planned("reverse_first_k", k=3)
    assert period_s(free) == 32.5
    text = free.to_text().replace("workers 2\n", "workers 2\nbarrier yes\n")
    held = Schedule.from_text(text)
    assert held.barrier
    assert Schedule.from_text(held.to_text()) == held
    assert period_s(held) == 35.5


def test_reverse_first_k_by_hand():
    # k=1: dO2 5 dW2 7 dO1 10 dW1 11 dO0 13 dW0 16: the stock order.  k=2: dO2 5 dW2 7 dO1 10 dO0 12
    # dW0 15 dW1 16; link: comm2 7-12, comm0 15-19, comm1 19-25; F0 19.5-20.5, F1 25.5-27.5, F2 31.5.
    assert period_s(planned("reverse_first_k", k=2)) == 31.5
    assert planned("reverse_first_k").predicted_step_s == 29.5


def test_reverse_first_k_orders():
    schedule = planned("reverse_first_k", k=2)
    words = " ".join(map(str, schedule.lanes[0, 0][3:]))
    assert words == "dO:2 dW:2 dO:1 dO:0 dW:0 dW:1"
    assert " ".join(map(str, schedule.lanes[0, 1])) == "comm:2 comm:0 comm:1"


def test_slices_by_hand():
    """An urgent gradient waits for a slice, not for the whole large one; each slice pays the latency."""
    layers = [LayerCosts(1, 1, 1, weight_bytes=4), LayerCosts(10, 2, 2, weight_bytes=40)]
    # dO1 2, dW1 4, dO0 5, dW0 6.  Whole: comm1 4-44, comm0 44-48, forward 48 + 11.
    whole = search.make(Problem(tuple(layers), 2, 1, LINK, None, {"slice_bytes": 0, "evaluations": 1}))
    # Or comm0 first: dO1 2, dO0 3, dW0 4, comm0 4-8; dW1 6: comm1 8-48, F0 8-9, F1 48-58.
    assert period_s(planned("search", layers, slice_bytes=0), layers) == 58
    assert period_s(whole, layers) <= 59
    # Sliced by 4: comm1 from 4 on, comm0 at the next slice boundary: all sent at 48 too, F1 48-58.
    assert period_s(planned("search", layers, slice_bytes=4), layers) == 58
    slow = Link(0.5, 1.0)
    sliced = planned("search", layers, slow, slice_bytes=4)
    # Two rounds of 0.5 s of latency for each of 11 messages: 6 or 4 for the first dW, then 44 + 11.
    assert period_s(sliced, layers, slow) == 4 + 44 + 11 + 10


def test_search_beats_every_k_by_hand():
    """dW of the middle layer first, then the lowest, then the highest: no reverse first-k is like that."""
    layers = [
        LayerCosts(3, 2, 9, weight_bytes=9),
        LayerCosts(3, 1, 1, weight_bytes=11),
        LayerCosts(1, 1, 9, weight_bytes=8),
    ]
    # dO2 1, dO1 2, dW1 3, dO0 5, dW0 14, dW2 23; link without a gap: comm1 3-14, comm0 14-23,
    # comm2 23-31; F0 23-26, F1 26-29, F2 31-32.  k=3 has comm0 first, at 13: 13 + 28 + 1 = 42.
    every_k = [period_s(planned("reverse_first_k", layers, k=k), layers) for k in range(4)]
    assert min(every_k) == 42
    assert period_s(planned("search", layers, slice_bytes=0), layers) == 32


@pytest.mark.parametrize("policy", ["in_order", "reverse_first_k", "search"])
def test_golden(policy):
    path = GOLDEN / f"data_parallel_{policy}.txt"
    options = {"slice_bytes": 2} if policy == "search" else {}
    assert planned(policy, **options).to_text() == path.read_text()


def test_options_are_checked():
    for options in ({"k": 4}, {"k": -1}, {"k": 1.5}):
        with pytest.raises(OptionsError, match="k must be"):
            planned("reverse_first_k", **options)
    for name, value in (("budget_s", -1), ("evaluations", 0), ("communication", "fast"), ("slice_bytes", -3)):
        with pytest.raises(OptionsError, match=name):
            planned("search", **{name: value})
    with pytest.raises(OptionsError, match="barrier"):
        planned("in_order", barrier=1)


def test_progress_and_budget():
    told = []
    planned("search", progress=lambda done, of, best_s: told.append((done, of, best_s)))
    assert all(done <= of for done, of, _ in told)
    assert planned("search", budget_s=0.0).predicted_step_s <= planned("reverse_first_k").predicted_step_s


def test_ordered_or_by_priority():
    assert (0, 1) not in planned("search", communication="ordered").priority_lanes
    assert (0, 1) in planned("search", communication="priority").priority_lanes


def test_memory_limit_is_kept_or_named():
    # In order: 70 of activations and 15 of weights, and gradients.
    for policy in ("reverse_first_k", "search"):
        free = planned(policy)
        with pytest.raises(MemoryLimitError) as error:
            planned(policy, memory_limit_bytes=50)
        smallest = error.value.smallest_bytes
        assert planned(policy, memory_limit_bytes=smallest).predicted_peak_bytes <= smallest
        assert free.predicted_peak_bytes >= smallest


@st.composite
def instances(draw):
    count = draw(st.integers(1, 6))
    numbers = st.integers(0, 12)
    layers = tuple(
        LayerCosts(
            draw(numbers), draw(numbers), draw(numbers), draw(st.integers(0, 3)),
            activation_bytes=draw(numbers), weight_bytes=draw(st.integers(0, 30)),
            inputs=None if draw(st.booleans()) or not layer else (layer - 1, draw(st.integers(0, layer - 1))),
        )
        for layer in range(count)
    )  # fmt: skip
    return layers, Link(draw(st.sampled_from([0.0, 0.5, 2.0])), draw(st.sampled_from([1.0, 3.0])))


def quick(layers, link, **more):
    options = {"evaluations": 150}
    return planned("search", layers, link, **options, **more)


@settings(deadline=None, max_examples=40)
@given(instances(), st.integers(0, 6), st.booleans())
def test_step_model_is_the_simulator(instance, k, sliced):
    layers, link = instance
    problem = Problem(layers, 2, 1, link)
    shares = {0: (0.5, 0.25, 0.25)} if sliced and layers[0].weight_bytes else {}
    model = StepModel(problem, shares)
    backward = step_model.order(len(layers), min(k, len(layers)))
    for order in (None, list(reversed(range(len(model.comms))))):
        expected = simulate(model.schedule("x", backward, order), layers, link, steps=5)
        assert model.run(backward, order).period_s == pytest.approx(expected.steady_step_s)


@settings(deadline=None, max_examples=20)
@given(instances())
def test_search_is_valid_and_never_worse(instance):
    layers, link = instance
    found = quick(layers, link)
    validate(found, layers)
    assert len(set(found.tasks)) == len(found.tasks)
    whole = [task for task in found.tasks if not task.part]
    needed = [Task(kind, layer) for kind in ("F", "dO", "dW", "comm", "U") for layer in range(len(layers))]
    needed = [task for task in needed if task.kind != "comm" or layers[task.stage].weight_bytes]
    assert sorted(whole) == sorted(needed)
    got = period_s(found, layers, link)
    others = [planned("in_order", layers, link), planned("in_order", layers, link, barrier=False)]
    others += [planned("reverse_first_k", layers, link, k=k) for k in range(len(layers) + 1)]
    assert got <= min(period_s(other, layers, link) for other in others) * (1 + 1e-9) + 1e-9
    compute_s = sum(cost.forward_s + cost.output_grad_s + cost.weight_grad_s for cost in layers)
    communication_s = sum(
        2 * link.latency_s + c.weight_bytes / link.bytes_per_s for c in layers if c.weight_bytes
    )
    assert got >= max(compute_s, communication_s) * (1 - 1e-9)


@settings(deadline=None, max_examples=30)
@given(instances(), st.integers(10, 200))
def test_memory_limit_holds_in_every_step(instance, limit):
    layers, link = instance
    for make in (quick, lambda *a, **o: planned("reverse_first_k", *a, **o)):
        with contextlib.suppress(MemoryLimitError):
            schedule = make(layers, link, memory_limit_bytes=limit)
            assert max(simulate(schedule, layers, link, steps=6).peak_bytes) <= limit


@settings(deadline=None, max_examples=60)
@given(st.lists(st.tuples(st.integers(0, 20), st.integers(1, 9), st.integers(0, 20)), min_size=1, max_size=5))
def test_link_order_is_optimal(jobs):
    release, seconds, tail = ([float(job[i]) for job in jobs] for i in range(3))

    def total(order):
        now, worst = 0.0, 0.0
        for job in order:
            now = max(now, release[job]) + seconds[job]
            worst = max(worst, now + tail[job])
        return worst

    best = min(map(total, itertools.permutations(range(len(jobs)))))
    assert total(best_order(release, seconds, tail, limit=10_000)) == best


def test_the_same_again():
    layers = [LayerCosts(1 + i % 3, 2, 1 + i % 2, weight_bytes=7 * (i % 4)) for i in range(20)]
    first, again = (planned("search", layers, evaluations=300) for _ in range(2))
    assert first == again
