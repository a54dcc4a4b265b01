"""All mutants that cosmic-ray makes of some modules."""

from __future__ import annotations

import ast
import difflib
from dataclasses import dataclass

from cosmic_ray.ast import ast_nodes, get_ast_from_path
from cosmic_ray.mutating import mutate_code
from cosmic_ray.plugins import get_operator, operator_names

from tests.forked import ROOT

Position = tuple[int, int]


@dataclass(frozen=True, order=True)
class Mutant:
    """One change: the ``occurrence``-th place in the module at which the operator can change something."""

    module: str
    start: Position
    operator: str
    occurrence: int

    def code(self, source: str) -> str:
        changed = mutate_code(source, get_operator(self.operator)(), self.occurrence)
        if changed is None:
            raise LookupError(f"{self} changes nothing")
        return changed

    def diff(self) -> str:
        source = (ROOT / self.module).read_text()
        before, after = source.splitlines(), self.code(source).splitlines()
        lines = difflib.unified_diff(before, after, self.module, self.module, n=0, lineterm="")
        return "\n".join(lines)


def mutants_of(module: str) -> list[Mutant]:
    """All mutants of a module, in the order of its text."""
    path = ROOT / module
    tree = get_ast_from_path(path)
    annotations = _annotations(path.read_text())
    mutants = []
    for name in operator_names():
        operator = get_operator(name)
        if operator.arguments():  # takes the names of variables, which nobody gives
            continue
        places = [start for node in ast_nodes(tree) for start, _ in operator().mutation_positions(node)]
        mutants += [Mutant(module, start, name, number) for number, start in enumerate(places)]
    return sorted(m for m in mutants if not any(a <= m.start < b for a, b in annotations))


def _annotations(source: str) -> list[tuple[Position, Position]]:
    """Return the places of annotations: with ``from __future__ import annotations`` nothing computes them."""
    if "from __future__ import annotations" not in source:
        return []
    nodes: list[ast.expr | None] = []
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, (ast.arg, ast.AnnAssign)):
            nodes.append(node.annotation)
        elif isinstance(node, (ast.FunctionDef, ast.AsyncFunctionDef)):
            nodes.append(node.returns)
    return [
        ((node.lineno, node.col_offset), (node.end_lineno or 0, node.end_col_offset or 0))
        for node in nodes
        if node is not None
    ]
