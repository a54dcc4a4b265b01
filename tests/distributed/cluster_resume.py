"""Trains with late gradients over a cluster, or goes on with that in another process.

Arguments: addresses, a folder, ``first`` or ``second``.  Prints the plan, and how far both ends are apart.
"""

import json
import os
import sys
from pathlib import Path

os.environ["TF_CPP_MIN_LOG_LEVEL"] = "3"

import keras
import numpy as np

import tf_ooo
from tests.graph.layerpipe_by_hand import distance
from tests.graph.layerpipe_fit import SavesEpoch, fitted, shortcuts
from tf_ooo.costs.table import CostTable


def first(folder, **options):
    """Measures, and trains two epochs; leaves a checkpoint of the first one's end."""
    model, callback = shortcuts(), tf_ooo.OOOBackprop(mode="layerpipe", profile_steps=1, **options)
    fitted(model, callback, 2, more=[SavesEpoch(folder / "model.keras")])
    callback.report.costs.save(folder / "costs.json")
    np.savez(folder / "end.npz", *model.get_weights())
    return callback, 0.0


def second(folder, **options):
    """Goes on from there, with those costs."""
    costs = CostTable.load(folder / "costs.json")
    model = keras.models.load_model(folder / "model.keras")
    callback = tf_ooo.OOOBackprop(mode="layerpipe", costs=costs, **options)
    fitted(model, callback, 2, initial_epoch=1)
    with np.load(folder / "end.npz") as end:
        return callback, distance(model.get_weights(), [end[name] for name in end.files])


def main(addresses, folder, part):
    run = {"first": first, "second": second}[part]
    callback, apart = run(Path(folder), devices=addresses, schedule="layerpipe")
    report = callback.report
    found = {"plan": report.planned.to_text(), "link_s": report.costs.link.latency_s, "distance": apart}
    print(json.dumps(found), flush=True)
    os._exit(0)


if __name__ == "__main__":
    main(*sys.argv[1:])
