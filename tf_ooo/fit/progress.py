"""Lines on long work before the first step that a progress bar shows: what is done, and how long it took."""

from __future__ import annotations

import contextlib
import threading
import time
from collections.abc import Callable, Iterator

import click

from tf_ooo.compat import keras_fits
from tf_ooo.report.later import if_it_takes
from tf_ooo.units import about_text

# Shorter work is not talked of.
AFTER_S = 2.0


@contextlib.contextmanager
def said(what: str, about_s: float = 0.0, more: str = "") -> Iterator[Callable[[float], None]]:
    """Says on stderr what is going on inside of the block, if that takes long; not in ``fit(verbose=0)``.

    ``about_s``: seconds that it will take, as far as is known; 0: nothing is.  ``more`` is said behind that.
    Yields a function to call with the seconds where they are known later.
    """
    verbose = keras_fits.argument_of_fit("verbose")
    if verbose in (0, None):
        yield lambda seconds: None
        return
    started, shown = time.perf_counter(), threading.Event()
    # After the first batch Keras' progress bar ends without a new line.
    in_bar = verbose != 2 and bool(keras_fits.argument_of_fit("begin_step"))
    line = "\n" if in_bar else ""

    def begin(seconds: float = 0.0) -> None:
        if shown.is_set() and not seconds:
            return
        about = f", about {about_text(seconds)}" if seconds else ""
        click.echo(f"{'' if shown.is_set() else line}tf_ooo: {what}{about}{more} ...", err=True)
        shown.set()

    def begin_if_long(seconds: float) -> None:
        if seconds > AFTER_S:
            begin(seconds)

    try:
        if about_s > AFTER_S:
            begin(about_s)
            yield begin_if_long
        else:
            with if_it_takes(AFTER_S, begin):
                yield begin_if_long
    finally:
        if shown.is_set():
            click.echo(f"tf_ooo: {what}: {time.perf_counter() - started:.1f} s", err=True)
