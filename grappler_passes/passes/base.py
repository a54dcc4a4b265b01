"""Defines a pass, and runs passes one after the other.

A pass is a frozen value: a name, what it may change, its parameters, and three methods.  It never changes
its input.
"""

from __future__ import annotations

import abc
import logging
import os
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import ClassVar

from google.protobuf import text_format
from tensorflow.core.framework import graph_pb2

from grappler_passes.compat.graph_protos import copy_of as copy_of
from grappler_passes.errors import PassError
from grappler_passes.graph.training_graph import TrainingGraph
from grappler_passes.passes.relaxations import Relaxation

_LOG = logging.getLogger("tf_ooo")


@dataclass(frozen=True)
class Note:
    """Something a pass did or did not do: ``status`` is done, skipped or mixed.

    ``mixed`` marks an op that computes dO and dW together and was left as it is.
    """

    status: str
    reason: str
    nodes: tuple[str, ...] = ()

    def __str__(self) -> str:
        return f"{self.status}: {self.reason}" + (f" [{', '.join(self.nodes)}]" if self.nodes else "")


@dataclass(frozen=True)
class PassResult:
    """A pass's output.  ``modified`` is False exactly where ``graph_def`` equals the input.

    ``replaced`` names the nodes of the input that the pass took out or rewired on purpose.
    """

    graph_def: graph_pb2.GraphDef
    modified: bool
    notes: tuple[Note, ...] = ()
    replaced: frozenset[str] = frozenset()

    @property
    def mixed(self) -> dict[str, str]:
        """Ops that still compute dO and dW together, each with the reason."""
        return {node: note.reason for note in self.notes if note.status == "mixed" for node in note.nodes}


class Pass(abc.ABC):
    """GraphDef in, GraphDef out.  Subclasses are frozen dataclasses.

    Attributes:
        name: in errors, and of the file that the result is dumped to.
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
        """The pass where earlier ones have replaced these nodes: only a check needs to know."""
        return self

    def __call__(
        self, graph_def: graph_pb2.GraphDef, training_graph: TrainingGraph | None = None
    ) -> PassResult:
        """Run with both checks; raises PassError that names the pass and carries the cause."""
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
    """Return all relaxations of these passes together."""
    return frozenset().union(*(step.relaxes for step in passes))


@dataclass(frozen=True)
class PassPipeline(Pass):
    """Runs passes in order; itself a pass.

    With ``dump_dir`` set the input is written to ``00_input.pbtxt`` and each result to ``NN_<pass>.pbtxt``.
    Where some passes ``ran`` before, and wrote into that folder, numbers go on and the input is theirs.
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
