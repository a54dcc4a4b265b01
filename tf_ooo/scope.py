"""``tf_ooo.enabled``: every tf.function first called inside is rewritten."""

from __future__ import annotations

import logging
from collections.abc import Iterator
from contextlib import contextmanager

from tf_ooo.errors import OOOError
from tf_ooo.options import Options
from tf_ooo.report import Report, fill_plan
from tf_ooo.session import RewriteSession

_LOG = logging.getLogger("tf_ooo")


@contextmanager
def enabled(options: Options | None = None) -> Iterator[Report]:
    """Rewrites every training step that this thread traces inside the block; nothing is measured.

    Functions that are no training step run as they are.  Yields a Report, complete after the block.
    What was rewritten stays so.  A trace made after the block is not rewritten: call the function
    inside with each shape and type of arguments that it is to be rewritten for.

    Raises:
        BackendError: with ``strict``, the plug-in cannot be used.  Without, the block runs as it is.
        OOOError: with ``strict``, at the end of the block, why a rewrite failed.
        MemoryLimitError: from the call of the step, which has not run.
    """
    options = options or Options()
    report = Report(mode=options.resolved_mode)
    try:
        session = RewriteSession(options)
    except OOOError as error:
        if options.strict:
            raise
        _LOG.warning("nothing is rewritten: %s", error)
        report.fell_back, report.fallback_reason = True, str(error)
        yield report
        return
    try:
        with session.tracing():
            yield report
    except Exception:
        session.raise_if_refused()
        raise
    finally:
        session.close()
    fill_plan(report, session.result)
    if session.error is not None:
        report.fell_back, report.fallback_reason = True, session.failure() or ""
        session.raise_if_failed(options.strict)
