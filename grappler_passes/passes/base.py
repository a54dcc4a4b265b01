"""Defines a pass, what it may change, and the copy of a graph that it edits; runs passes in a row.

A pass is a frozen value: a name, what it may change, its parameters, and three methods.  It never changes
its input.
"""

from __future__ import annotations

import abc
import enum
import logging
import os
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, ClassVar

from google.protobuf import text_format

from grappler_passes.compat import graph_protos
from grappler_passes.compat.graph_protos import control_inputs, data_inputs, split_input
from grappler_passes.compat.graph_protos import copy_of as copy_of
from grappler_passes.compat.graph_protos import tensor as tensor
from grappler_passes.errors import GraphError, PassError
from grappler_passes.graph.training_graph import TrainingGraph

if TYPE_CHECKING:
    from tensorflow.core.framework import graph_pb2, node_def_pb2


class Relaxation(str, enum.Enum):
    """Names a kind of difference that a pass may make between its input and its output.

    Whatever is declared, every rule on control flow holds, the graph's arguments and results stay, and the
    remaining ops with side effects keep their order.
    """

    MORE_WAITS = "more waits"
    """There are control edges that the input lacks."""
    FEWER_WAITS = "fewer waits"
    """There are control edges only in the input."""
    DEVICES = "devices"
    """Nodes sit on other devices."""
    NOTES = "notes"
    """Attributes that begin with an underscore differ: they do not say what a node computes."""
    NEW_NODES = "new nodes"
    """There are nodes that the input lacks."""
    COPIES = "copies"
    """Identity, IdentityN and NoOp may go; who read through a copy may read what was copied."""
    REPLACED_NODES = "replaced nodes"
    """The nodes of ``PassResult.replaced`` may go, read other tensors, and have other attributes."""
    OPS = "ops"
    """Replaced nodes may be other ops."""
    SIDE_EFFECTS = "side effects"
    """Replaced nodes may be some that read or change state."""
    FUNCTIONS = "functions"
    """The library of functions differs."""

    def __str__(self) -> str:
        return self.value


REORDERING = frozenset(Relaxation) - {Relaxation.OPS, Relaxation.SIDE_EFFECTS, Relaxation.FUNCTIONS}
"""All that leaves every number as it was."""


_LOG = logging.getLogger("tf_ooo")


@dataclass(frozen=True)
class Note:
    """Says what a pass did or did not do to a node: ``status`` is done, skipped or mixed.

    ``mixed`` marks an op that computes dO and dW together and was left as it is.
    """

    status: str
    reason: str
    nodes: tuple[str, ...] = ()

    def __str__(self) -> str:
        return f"{self.status}: {self.reason}" + (f" [{', '.join(self.nodes)}]" if self.nodes else "")


@dataclass(frozen=True)
class PassResult:
    """Holds a pass's output; ``modified`` is False exactly where ``graph_def`` equals the input.

    ``replaced`` names the nodes of the input that the pass took out or rewired on purpose.
    """

    graph_def: graph_pb2.GraphDef
    modified: bool
    notes: tuple[Note, ...] = ()
    replaced: frozenset[str] = frozenset()

    @property
    def mixed(self) -> dict[str, str]:
        """Return the ops that still compute dO and dW together, each with the reason."""
        return {node: note.reason for note in self.notes if note.status == "mixed" for node in note.nodes}


class Pass(abc.ABC):
    """Takes a GraphDef and returns one. Subclasses are frozen dataclasses.

    Attributes:
        name: used in errors, and in the name of the file that the result is dumped to.
        relaxes: what may differ between input and output; nothing else may.
    """

    name: ClassVar[str]
    relaxes: ClassVar[frozenset[Relaxation]] = frozenset()

    def preconditions(self, graph_def: graph_pb2.GraphDef, training_graph: TrainingGraph | None) -> None:
        """Raise GrapplerPassError where the pass cannot run on this graph."""
        return

    @abc.abstractmethod
    def run(self, graph_def: graph_pb2.GraphDef, training_graph: TrainingGraph | None) -> PassResult:
        """Do the work on a copy."""

    def postconditions(
        self, before: graph_pb2.GraphDef, result: PassResult, training_graph: TrainingGraph | None
    ) -> None:
        """Raise GrapplerPassError where the result breaks the pass's promise."""
        return

    def knowing(self, replaced: frozenset[str]) -> Pass:
        """Return the pass told that earlier passes have replaced these nodes; only checks need to know."""
        return self

    def __call__(
        self, graph_def: graph_pb2.GraphDef, training_graph: TrainingGraph | None = None
    ) -> PassResult:
        """Run the pass with both checks; raises PassError that names the pass and carries the cause."""
        try:
            self.preconditions(graph_def, training_graph)
            result = self.run(graph_def, training_graph)
            self.postconditions(graph_def, result, training_graph)
        except PassError:
            raise
        except Exception as error:
            # A bug in a pass must reach the caller as a failed pass, so that training can go on.
            raise PassError(self.name, error) from error
        return result


def relaxed_by(*passes: Pass | type[Pass]) -> frozenset[Relaxation]:
    """Return all that these passes may change together."""
    return frozenset().union(*(step.relaxes for step in passes))


@dataclass(frozen=True)
class PassPipeline(Pass):
    """Runs passes in order; itself a pass.

    With ``dump_dir`` set the input is written to ``00_input.pbtxt`` and each result to ``NN_<pass>.pbtxt``.
    If passes ``ran`` before and wrote there, numbering goes on and the input is not written.
    """

    passes: Sequence[Pass]
    dump_dir: str | os.PathLike[str] | None = None
    ran: int = 0
    name: ClassVar[str] = "pipeline"

    def __post_init__(self) -> None:
        object.__setattr__(self, "passes", tuple(self.passes))

    def run(self, graph_def: graph_pb2.GraphDef, training_graph: TrainingGraph | None) -> PassResult:
        if not self.ran:
            self._dump(0, "input", graph_def)
        current, modified = graph_def, False
        notes: list[Note] = []
        replaced: set[str] = set()
        for number, step in enumerate(self.passes, self.ran + 1):
            result = step.knowing(frozenset(replaced))(current, training_graph)
            self._dump(number, step.name, result.graph_def)
            current, modified = result.graph_def, modified or result.modified
            notes += result.notes
            replaced |= result.replaced
        return PassResult(current, modified, tuple(notes), frozenset(replaced))

    def _dump(self, number: int, name: str, graph_def: graph_pb2.GraphDef) -> None:
        if self.dump_dir is None:
            return
        folder = Path(self.dump_dir)
        folder.mkdir(parents=True, exist_ok=True)
        path = folder / f"{number:02d}_{name}.pbtxt"
        path.write_text(text_format.MessageToString(graph_def))
        _LOG.debug("wrote %s", path)


class GraphEditor:
    """Adds, rewires and removes nodes; the GraphDef it was made from stays as it is.

    ``removed``, ``added`` and ``opened`` (inputs changed) name the nodes concerned.
    """

    def __init__(self, graph_def: graph_pb2.GraphDef) -> None:
        self.graph_def = graph_protos.copy_of(graph_def)
        self.nodes: dict[str, node_def_pb2.NodeDef] = {node.name: node for node in self.graph_def.node}
        self.removed: set[str] = set()
        self.added: list[str] = []
        self.opened: set[str] = set()

    @property
    def modified(self) -> bool:
        return bool(self.removed or self.added or self.opened)

    def add(self, name: str, op: str, inputs: Iterable[str], device: str = "") -> node_def_pb2.NodeDef:
        """Append a node; GraphError if the name is taken."""
        if name in self.nodes:
            raise GraphError("the name of a node to add is taken", name)
        node = self.graph_def.node.add(name=name, op=op, input=inputs, device=device)
        self.nodes[name] = node
        self.added.append(name)
        return node

    def set_inputs(self, name: str, inputs: Iterable[str]) -> None:
        """Replace all inputs of a node; data inputs come first, repeated control inputs once."""
        node = self.nodes[name]
        node.input[:] = inputs
        node.input[:] = [*data_inputs(node), *dict.fromkeys(control_inputs(node))]

    def map_inputs(self, name: str, replace: Callable[[str, int], list[str]]) -> None:
        """Rewrite each input: ``replace(producer, port)`` gives the inputs to have in its place."""
        inputs = [text for old in self.nodes[name].input for text in replace(*split_input(old))]
        self.set_inputs(name, inputs)

    def finish(self) -> graph_pb2.GraphDef:
        """Return the edited graph, without the removed nodes and references to them as colocation."""
        if not self.removed:
            return self.graph_def
        kept = (node for node in self.graph_def.node if node.name not in self.removed)
        result = graph_protos.with_nodes(self.graph_def, kept)
        for node in result.node:
            graph_protos.keep_colocations(node, lambda name: name not in self.removed)
        return result
