"""Defines the errors this package raises; ``tf_ooo.errors`` derives its public tree from them."""

from __future__ import annotations


class GrapplerPassError(Exception):
    """Every error that ``grappler_passes`` raises on purpose derives from this class."""

    # AutoGraph leaves the error as it is: otherwise a page of its caller's lines stands before the message.
    ag_pass_through = True


class GraphError(GrapplerPassError):
    """A graph cannot be used: not a training graph, malformed, or an unsupported op.

    ``node`` names the offending node where there is one.
    """

    def __init__(self, message: str, node: str | None = None) -> None:
        super().__init__(message if node is None else f"{message} (node {node!r})")
        self.node = node


class PlanError(GrapplerPassError, ValueError):
    """A rewrite plan or an execution order is malformed or names unknown nodes."""


class VerifyError(GrapplerPassError):
    """A rewritten graph breaks a rule; ``node`` and ``rule`` say which one and where."""

    def __init__(self, node: str, rule: str, detail: str) -> None:
        super().__init__(f"rule {rule!r} broken at node {node!r}: {detail}")
        self.node = node
        self.rule = rule


class PassError(GrapplerPassError):
    """A pass failed; ``pass_name`` names it, ``__cause__`` is why."""

    def __init__(self, pass_name: str, cause: Exception) -> None:
        super().__init__(f"pass {pass_name!r} failed: {type(cause).__name__}: {cause}")
        self.pass_name = pass_name
        self.__cause__ = cause
