"""A compiled step with dW on side streams: traced, rewritten and compiled once for each kind of input."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from grappler_passes.compat import graph_def_of
from grappler_passes.plugin import keeps_random_state
from tf_ooo.errors import GraphError
from tf_ooo.xla import compat
from tf_ooo.xla.outline import CALL_PREFIX
from tf_ooo.xla.rewrite import StreamRewrite, rewrite_step
from tf_ooo.xla.session import StreamSession

Rewriter = Callable[[Any, list[str]], StreamRewrite]


class StreamStep:
    """Callable like ``function``, compiled by XLA; where it cannot be rewritten, ``stock`` runs.

    Args:
        function: the Python function of the step; reads and writes variables that exist already.
        stock: what runs for inputs whose step cannot be rewritten.
        session: is told of each rewrite and failure.
        rewrite: GraphDef and results in, what to run out.
    """

    def __init__(
        self,
        function: Callable[..., Any],
        stock: Callable[..., Any],
        session: StreamSession,
        rewrite: Rewriter,
    ) -> None:
        self.function, self.stock, self.session, self.rewrite = function, stock, session, rewrite
        self._made: dict[Any, CompiledStep | None] = {}

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        """One step."""
        compiled = self.compiled(args, kwargs)
        if compiled is None:
            return self.stock(*args, **kwargs)
        if compiled.has_run:
            return compiled(args, kwargs)
        try:
            return compiled(args, kwargs)
        except compat.run_errors() as error:  # XLA compiles in the first call, before anything has changed
            self.session.fail(error)
            self._made[compat.signature((args, kwargs))] = None
            return self.stock(*args, **kwargs)

    def compiled(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> CompiledStep | None:
        """The rewritten step for such inputs; None where there is none, and the session knows why."""
        key = compat.signature((args, kwargs))
        if key not in self._made:
            try:
                self._made[key] = CompiledStep(self, args, kwargs)
            except Exception as error:
                self.session.fail(error)
                self._made[key] = None
        return self._made[key]

    # What ``tf_ooo.traces`` asks of a tf.function.
    def experimental_get_tracing_count(self) -> int:
        """For how many kinds of inputs it was made."""
        return len(self._made)

    def _list_all_concrete_functions(self) -> list[Any]:
        return []


class CompiledStep:
    """One rewritten step, for inputs of fixed shapes.

    Raises (when made): GraphError where shapes are open, where the step is no training step or none of
    its dW can be moved; whatever tracing and lowering to HLO raise.
    """

    def __init__(self, step: StreamStep, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        self.inputs = compat.Packed((args, kwargs))
        specs = self.inputs.specs
        open_shapes = [spec for spec in specs if not spec.shape.is_fully_defined()]
        if open_shapes:
            raise GraphError(f"an input of open shape, {open_shapes[0]}: streams need fixed sizes")
        traced = _Traced(step.function, self.inputs)
        if step.session.options.may_fall_back:
            _refuse_random_state(traced.graph_def)
        self.made = step.rewrite(traced.graph_def, traced.fetches)
        key = (compat.signature((args, kwargs)), self.made.key)
        if key not in step.session.compiled:
            run = compat.compiled_function(self._body(traced), specs)
            check_calls(compat.hlo_of(run, specs), self.made)
            step.session.compiled[key] = run
        self._run = step.session.compiled[key]
        self._outputs = traced.outputs
        self.has_run = False
        step.session.add(self.made)

    def _body(self, traced: _Traced) -> Callable[..., list[Any]]:
        made = self.made
        compat.register_functions(made.graph_def, CALL_PREFIX)
        body = compat.without_placeholders(made.graph_def)

        def run(*tensors: Any) -> list[Any]:
            given = dict(zip(traced.arguments, tensors, strict=True)) | traced.captured
            return compat.import_here(body, given, made.fetches)

        return run

    def __call__(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """One step."""
        outputs = self._run(*self.inputs.tensors_of((args, kwargs)))
        self.has_run = True
        return self._outputs.unpack(outputs)


class _Traced:
    """The step as one flat graph."""

    def __init__(self, function: Callable[..., Any], inputs: compat.Packed) -> None:
        results: list[compat.Packed] = []

        def flat(*tensors: Any) -> list[Any]:
            args, kwargs = inputs.unpack(tensors)
            results.append(compat.Packed(compat.as_tensors(function(*args, **kwargs))))
            return results[-1].tensors

        concrete = compat.flat_trace(flat, inputs.specs)
        self.outputs = results[-1]
        self.graph_def, _ = graph_def_of(concrete)
        self.fetches = [tensor.name for tensor in concrete.outputs]
        captured = compat.captures_of(concrete)
        inside = {id(placeholder) for _, placeholder in captured}
        self.arguments = [tensor.name for tensor in concrete.inputs if id(tensor) not in inside]
        self.captured = {placeholder.name: outside for outside, placeholder in captured}


def _refuse_random_state(graph_def: Any) -> None:
    nodes = [*graph_def.node, *(node for f in graph_def.library.function for node in f.node_def)]
    drawn = next((node.name for node in nodes if keeps_random_state(node.op)), None)
    if drawn is not None:
        raise GraphError(
            f"{drawn} draws random numbers from a state of its own, which the rewritten step would not "
            "share; use tf.random.stateless_* or keras.random, or name a schedule"
        )


def check_calls(hlo: str, made: StreamRewrite) -> None:
    """Raises GraphError unless each call has come through to HLO with its stream."""
    found = compat.stream_calls(hlo)
    if len(found) < len(made.calls):
        raise GraphError(
            f"XLA kept {len(found)} of {len(made.calls)} calls on streams; this version cannot be used"
        )


def default_rewriter(plan: Any, store: str) -> Rewriter:
    """Rewrites with one plan; see :func:`rewrite_step`."""
    return lambda graph_def, fetches: rewrite_step(graph_def, fetches, plan, store)
