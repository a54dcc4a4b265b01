"""``tf-ooo run``: a training script with its workers or ranks, started again where one is lost."""

from __future__ import annotations

import sys

import click


@click.command(context_settings={"ignore_unknown_options": True, "allow_interspersed_args": False})
@click.option("--ranks", type=click.IntRange(1), help="So many processes, by horovodrun.")
@click.option("--workers", type=click.IntRange(2, 256),
              help="So many tasks on this machine: the script's and workers for a pipeline.")  # fmt: skip
@click.option("--cluster", default="", metavar="HOST:PORT,...",
              help="Workers that are started elsewhere, for a pipeline.")  # fmt: skip
@click.option("--max-restarts", type=click.IntRange(0), default=3, show_default=True,
              help="How often all is started again after a failure.")  # fmt: skip
@click.argument("script", nargs=-1, required=True, type=click.UNPROCESSED)
def run(
    ranks: int | None, workers: int | None, cluster: str, max_restarts: int, script: tuple[str, ...]
) -> None:
    """Run SCRIPT (Python, with its arguments), and start it again where a process of it is lost.

    The script has to go on from its last checkpoint, as with keras.callbacks.BackupAndRestore. With
    --workers or --cluster, OOOBackprop(mode="pipeline") without devices= uses the workers.
    """
    from tf_ooo.hosts.supervising import Job, supervise

    job = Job(script, ranks or 0, workers or 0, cluster)
    sys.exit(supervise(job, max_restarts, lambda text: click.echo(f"tf-ooo run: {text}")))
