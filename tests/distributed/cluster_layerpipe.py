"""Trains with late gradients over a cluster, prints the distance to training by hand; argument: addresses."""

import json
import os
import sys

os.environ["TF_CPP_MIN_LOG_LEVEL"] = "3"

import numpy as np
import tensorflow as tf

import tf_ooo
from tests.graph.layerpipe_by_hand import BATCHES, by_hand, coalesced_by_hand, data, perceptron
from tf_ooo.costs.table import CostTable


def distance(model, expected):
    return max(float(np.abs(a - b).max()) for a, b in zip(model.get_weights(), expected, strict=True))


def divided(addresses, parts, weights):
    """``schedule="layerpipe"``: a heavy layer's dO is computed on both workers."""
    seconds = [(1.0, 1.0), (1.0, 6.0), (1.0, 1.0), (1.0, 1.0)]
    costs = CostTable([tf_ooo.LayerCosts(forward, back, 1.0) for forward, back in seconds])
    options = {"devices": addresses, "costs": costs, "schedule": "layerpipe", "weights": weights}
    callback = tf_ooo.OOOBackprop(mode="layerpipe", **options)
    model = perceptron()
    model.fit(parts, verbose=0, callbacks=[callback])
    expected, _ = by_hand([row["delay_steps"] for row in callback.report.layers], weights)
    return {"distance": distance(model, expected), "divided": sorted(callback.report.layerpipe["divided"])}


def main(addresses):
    costs = CostTable([tf_ooo.LayerCosts(1.0, 1.0, 1.0) for _ in range(4)])
    callback = tf_ooo.OOOBackprop(mode="layerpipe", devices=addresses, costs=costs, schedule="pipedream")
    x, y = data()
    parts = tf.data.Dataset.from_generator(
        lambda: zip(x, y, strict=True),
        output_signature=tuple(tf.TensorSpec([None, part[0].shape[1]]) for part in (x, y)),
    )
    model = perceptron()
    model.fit(parts, verbose=0, callbacks=[callback])
    two = tf_ooo.OOOBackprop(mode="layerpipe", devices=addresses, costs=costs, schedule="pipedream_2bw")
    coalesced = perceptron()
    coalesced.fit(parts, verbose=0, callbacks=[two])
    layers = callback.report.layers
    delays = [row["delay_steps"] for row in layers]
    expected, _ = by_hand(delays, "stash")
    found = {
        "distance": distance(model, expected),
        "delays": delays,
        "devices": callback.report.layerpipe["devices"],
        "two_versions": distance(coalesced, coalesced_by_hand(2, BATCHES)[0]),
        **{weights: divided(addresses, parts, weights) for weights in ("stash", "ema", "latest")},
        "updates": int(coalesced.optimizer.iterations.numpy()),
        "steps": int(model.optimizer.iterations.numpy()) / BATCHES,
    }
    print(json.dumps(found), flush=True)
    os._exit(0)


if __name__ == "__main__":
    main(*sys.argv[1:])
