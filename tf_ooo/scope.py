"""Defines ``tf_ooo.enabled``: every tf.function first called inside is rewritten."""

from __future__ import annotations

import logging
from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager

from grappler_passes.compat import releases
from tf_ooo.errors import OOOError, OptionsError
from tf_ooo.fit.comparison import AS_ASKED
from tf_ooo.modes.by_name import Options, options_for_steps
from tf_ooo.modes.table import SingleDevice
from tf_ooo.options import ModeOptions
from tf_ooo.report.parts import Outcome, note_unused, save_timeline
from tf_ooo.report.report import Report
from tf_ooo.report.summary import environment
from tf_ooo.rewriting.request import RewriteSession
from tf_ooo.rewriting.result import fill_plan

_LOG = logging.getLogger("tf_ooo")


def enabled(options: Options | SingleDevice | None = None) -> AbstractContextManager[Report]:
    """Rewrites every training step that this thread traces inside the block; nothing is measured.

    Functions that are no training step run as they are.  Yields a Report, complete after the block.
    What was rewritten stays so.  A trace made after the block is not rewritten: call the function
    inside with each shape and type of arguments that it is to be rewritten for.  ``timeline`` is written at
    its end.

    Raises:
        OptionsError: not Options, or ``profile_steps`` or ``compare`` among them.
        BackendError: with ``strict``, the plug-in cannot be used.  Without, the block runs as it is.
        OOOError: with ``strict``, at the end of the block, why a rewrite failed.
        MemoryLimitError: from the call of the step, which has not run.
    """
    options = SingleDevice() if options is None else options
    if not isinstance(options, (Options, ModeOptions)):
        raise OptionsError(f"enabled() takes tf_ooo.Options(...), got {options!r:.80}")
    typed = options_for_steps("enabled()", options)
    why_not = "is not accepted: enabled() measures nothing; leave it out"
    if typed.profile_steps not in (0, SingleDevice.profile_steps):
        raise OptionsError(
            f"profile_steps={typed.profile_steps} {why_not}, or use OOOBackprop or tf_ooo.function"
        )
    if typed.compare is not None:
        raise OptionsError(f"compare={typed.compare} {why_not}")
    return _enabled(typed)


@contextmanager
def _enabled(options: SingleDevice) -> Iterator[Report]:
    report = Report(mode=options.mode, environment=environment())
    try:
        session = RewriteSession(options)
    except OOOError as error:
        if options.strict:
            raise
        if releases.is_news(str(error)):
            _LOG.warning("nothing is rewritten: %s", error)
        report.put(Outcome(True, str(error)))
        yield report
        return
    note_unused(report, options.given_for_xla)
    try:
        with session.tracing():
            yield report
    except Exception:
        session.failures.raise_refused()
        raise
    finally:
        session.close()
    fill_plan(report, session.result)
    if session.failures.first is not None:
        report.put(Outcome(True, session.failure() or ""))
    elif session.result is not None and not options.may_fall_back:
        report.put(Outcome(kept_because=AS_ASKED))
    if options.timeline is not None:
        save_timeline(report, options.timeline)
    session.failures.raise_first(options.strict)
