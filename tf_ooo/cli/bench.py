"""``tf-ooo bench``: benchmarks to run on one's own machine."""

from __future__ import annotations

import click


@click.group()
def bench() -> None:
    """Benchmarks to run on your own machine."""


@bench.command("data-parallel", add_help_option=False, context_settings={"ignore_unknown_options": True})
@click.argument("arguments", nargs=-1, type=click.UNPROCESSED)
def data_parallel(arguments: tuple[str, ...]) -> None:
    """Data parallel training against stock Horovod; --help lists its options."""
    from tf_ooo.bench.data_parallel.command import main  # noqa: PLC0415 - only where it is asked for

    main(arguments)


@bench.command("pipeline", add_help_option=False, context_settings={"ignore_unknown_options": True})
@click.argument("arguments", nargs=-1, type=click.UNPROCESSED)
def pipeline(arguments: tuple[str, ...]) -> None:
    """Pipeline schedules against each other on worker processes; --help lists its options."""
    from tf_ooo.bench.pipeline.command import main  # noqa: PLC0415 - only where it is asked for

    main(arguments)


@bench.command("single", add_help_option=False, context_settings={"ignore_unknown_options": True})
@click.argument("arguments", nargs=-1, type=click.UNPROCESSED)
def single(arguments: tuple[str, ...]) -> None:
    """One GPU: dW on side streams against stock XLA; --help lists its options."""
    from tf_ooo.bench.single.command import main  # noqa: PLC0415 - only where it is asked for

    main(arguments)


@bench.command("layerpipe", add_help_option=False, context_settings={"ignore_unknown_options": True})
@click.argument("arguments", nargs=-1, type=click.UNPROCESSED)
def layerpipe(arguments: tuple[str, ...]) -> None:
    """LayerPipe against PipeDream on worker processes; --help lists its options."""
    from tf_ooo.bench.layerpipe.command import main  # noqa: PLC0415 - only where it is asked for

    main(arguments)
