"""``tf-ooo worker``: a process that computes stages of a pipeline."""

from __future__ import annotations

import click


@click.command()
@click.option("--cluster", required=True, metavar="HOST:PORT,...",
              help="Addresses of all tasks, the same list everywhere; 0 is where fit runs.")  # fmt: skip
@click.option("--task", type=click.IntRange(0), required=True, help="Which of them this process is.")
@click.option("--inter-op-threads", type=click.IntRange(4), help="Ops side by side; default: one per core.")
@click.option("--intra-op-threads", type=click.IntRange(0), default=0, show_default=True,
              help="Within one op; 0: one per core.")  # fmt: skip
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

    serve(
        cluster, task, inter_op_threads, intra_op_threads, insecure_network, say=lambda text: click.echo(text)
    )
