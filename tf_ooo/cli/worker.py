"""Defines ``tf-ooo worker``, a process that computes stages of a pipeline; ``tf-ooo run``, a script with
workers."""

from __future__ import annotations

import sys

import click


@click.command()
@click.option("--cluster", required=True, metavar="HOST:PORT,...",
              help="Name all tasks' addresses, the same list everywhere; 0 is where fit runs.")  # fmt: skip
@click.option("--task", type=click.IntRange(0), required=True, help="Say which of them this process is.")
@click.option("--inter-op-threads", type=click.IntRange(4), help="Run so many at once; default: 1 per core.")
@click.option("--intra-op-threads", type=click.IntRange(0), default=0, show_default=True,
              help="Take so many threads within one op; 0: one per core.")  # fmt: skip
@click.option("--insecure-network", is_flag=True,
              help="Listen where other machines reach it: whoever does can run anything here.")  # fmt: skip
def worker(
    cluster: str, task: int, inter_op_threads: int | None, intra_op_threads: int, insecure_network: bool
) -> None:
    """Serve one task of a cluster until SIGTERM or Ctrl-C.

    It listens at its own address alone.  Whoever can reach that can run anything that TensorFlow can: an
    address that other machines reach needs --insecure-network, in a network of its own.
    """
    from tf_ooo.hosts.worker import serve  # imports TensorFlow

    serve(cluster, task, inter_op_threads, intra_op_threads, insecure_network, say=click.echo)


@click.command(context_settings={"ignore_unknown_options": True, "allow_interspersed_args": False})
@click.option("--ranks", type=click.IntRange(1), help="Start so many processes by horovodrun.")
@click.option("--workers", type=click.IntRange(2, 256),
              help="Start so many tasks here: the script's, and workers for a pipeline.")  # fmt: skip
@click.option("--cluster", default="", metavar="HOST:PORT,...",
              help="Use workers that are started elsewhere, for a pipeline.")  # fmt: skip
@click.option("--max-restarts", type=click.IntRange(0), default=3, show_default=True,
              help="Start all again so often after a failure.")  # fmt: skip
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
