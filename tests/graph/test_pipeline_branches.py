"""Models with branches: their layers branch by branch, stages beside each other, and the same bits."""

from __future__ import annotations

from unittest import mock

import pytest
from hypothesis import given
from hypothesis import strategies as st

from grappler_passes.graph.flow import bits_of
from tests.graph.pipeline_fits import Training, assert_equal_bits, assert_same_bits, fits_of
from tests.graph.pipeline_graphs import Rewritten
from tests.graph.pipeline_models import EVEN, X, Y, momentum, normal
from tests.zoo import keras
from tf_ooo.planning.building.stages import merged
from tf_ooo.rewriting import step_graph
from tf_ooo.rewriting.branches import Branches, depth_first

pytestmark = [pytest.mark.devices(4), pytest.mark.takes(30)]

layers = keras.layers


def tower(x, name, count, width):
    for number in range(count):
        x = layers.Dense(width, activation="relu", name=f"{name}_{number}")(x)
    return x


def two_towers():
    """A layer with weights reads both."""
    inputs = [keras.Input((7,)), keras.Input((5,))]
    towers = [tower(inputs[0], "query", 4, 19), tower(inputs[1], "item", 3, 23)]
    return keras.Model(inputs, layers.Dense(3, name="score")(layers.Concatenate()(towers)))


def product_of_towers():
    """No layer with weights follows; both read one input, and both draw random numbers."""
    inputs = keras.Input((7,))
    scaled = layers.Rescaling(0.5)(inputs)
    query, item = (layers.Dropout(0.1)(tower(scaled, name, 4, 17)) for name in ("query", "item"))
    return keras.Model(inputs, layers.Multiply()([tower(query, "left", 1, 3), tower(item, "right", 1, 3)]))


def forked():
    """Two branches begin behind common layers; one has a skip connection and one moving averages."""
    inputs = keras.Input((7,))
    x = tower(inputs, "common", 2, 17)
    left, right = tower(x, "left", 2, 17), layers.BatchNormalization(name="norm")(tower(x, "right", 3, 21))
    joined = layers.Concatenate()([layers.Add()([x, left]), right])
    return keras.Model(inputs, layers.Dense(3, name="score")(joined))


def siamese():
    inputs, towers = [keras.Input((7,)), keras.Input((7,))], []
    shared = [layers.Dense(17, activation="tanh", name=f"shared_{number}") for number in range(3)]
    for x in inputs:
        for layer in shared:
            x = layer(x)
        towers.append(x)
    return keras.Model(inputs, layers.Dense(3, name="score")(layers.Concatenate()(towers)))


def named(name, count):
    return [f"{name}_{number}" for number in range(count)]


def assert_beside(training, fits, beside):
    """Each stage depends on as few others as said, and no task reads more than its stage depends on."""
    costs = training._measured[1].layers
    number = {layer.name: place for place, layer in enumerate(costs)}
    for fitted in fits.values():
        stages = fitted.report.pipeline.stages
        upstream = []
        for stage in merged(costs, tuple((number[s.layers[0]], number[s.layers[-1]]) for s in stages)):
            upstream.append(set(stage.inputs).union(*(upstream[source] for source in stage.inputs)))
        assert Rewritten(fitted.report).unplanned(upstream) == []
        assert upstream == beside


def test_two_towers():
    """By name, by costs, on 2 and on 4 devices, and in the order by depth: all have the same bits."""
    training = Training(two_towers, momentum, ([X, normal(48, 5)], Y), epochs=3)
    usual = fits_of(training, "gpipe", "zb_v")
    names = [layer.name for layer in training._measured[1].layers]
    join = ["join before score (1)", "score"]
    assert names == [*named("item", 3), *named("query", 4), *join]
    by_hand = fits_of(
        training, "1f1b", stages=[named("item", 3), ["query_0"], named("query", 4)[1:], ["score"]]
    )
    assert_beside(training, by_hand, [set(), set(), {1}, {0, 1, 2}])
    assert by_hand["1f1b"].report.pipeline.stages[3].layers == join
    assert_same_bits(training, {**usual, **by_hand}, weights_everywhere=False)

    with mock.patch.object(step_graph, "branch_by_branch", lambda graph, *_: Branches(graph)):
        by_depth = fits_of(training, "1f1b", measured_before=False)["1f1b"]
    assert {layer.name for layer in training._measured[1].layers[:2]} == {"item_0", "query_0"}
    for other in (by_depth, fits_of(training, "1f1b", measured_before=False, devices=2)["1f1b"]):
        assert_equal_bits(usual["gpipe"].weights, other.weights)
        assert_equal_bits(usual["gpipe"].state, other.state)


def test_what_joins_branches_is_a_layer_without_weights():
    training = Training(product_of_towers, momentum, EVEN, epochs=3)
    fits = fits_of(training, "gpipe")
    names = [layer.name for layer in training._measured[1].layers]
    assert names == [*named("item", 4), "right_0", *named("query", 4), "left_0", "join behind left_0 (1)"]
    starts = ["item_0", "query_0", "query_2", "join behind left_0 (1)"]
    fits |= fits_of(training, "zb_h1", stages=starts)
    assert_beside(training, {"zb_h1": fits["zb_h1"]}, [set(), set(), {1}, {0, 1, 2}])
    assert_same_bits(training, fits, far=None, weights_everywhere=False)


def test_gradients_of_branches_meet_in_the_layer_that_both_read():
    training = Training(forked, momentum, EVEN, epochs=3)
    fits = fits_of(training, "gpipe")
    starts = ["common_0", "left_0", "right_0", "join before score (1)"]
    fits |= fits_of(training, "1f1b", stages=starts)
    assert_beside(training, {"1f1b": fits["1f1b"]}, [set(), {0}, {0}, {0, 1, 2}])
    assert_same_bits(training, fits, far=None, weights_everywhere=False)


def test_calls_of_one_layer_are_no_branches():
    training = Training(siamese, momentum, ([X, X[::-1]], Y), epochs=1)
    fits_of(training, "gpipe")
    names = [layer.name for layer in training._measured[1].layers]
    assert [name for name in names if " " not in name] == [*named("shared", 3), "score"]
    assert not [name for name in names if name.startswith("join")]


@st.composite
def _inputs(draw):
    """Layers that each depend on some before it, and on whatever these do; as bits."""
    inputs = []
    for layer in range(draw(st.integers(1, 12))):
        read = draw(st.sets(st.integers(0, layer - 1), max_size=3)) if layer else set()
        inputs.append(sum(1 << other for other in read | {up for r in read for up in bits_of(inputs[r])}))
    return inputs


@given(_inputs(), st.randoms())
def test_an_order_is_topological(inputs, random):
    names = random.sample(range(len(inputs)), len(inputs))
    order = depth_first(inputs, names)
    assert sorted(order) == list(range(len(inputs)))
    for place, layer in enumerate(order):
        assert set(bits_of(inputs[layer])) <= set(order[:place])
    chain = [(1 << layer) - 1 for layer in range(len(inputs))]
    assert depth_first(chain, names) == list(range(len(inputs)))


@given(_inputs(), st.randoms())
def test_an_order_does_not_depend_on_the_numbers(inputs, random):
    new = random.sample(range(len(inputs)), len(inputs))
    again = [0] * len(inputs)
    for layer, bits in enumerate(inputs):
        again[new[layer]] = sum(1 << new[other] for other in bits_of(bits))
    keys = [new.index(number) for number in range(len(inputs))]
    assert depth_first(again, keys) == [new[layer] for layer in depth_first(inputs, range(len(inputs)))]


@given(
    st.lists(st.integers(1, 5), min_size=1, max_size=4), st.integers(0, 2), st.integers(0, 2), st.randoms()
)
def test_each_branch_is_in_one_piece(lengths, common, behind, random):
    """Chains begin behind common layers, and meet; their layers had numbers in any order."""
    rest = [branch for branch, length in enumerate(lengths) for _ in range(length)]
    random.shuffle(rest)
    branches = [[] for _ in lengths]
    inputs = [(1 << layer) - 1 for layer in range(common)]
    for number, branch in enumerate(rest, common):
        inputs.append(sum(1 << other for other in [*range(common), *branches[branch]]))
        branches[branch].append(number)
    inputs += [(1 << layer) - 1 for layer in range(len(inputs), len(inputs) + behind)]
    order = depth_first(inputs, random.sample(range(len(inputs)), len(inputs)))
    for branch in branches:
        first = order.index(branch[0])
        assert order[first : first + len(branch)] == branch
    assert order[:common] == list(range(common))
