"""Defines the command line ``tf-ooo``: ``info``, ``doctor``, ``demo``, ``plan``, ``simulate``, ``run``,
``worker``.

Modules here import neither TensorFlow nor Keras before a command needs them.
"""

from __future__ import annotations

import logging
import os
import sys
from typing import Any

import click

from tf_ooo.cli.about import demo, info
from tf_ooo.cli.checks import doctor
from tf_ooo.cli.plan import plan, simulate
from tf_ooo.cli.worker import run, worker
from tf_ooo.errors import OOOError
from tf_ooo.version import __version__

__all__ = ["main"]

_TENSORFLOW = ("tensorflow", "keras")


class Refused(click.ClickException):
    """Turns an error of the library into one line and exit code 2, as for a wrong option."""

    exit_code = 2


class _OneLineErrors(click.Group):
    def invoke(self, ctx: click.Context) -> Any:
        try:
            return super().invoke(ctx)
        except OOOError as error:
            raise Refused(str(error)) from error
        except ModuleNotFoundError as error:
            name = (error.name or "").partition(".")[0]
            if name not in _TENSORFLOW:
                raise
            raise Refused(
                f"this needs TensorFlow with Keras, and {name} is not installed here: pip install '.[cpu]' "
                "or '.[gpu]' (plan and simulate of files with costs need neither)"
            ) from error


@click.group(cls=_OneLineErrors, context_settings={"help_option_names": ["-h", "--help"]})
@click.version_option(__version__, prog_name="tf-ooo")
def main() -> None:
    """Out-of-order backprop for unmodified TensorFlow and Keras."""
    os.environ.setdefault("TF_CPP_MIN_LOG_LEVEL", "2")
    logging.basicConfig(format="%(name)s: %(message)s", stream=sys.stderr)
    logging.getLogger("tf_ooo").setLevel(logging.WARNING)


for _command in (info, doctor, demo, plan, simulate, run, worker):
    main.add_command(_command)
