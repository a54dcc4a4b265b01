"""What ends a fit of a model whose variables are on other devices, whatever happens."""

from __future__ import annotations

import logging
from collections.abc import Sequence
from typing import Any

from tf_ooo.compat import train_function
from tf_ooo.costs.profile import StepProfiler
from tf_ooo.errors import BackendError
from tf_ooo.fit.guard import Guard
from tf_ooo.fit.uncompiled import Uncompiled
from tf_ooo.modes.pipeline.checks import lost_text
from tf_ooo.options import DeviceOptions
from tf_ooo.report.report import Report
from tf_ooo.rewriting.request import RewriteRequest
from tf_ooo.rewriting.result import RewriteResult
from tf_ooo.tracing.step import StepFunctions
from tf_ooo.tracing.variables import Moved

_LOG = logging.getLogger("tf_ooo")


class MovedFit:
    """Puts variables and the train function back: at the end, after an error, before the next fit.

    Attributes:
        report: of the model trained last.
        devices: full names.
    """

    def __init__(self, options: DeviceOptions) -> None:
        self.options = options
        self.report = Report(mode=options.mode)
        self.devices: tuple[str, ...] = ()
        self._target: Any = None
        self._model: Any = None
        self._moved: Moved | None = None
        self._functions: StepFunctions | None = None
        self._request: RewriteRequest[RewriteResult] | None = None
        self._profiler: StepProfiler | None = None
        self._replaced = False
        self._seen = 0  # steps before the plan
        self._guard: Guard | None = None
        self._uncompiled = Uncompiled()

    @property
    def guard(self) -> Guard:
        """Of the fit that runs."""
        assert self._guard is not None  # for mypy: begin has run
        return self._guard

    def epoch_begin(self, epoch: int) -> None:
        """Nothing to do."""

    def settle(self) -> None:
        """Before anybody sees the weights between batches: nothing to do."""

    def saving(self) -> None:
        """Before the model is saved between batches."""
        self.settle()

    def test_begin(self) -> None:
        """Nothing to do."""

    def _end_replaced(self) -> None:
        """Before another train function is made: by the next ``fit``, or within this one."""
        self.end()
        self._replaced, self._seen = True, 0

    def end(self) -> None:
        """Puts variables and the model's own train function back; does nothing the second time."""
        lost = self._ended()
        if lost:
            _LOG.warning("%s", lost_text(lost))

    def _ended(self) -> list[str]:
        """Like :meth:`end`; names the variables that are lost."""
        if self._guard is not None:
            self._guard.close()
            self._guard = None
        if self._profiler is not None:
            self._profiler.close()
            self._profiler = None
        lost = self._put_back()
        self._uncompiled.put_back()
        if self._model is not None:
            train_function.remove_train_function(self._model)
            self._model = None
        return lost

    def _put_back(self) -> list[str]:
        """Variables to where they were before; names those that are lost."""
        if self._request is not None:
            self._request.close()
        self._request, self._functions = None, None
        if self._moved is None:
            return []
        # Asked first: a read from a worker that has just died would wait for ever.
        getattr(self._target, "lost", dict)()
        lost = self._moved.restore(getattr(self._target, "reachable", lambda device: True))
        self._moved = None
        return lost

    def _failed(self, error: BaseException) -> BaseException:
        """Ends the fit; what the error is to be raised as."""
        explained = self._explained(error) if isinstance(error, Exception) else error
        self.end()
        return explained

    def _gone(self, lost: Sequence[str]) -> Exception:
        """What variables whose device is gone are raised as: names the worker, where there is one."""
        error = RuntimeError(lost_text(lost))
        explained = self._explained(error)
        return BackendError(str(error)) if explained is error else explained

    def _explained(self, error: Exception) -> Exception:
        explain = getattr(self._target, "explain", None)
        explained: Exception = error if explain is None else explain(error)
        return explained
