"""Trains the model of a program several times from the same weights, and compares the bits."""

from __future__ import annotations

import math
import re
import zlib
from collections.abc import Callable, Mapping
from typing import Any

import keras
import numpy as np

import tf_ooo
from tf_ooo.rewriting.task_calls import REFUSED

BATCH_SIZE = 4
# XLA says this where a task reads a shape that another one has computed, as in a loop: no fault.
_SHAPE_IS_READ = "computed as partial shapes"
Trained = list[tuple[str, Any]]


class Fits:
    """The fits of a model that is compiled; ``arguments`` are those of ``fit``.

    Attributes:
        stock_trains: whether stock training has come to its end; what fails before is no fault of ours.
    """

    def __init__(self, model: Any, x: Any, y: Any, ranks: Any = None, **arguments: Any) -> None:
        self.model, self.data, self.ranks, self.stock_trains = model, (x, y), ranks, False
        self._arguments = {"batch_size": BATCH_SIZE, "shuffle": False, "verbose": 0, **arguments}
        model.optimizer.build(model.trainable_variables)
        variables = (*model.variables, *model.optimizer.variables)
        self._beginning = [(variable, np.array(variable)) for variable in variables]

    def fit(self, *callbacks: Any) -> Trained:
        """Trains from the beginning; what is left of it."""
        model = self.model
        for variable, value in self._beginning:
            variable.assign(value)
        history = model.fit(*self.data, callbacks=list(callbacks), **self._arguments).history
        if self.ranks and not callbacks:
            history = of_all_ranks(history, _rows(self.data[0]), self.ranks)
        variables = (*model.variables, *model.optimizer.variables, *model.metrics_variables)
        return [*history.items(), *((variable.path, np.array(variable)) for variable in variables)]

    def single(self, moves: bool, **options: Any) -> None:
        """Compares stock training with one device; ``moves`` says that there is an order to choose."""
        stock = self.fit()
        report, rewritten = self._rewritten(**options)
        self._assert_same(different(stock, rewritten), self.fit)
        _assert_rewritten(report)
        _assert_not_back(report)
        one_layer = len(report.layers) < 2 or any("_cell" in layer.name for layer in report.layers)
        if moves or not (one_layer or not report.ops["dO"]):
            _assert_moved(report)

    def pipelines(self, first: Mapping[str, Any], second: Mapping[str, Any]) -> None:
        """Compares two pipelines."""
        pairs = [self._rewritten(mode="pipeline", **options) for options in (first, second)]
        bits = different(pairs[0][1], pairs[1][1])
        self._assert_same(bits, lambda: self._rewritten(mode="pipeline", **first)[1])
        for report, _ in pairs:
            _assert_rewritten(report)
            _assert_moved(report)

    def compiled_pipelines(self, first: Mapping[str, Any], second: Mapping[str, Any]) -> None:
        """Compares a pipeline op by op with one whose tasks XLA compiles, which has other roundings."""
        ways = [{"mode": "pipeline", **options} for options in (first, second)]
        self._compare_compiled(*ways, lambda far: far)

    def compiled_ranks(self, moves: bool, compile_tasks: bool, **options: Any) -> None:
        """Compares two ranks op by op with the same whose tasks XLA compiles."""
        ways = [{"mode": "data_parallel", "compile_tasks": how, **options} for how in (False, compile_tasks)]
        self._compare_compiled(*ways, lambda far: max(self.ranks.gather(far), key=len))
        self._assert_ranks_equal()

    def _compare_compiled(
        self,
        first: Mapping[str, Any],
        second: Mapping[str, Any],
        of_all: Callable[[dict[str, float]], dict[str, float]],
    ) -> None:
        (of_first, one), (report, other) = (self._rewritten(**options) for options in (first, second))
        policy = keras.config.dtype_policy().name
        far = of_all(beyond_rounding(one, other, policy))
        _assert_rewritten(of_first)
        _assert_rewritten(report)
        assert why_not_compiled(report) != "", f"nothing compiled: {report.notes}"
        refused = REFUSED in report.compiled_tasks and _SHAPE_IS_READ not in report.compiled_tasks
        assert not refused, f"not compiled: {report.compiled_tasks}"
        assert not far, f"beyond rounding: in {policy}, {far}"

    def data_parallel(self, moves: bool, compression: str = "none", **options: Any) -> None:
        """Compares two ranks by stock Horovod with an order of ours."""
        import horovod.tensorflow as hvd

        how: dict[str, Any] = {"op": getattr(hvd, options["op"])}
        how |= {"compression": hvd.Compression.fp16} if compression == "fp16" else {}

        def stock_horovod() -> Trained:
            average_by_horovod(self.model.optimizer, **how)
            self.model.train_function = None
            trained = self.fit()
            object.__delattr__(self.model.optimizer, "apply")
            self.model.train_function = None
            return trained

        stock = stock_horovod()
        report, rewritten = self._rewritten(mode="data_parallel", compression=compression, **options)
        bits = sum(self.ranks.gather(different(stock, rewritten)), [])
        if bits and self.model.steps_per_execution > 1:
            # Keras' own loop has other bits than its single step for some layers (Conv3D).
            self.model.steps_per_execution = 1
            bits = sum(self.ranks.gather(different(stock_horovod(), rewritten)), [])
        self._assert_same(bits, stock_horovod)
        self._assert_ranks_equal()
        if options["schedule"] != "auto":
            _assert_rewritten(report)
            _assert_not_back(report)
        if options["schedule"] == "fast_forward" and moves:
            _assert_moved(report)

    def _assert_ranks_equal(self) -> None:
        equal = (*self.model.trainable_variables, *self.model.optimizer.variables)
        sums = self.ranks.gather([zlib.crc32(np.array(variable).tobytes()) for variable in equal])
        assert sums[0] == sums[1], f"ranks differ: {sums}"

    def _rewritten(self, **options: Any) -> tuple[Any, Trained]:
        self.stock_trains = True
        callback = tf_ooo.OOOBackprop(**options, strict=True)
        trained = self.fit(callback)
        print(callback.report.summary())
        return callback.report, trained

    def _assert_same(self, bits: list[str], again: Callable[[], Trained]) -> None:
        """Some stock training does not repeat itself: no fault of the rewritten one then."""
        if not bits:
            return
        first, *others = [again() for _ in range(4)]
        assert not any(different(first, other) for other in others), "stock does not repeat itself"
        raise AssertionError(f"not the same bits: {bits}")


def different(a: Trained, b: Trained) -> list[str]:
    """Return the names of what has other bits."""
    assert [name for name, _ in a] == [name for name, _ in b]
    pairs = zip(a, b, strict=True)
    return [name for (name, x), (_, y) in pairs if np.asarray(x).tobytes() != np.asarray(y).tobytes()]


# XLA adds up in another order, and keeps halves as float32 in between.  After these few steps that is less
# than so much of a variable's largest value: about 100 times the spacing of float32, 20 times that of halves.
# In float64 rounding is told from faults; it has room for what is divided by something small.
ROUNDING = {"float64": 1e-10, "float32": 1e-5, "mixed_float16": 2e-2, "mixed_bfloat16": 1e-1}
# A variable that is smaller than this, as a gradient whose terms are opposite, is compared as if it were not.
SMALLEST = 1e-2


def beyond_rounding(a: Trained, b: Trained, policy: str) -> dict[str, float]:
    """Return what is farther off than rounding under a dtype policy, with how far; integers are equal."""
    assert [name for name, _ in a] == [name for name, _ in b]
    off = {name: _relative(np.asarray(x), np.asarray(y)) for (name, x), (_, y) in zip(a, b, strict=True)}
    return {name: value for name, value in off.items() if value > ROUNDING[policy]}


def _relative(x: Any, y: Any) -> float:
    if x.dtype.kind != "f":
        return 0.0 if np.array_equal(x, y) else math.inf
    finite = np.isfinite(x)
    if not np.array_equal(x[~finite], y[~finite], equal_nan=True):
        return math.inf
    x, y = x[finite].astype("float64"), y[finite].astype("float64")
    return float(np.abs(x - y).max(initial=0.0) / np.abs(x).max(initial=SMALLEST))


def why_not_compiled(report: Any) -> str | None:
    """Return the note that says why XLA compiles nothing, empty if there is none; None: it compiles tasks.

    An error is no reason.
    """
    errors = [note for note in report.notes if re.search(r"XLA does not compile.*Error", note)]
    if errors or not re.match("0 ops|$", report.compiled_tasks):
        return "" if errors else None
    return next((note for note in report.notes if "XLA" in note or "op by op" in note), "")


def average_by_horovod(optimizer: Any, **how: Any) -> None:
    """Stock Horovod averages gradients where the optimizer applies them."""
    import horovod.tensorflow as hvd

    apply = optimizer.apply

    def averaging(gradients: list[Any], variables: Any = None) -> Any:
        return apply([None if g is None else hvd.allreduce(g, **how) for g in gradients], variables)

    object.__setattr__(optimizer, "apply", averaging)


def of_all_ranks(history: Mapping[str, list[float]], rows: int, ranks: Any) -> dict[str, list[float]]:
    """Means of logs over the ranks, as our callback makes them."""
    of_ranks, means = ranks.gather(dict(history)), {}
    for name in history:
        epochs = zip(*(own[name] for own in of_ranks), strict=True)
        means[name] = [math.fsum(rows * v for v in values) / (rows * ranks.size) for values in epochs]
    return means


def _rows(x: Any) -> int:
    return len(x[0] if isinstance(x, list) else x)


def _assert_rewritten(report: Any) -> None:
    assert report.rewritten_graph is not None, f"not rewritten: {report.fallback_reason}"


def _assert_not_back(report: Any) -> None:
    assert not report.fell_back, f"fell back: {report.fallback_reason}"


def _assert_moved(report: Any) -> None:
    moved = report.moved_ops and report.added_edges
    assert moved, f"rewritten, but no op was moved: {report.ops}"
