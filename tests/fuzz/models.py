"""Draws the lines of a program that make a model."""

from __future__ import annotations

from collections.abc import Collection, Mapping
from dataclasses import dataclass
from typing import Any

from tests.fuzz.catalogue import CELLS, JOINS, LAYERS, LEFT_OUT, OFTEN, PENALTIES, RANKS, REDUCTIONS, WORDS
from tests.harness.drawing import Draw

INPUT_KINDS = {1: ("features",), 2: ("sequence", "tokens"), 3: ("image",), 4: ("volume",)}
SHAPES = {"features": (7,), "tokens": (4,), "sequence": (4, 5), "image": (6, 5, 3), "volume": (4, 3, 4, 2)}
EMBEDDING = {"output_dim": (4, 6), "mask_zero": (LEFT_OUT, True), "trainable": (LEFT_OUT,) * 7 + (False,)}


def arguments_of(
    draw: Draw, choices: Mapping[str, tuple[Any, ...]], without: Collection[str] = ()
) -> dict[str, Any]:
    drawn = {name: draw.choice(values) for name, values in choices.items()}
    return {name: value for name, value in drawn.items() if value is not LEFT_OUT and name not in without}


def text_of(call: str, arguments: Mapping[str, Any], **code: str) -> str:
    """A call as in a program; the values of ``code`` are expressions."""
    values = {
        name: f'"{value}"' if isinstance(value, str) else repr(value) for name, value in arguments.items()
    }
    return f"{call}({', '.join(f'{name}={value}' for name, value in {**code, **values}.items())})"


@dataclass(frozen=True)
class Layer:
    """A layer as text; ``rank``: how many dimensions of what it gives follow that of the rows."""

    text: str
    rank: int
    keeps_shape: bool
    trains: bool
    returns_sequences: bool


def layer_of(draw: Draw, name: str, rank: int, without: Collection[str], first: bool = True) -> Layer:
    """A layer of that class; something is left of the shape where it is not the first."""
    kind = LAYERS[name]
    arguments = arguments_of(draw, kind.choices, without)
    inner, code = None, {}
    if kind.cells:
        cell = draw.choice(kind.cells)
        other = draw.choice([each for each in kind.cells if each != cell])
        texts = [text_of(f"layers.{each}", arguments_of(draw, CELLS[each])) for each in (cell, other)]
        code = {"cell": f"[{', '.join(texts)}]"}
    if kind.wraps:
        # Bidirectional sets it itself.
        inner = layer_of(draw, draw.choice(kind.wraps), rank, {*without, "go_backwards"}, first)
        code = {"layer": inner.text}
    if arguments.get("padding") == "valid" and not first:
        arguments["padding"] = "same"
    if name == "DepthwiseConv2D" and arguments.get("strides") == 2:
        arguments["padding"] = "same"
    if name in ("Attention", "AdditiveAttention") and "dropout" not in arguments:
        arguments.pop("seed")
    sequences = bool(arguments.get("return_sequences") or (inner and inner.returns_sequences))
    keeps = arguments.get("strides", 1) == 1 and arguments.get("padding", "same") == "same"
    bare = arguments.get("center") is False and arguments.get("scale") is False
    bare |= name == "Attention" and "use_scale" not in arguments
    trains = kind.trains and not bare and arguments.get("trainable") is not False
    return Layer(
        text_of(f"layers.{name}", arguments, **code),
        rank if sequences else kind.rank_after(rank),
        sequences if kind.recurrent else kind.keeps_shape and keeps,
        trains and (inner is None or inner.trains),
        sequences,
    )


class Body:
    """The lines that make ``h``, as they are drawn.

    Attributes:
        inputs: how the data of each input are made.
        trained: how many layers are, at least.
        moves: whether anything is trained, and not in one loop, past which nothing may be moved.
        sparse: whether there is an embedding.
    """

    def __init__(self, draw: Draw, policy: str) -> None:
        self._draw, self._policy = draw, policy
        self.lines, self.inputs = list[str](), list[str]()
        self.trained, self.sparse, self._cells, self._joined = 0, False, False, False
        # Losses are float32, and a penalty of another type cannot be added to them.
        self._without = {"float32": set(), "float64": PENALTIES}.get(policy, {"activity_regularizer"})

    @property
    def moves(self) -> bool:
        return self._joined or (self.trained > 0 and not self._cells)

    def branches(self, wanted: str, join: str) -> None:
        """One or two inputs down to one row of features, and what follows; the first has the wanted layer."""
        self._branch(self._draw.choice(LAYERS[wanted].ranks), wanted)
        if self._draw.chance(0.2):
            self.lines.append("branch = h")
            self._draw.part(lambda: self._branch(self._draw.choice((1, 2, 3))))
            ends = "branch, h"
            if join != "Concatenate":
                ends, self._joined = "layers.Dense(units=6)(branch), layers.Dense(units=6)(h)", True
                self.trained += 2
            self.lines.append(f"h = layers.{join}()([{ends}])")
        for _ in range(self._draw.choice((0, 1, 1, 1, 1, 2, 2))):
            self._draw.part(self._trunk)

    def _trunk(self) -> None:
        self._step(1, self._draw.choice(("Dense", "Dense", "BatchNormalization", "Dropout")))

    def _branch(self, rank: int, wanted: str = "") -> None:
        kind = self._draw.choice(INPUT_KINDS[rank])
        number, shape, place = len(self.inputs), SHAPES[kind], len(self.lines)
        rows = f"({', '.join(map(str, ('rows', *shape)))})"
        if kind == "tokens":
            self.lines.append(f'input_{number} = h = keras.Input({shape}, dtype="int32")')
            self.inputs.append(f"random.integers(0, {WORDS}, {rows})")
            self._embed()
        else:
            self.lines.append(f"input_{number} = h = keras.Input({shape})")
            self.inputs.append(f'random.normal(size={rows}).astype("float32")')
        rank = self._steps(RANKS[kind], wanted)
        if any("Softmax(" in line for line in self.lines[place:]):  # Keras' does not take such a mask
            self.lines[place:] = [line.replace(", mask_zero=True", "") for line in self.lines[place:]]
        reduced_by = self._draw.choice(REDUCTIONS)
        if rank > 1:
            dimensions = "" if reduced_by == "Flatten" else f"{rank - 1}D"
            self.lines.append(f"h = layers.{reduced_by}{dimensions}()(h)")

    def _embed(self) -> None:
        arguments = arguments_of(self._draw, EMBEDDING)
        self.lines.append(f"h = {text_of('layers.Embedding', arguments, input_dim=str(WORDS))}(h)")
        self.trained += "trainable" not in arguments
        self.sparse = True

    def _steps(self, rank: int, wanted: str) -> int:
        """One or two steps for tensors of that rank, one with the wanted class; the rank after them."""
        count = self._draw.choice((1, 1, 2))
        place = self._draw.below(count) if wanted else -1
        for number in range(count):
            before = number < place
            name = wanted if number == place else self._name(rank, before)
            rank = self._step(rank, name, first=number == 0 and not before)
        return rank

    def _name(self, rank: int, keeps_rank: bool) -> str:
        names = [
            name
            for name, kind in LAYERS.items()
            if rank in kind.ranks and self._policy not in kind.not_in
            if not keeps_rank or kind.rank_after(rank) == rank
        ]
        often = [name for name in OFTEN if name in names]
        return self._draw.choice(names if self._draw.chance(0.5) else often)

    def _step(self, rank: int, name: str, first: bool = False) -> int:
        layer = layer_of(self._draw, name, rank, self._without, first)
        applied = f"h = {layer.text}({LAYERS[name].takes})"
        self.trained += layer.trains
        self._cells |= bool(LAYERS[name].cells)
        if layer.rank != rank or not layer.keeps_shape or not self._draw.chance(0.25):
            self.lines.append(applied)
        elif name == "Dense" and self._draw.chance(0.5):
            tied = "h = layers.Concatenate()([shared(h), shared(-0.5 * h)])"
            self.lines += [f"shared = {layer.text}", tied]
        else:
            join = self._draw.choice(JOINS)
            end = "h" if join == "Concatenate" else "layers.Dense(units=skip.shape[-1])(h)"
            self.trained += join != "Concatenate"
            self.lines += ["skip = h", applied, f"h = layers.{join}()([skip, {end}])"]
        return layer.rank
