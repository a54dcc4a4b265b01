"""Joins a cluster and trains a little on it; prints JSON lines.  Arguments: addresses, what to do."""

import dataclasses
import json
import os
import sys
import time

os.environ["TF_CPP_MIN_LOG_LEVEL"] = "3"

import tensorflow as tf

from tf_ooo.errors import OOOError
from tf_ooo.pipeline.cluster import connect


def say(**what):
    print(json.dumps(what), flush=True)


def step_on(devices, links=40):
    """A step whose activations cross every link many times, and a variable on each device."""
    weights = []
    for device in devices:
        with tf.device(device):
            weights.append(tf.Variable(tf.eye(256)))

    @tf.function
    def step(x):
        for number in range(links * len(devices)):
            place = number % len(devices)
            with tf.device(devices[place]):
                x = tf.matmul(tf.matmul(x, weights[place]), weights[place])
        return tf.reduce_sum(x)

    return step


def main(addresses, what):
    before = tf.Variable(3.0)  # made before the cluster is joined, and good afterwards
    cluster = connect(addresses, wait_s=20.0, silence_s=6.0)
    again = connect(addresses) is cluster
    say(devices=cluster.devices, own_task=cluster.own_task, again=again, before=float(before))
    if what == "link":
        say(**dataclasses.asdict(cluster.link))
        return
    x = tf.ones((64, 256))
    traced = [] if what == "tracing" else [step_on(cluster.devices)]
    say(total=float(traced[0](x)) if traced else None)
    sys.stdin.readline()  # between steps: the worker is killed before this line comes
    ended = time.monotonic() + 100
    try:
        while time.monotonic() < ended:
            (traced[0] if traced else step_on(cluster.devices))(x).numpy()
    except Exception as error:
        say(error=str(cluster.explain(error)), kind=type(cluster.explain(error)).__name__)
        try:
            connect(addresses)
        except OOOError as refused:
            say(refused=str(refused))
        os._exit(0)


if __name__ == "__main__":
    try:
        main(*sys.argv[1:])
    except OOOError as error:
        say(error=str(error), kind=type(error).__name__)
