"""Cost tables: what is saved is what is loaded; what is wrong is named."""

import json
import math

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tf_ooo.costs.layer_costs import RUNTIME, LayerCosts, Link
from tf_ooo.costs.table import CostTable, GainTable
from tf_ooo.errors import CostError

NUMBERS = st.one_of(st.integers(0, 2**53), st.floats(0, 1e300))
SHARES = st.floats(0, 1, exclude_min=True)
TEXTS = st.text(st.characters(exclude_categories=["Cs"]), max_size=8)


@st.composite
def layer_costs(draw, index):
    activation = draw(NUMBERS)
    kept = draw(st.none() | st.floats(0, 1))
    return LayerCosts(
        *(draw(NUMBERS) for _ in range(4)),
        activation_bytes=activation,
        weight_bytes=draw(NUMBERS),
        output_bytes=draw(NUMBERS),
        weight_grad_bytes=None if kept is None else min(kept * activation, activation),
        inputs=draw(st.none() | st.lists(st.integers(0, index - 1), unique=True).map(tuple)) if index else (),
        occupancy=draw(st.none() | st.tuples(SHARES, SHARES, SHARES)),
        name=draw(TEXTS),
        slot_bytes=draw(NUMBERS),
    )


@st.composite
def tables(draw):
    return CostTable(
        layers=tuple(draw(layer_costs(index)) for index in range(draw(st.integers(1, 4)))),
        link=Link(
            *(draw(NUMBERS), draw(st.floats(1e-9, math.inf)), draw(NUMBERS)),
            **{name: draw(NUMBERS) for name in RUNTIME},
        ),
        source=draw(st.sampled_from(["measured", "analytic", "mixed", "edited"])),
        device=draw(TEXTS),
        assumptions=tuple(draw(st.lists(TEXTS, max_size=3))),
        notes=tuple(draw(st.lists(TEXTS, max_size=3))),
        op_seconds=draw(st.dictionaries(TEXTS, NUMBERS, max_size=4)),
    )


@given(tables())
def test_round_trip(table):
    text = table.to_json()
    assert CostTable.from_json(text) == table
    assert CostTable.from_json(text).to_json() == text


def test_file_round_trip_and_its_look(tmp_path):
    table = CostTable(
        (LayerCosts(1.0, 2.0, 3.0, name="a"),), Link(), "measured", op_seconds={"z": 1.0, "b": 2.0}
    )
    path = table.save(tmp_path / "costs.json")
    assert CostTable.load(path) == table
    content = json.loads(path.read_text())
    assert list(content)[:2] == ["version", "source"]
    assert content["link"] == {"latency_s": 0.0, "bytes_per_s": "unlimited", "overhead_s_per_byte": 0.0}
    assert list(content["layers"][0])[:3] == ["name", "forward_s", "output_grad_s"]
    assert list(content["op_seconds"]) == ["b", "z"]


def _content():
    layers = (LayerCosts(1, 2, 3, name="first"), LayerCosts(4, 5, 6, inputs=(0,), occupancy=(1, 1, 0.5)))
    return json.loads(CostTable(layers, Link(1e-6, 1e9)).to_json())


def test_tables_from_before_links_had_overheads():
    content = _content()
    del content["link"]["overhead_s_per_byte"]
    assert CostTable.from_json(json.dumps(content)).link == Link(1e-6, 1e9)


def test_which_devices_share_cores_is_kept():
    layers = (LayerCosts(1, 2, 3, occupancy=(0.5, 1, 0.75)),)
    table = CostTable(layers, Link(1e-6, 1e9, machines=(0, 0, 2), cores=8))
    assert json.loads(table.to_json())["link"]["machines"] == [0, 0, 2]
    assert CostTable.from_json(table.to_json()) == table
    text = table.to_json().replace('"cores": 8', '"cores": 0')
    with pytest.raises(CostError, match="machines are whole numbers, of some cores"):
        CostTable.from_json(text)


DELETED = object()


@pytest.mark.parametrize(
    ("path", "value", "message"),
    [
        (("layers", 0, "forward_s"), -1, r"costs: layer 0 \(first\): forward_s: must be .* got -1"),
        (("layers", 1, "weight_grad_s"), math.nan, "layer 1: weight_grad_s: .* got nan"),
        (("layers", 1, "update_s"), math.inf, "layer 1: update_s: .* got inf"),
        (("layers", 0, "forward_s"), 10**400, "forward_s: must be a finite number"),
        (("layers", 0, "forward_s"), "1", r"layer 0 \(first\): forward_s: .* got '1'"),
        (("layers", 0, "forward_s"), True, "forward_s: .* got True"),
        (("layers", 0, "forward_s"), None, "forward_s: .* got None"),
        (("layers", 0, "forward_s"), DELETED, r"layer 0 \(first\): forward_s is missing"),
        (("layers", 0, "output_bytes"), DELETED, "output_bytes is missing"),
        (("layers", 0, "weight_grad_bytes"), -2, "weight_grad_bytes: .* got -2"),
        (("layers", 0, "weight_grad_bytes"), 1, "above activation_bytes"),
        (("layers", 0, "forward"), 1, "unknown key 'forward'; known: activation_bytes"),
        (("layers", 0, "name"), 3, "layer 0: name: expected text"),
        (("layers", 0, "inputs"), 3, "inputs: expected a list of numbers or null"),
        (("layers", 0, "inputs"), [0], "layer 0: reads layer 0, which is not before it"),
        (("layers", 1, "inputs"), [0.5], "inputs: expected a list of numbers or null, got 0.5"),
        (("layers", 1, "occupancy"), [1, 1], "occupancy: expected the shares"),
        (("layers", 1, "occupancy"), [1, 1, 2], "occupancy must be in"),
        (("layers", 1), 7, "layer 1: expected an object, got 7"),
        (("layers",), [], "one LayerCosts for each layer"),
        (("layers",), {}, "layers: expected a list"),
        (("link", "latency_s"), -1, "link: latency_s"),
        (("link", "bytes_per_s"), 0, "link: bytes_per_s must be above 0"),
        (("link", "bytes_per_s"), "fast", "link: bytes_per_s: .* got 'fast'"),
        (("link", "bytes_per_s"), DELETED, "link: bytes_per_s is missing"),
        (("link", "speed"), 1, "link: unknown key 'speed'"),
        (("version",), 2, "version: this program reads version 1, got 2"),
        (("version",), DELETED, "the file: version is missing"),
        (("source",), "guessed", "source must be one of"),
        (("source",), 1, "source: expected text"),
        (("notes",), "x", "notes: expected a list of texts"),
        (("op_seconds",), {"conv": -1}, "op_seconds: op 'conv': .* got -1"),
        (("op_seconds",), {"conv": "1"}, "op_seconds: op 'conv'"),
        (("op_seconds",), [], "op_seconds: expected an object"),
        (("extra",), 1, "unknown key 'extra'"),
    ],
)
def test_what_is_wrong_is_named(path, value, message):
    content = _content()
    target = content
    for key in path[:-1]:
        target = target[key]
    if value is DELETED:
        del target[path[-1]]
    else:
        target[path[-1]] = value
    with pytest.raises(CostError, match=message):
        CostTable.from_json(json.dumps(content))


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("", "line 1: no JSON"),
        ('{"version": 1,\n oops}', "line 2: no JSON"),
        ('{"version": 1, "version": 1}', "'version' is there twice"),
        ("[1]", "expected an object"),
        ("[" * 100_000, "costs: "),
        ("9" * 10_000, "costs: "),
    ],
)
def test_text_that_is_no_table(text, message):
    with pytest.raises(CostError, match=message):
        CostTable.from_json(text)


@given(st.text(max_size=60))
def test_any_text_gives_a_table_or_a_cost_error(text):
    with pytest.raises(CostError):
        CostTable.from_json(text)


@pytest.mark.parametrize(
    ("field", "value"),
    [("link", 1e9), ("device", float("inf")), ("assumptions", "one"), ("assumptions", 3.0), ("notes", [1]),
     ("op_seconds", "conv"), ("op_seconds", [1.0])],
)  # fmt: skip
def test_fields_in_python_are_checked_as_those_of_a_file(field, value):
    with pytest.raises(CostError, match=f"^{field}: expected .*, got "):
        CostTable(**{"layers": [LayerCosts(1.0, 1.0, 1.0)], field: value})


@pytest.mark.parametrize(
    ("field", "value"),
    [("occupancy", "3"), ("occupancy", ("1", 1, 1)), ("occupancy", 0.5), ("inputs", "1"), ("inputs", 0),
     ("name", 1)],
)  # fmt: skip
def test_fields_of_a_layer_in_python(field, value):
    with pytest.raises(CostError, match=f"{field} must be "):
        LayerCosts(1.0, 1.0, 1.0, **{field: value})


def test_inputs_that_are_no_numbers():
    with pytest.raises(CostError, match="layer 1: reads layer 'a'"):
        CostTable([LayerCosts(1.0, 1.0, 1.0), LayerCosts(1.0, 1.0, 1.0, inputs=("a",))])


@pytest.mark.parametrize(
    ("fields", "said"),
    [
        ({"saved_s": 1.0}, "saved_s: expected a map, got 1.0"),
        ({"saved_s": {"dO:1": 1.0}}, r"keys are pairs such as \('dO:5', 6\), got 'dO:1'"),
        ({"saved_s": {("dO:1", 1): 10**400}}, "dO:1 beside dW:1: saved_s must be finite"),
        ({"saved_s": {("dO:1", 1): True}}, "dO:1 beside dW:1: saved_s must be finite, got True"),
        ({"saved_s": {}, "alone_s": []}, "alone_s: expected a map"),
        ({"saved_s": {}, "notes": "text"}, "notes: expected a list of texts"),
    ],
)
def test_gains_in_python(fields, said):
    with pytest.raises(CostError, match=said):
        GainTable(**fields)


@pytest.mark.parametrize(
    ("content", "said"),
    [
        ({"gains": [{"region": [], "layer": 1, "saved_s": 1.0}]}, "entry 0: expected a text and"),
        (
            {"gains": [{"region": "dO:1", "layer": {}, "saved_s": 1.0}]},
            "entry 0: expected a text and",
        ),
        ({"gains": [], "notes": 3}, "notes: expected a list of texts, got 3"),
    ],
)
def test_gains_of_a_file(tmp_path, content, said):
    path = tmp_path / "gains.json"
    path.write_text(json.dumps({"version": 1, **content}))
    with pytest.raises(CostError, match=rf"gains\.json: .*{said}"):
        GainTable.load(path)


def test_error_names_the_file(tmp_path):
    path = tmp_path / "mine.json"
    with pytest.raises(CostError, match=r"mine\.json: cannot be read: No such file or directory$"):
        CostTable.load(path)
    path.write_bytes(b"\xff\xfe")
    with pytest.raises(CostError, match=r"mine\.json: cannot be read: it is no text in UTF-8 \(byte 0\)$"):
        CostTable.load(path)
    path.write_text("{")
    with pytest.raises(CostError, match=r"mine\.json: line 1"):
        CostTable.load(path)


def test_optional_fields_may_be_left_out():
    content = _content()
    for key in ("weight_grad_bytes", "inputs", "occupancy", "name"):
        del content["layers"][1][key]
    assert CostTable.from_json(json.dumps(content)).layers[1] == LayerCosts(4, 5, 6)
