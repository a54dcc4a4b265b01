"""Trains with backups on rank 0; rank 1 offers itself to be killed in the third epoch.

killed_worker.py FOLDER {wait | go | short | stop}: with short, rank 1 has half of the data of its epochs,
with stop it stops in the middle of the first.
"""

from __future__ import annotations

import os
import sys
import time
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).parent))


def main() -> None:
    folder, what = Path(sys.argv[1]), sys.argv[2]
    from tf_ooo import data_parallel

    engine = data_parallel.connect()
    import keras
    import training as t
    from checks_fit import CountSteps

    import tf_ooo
    from tf_ooo.data_parallel import fit

    class Wait(keras.callbacks.Callback):
        def on_epoch_begin(self, epoch: int, logs: Any = None) -> None:
            self.epoch = epoch

        def on_train_batch_begin(self, batch: int, logs: Any = None) -> None:
            if what == "wait" and engine.rank == 1 and (self.epoch, batch) == (2, 3):
                (folder / "pid.tmp").write_text(str(os.getpid()))
                (folder / "pid.tmp").rename(folder / "pid")
                time.sleep(600)

    model = t.compiled(t.with_batch_norm(), keras.optimizers.Adam(0.01), rank=engine.rank)
    backup = [keras.callbacks.BackupAndRestore(str(folder / "backup"))] if engine.rank == 0 else []
    callbacks = [*backup, tf_ooo.OOOBackprop(mode="data_parallel"), Wait()]
    started = []
    callbacks.append(keras.callbacks.LambdaCallback(on_epoch_begin=lambda epoch, logs: started.append(epoch)))
    if what == "short":
        callbacks = [tf_ooo.OOOBackprop(mode="data_parallel")]
        t.fit(model, t.data(engine.rank, 40 if engine.rank else 80), callbacks, epochs=2, steps_per_epoch=10)
    if what == "stop":
        fit._STOPPED_S = 2.0
        stops = [CountSteps(stop_at=4)] if engine.rank else []
        t.fit(model, t.data(engine.rank, 80), [tf_ooo.OOOBackprop(mode="data_parallel"), *stops], epochs=2)
    t.fit(model, t.data(engine.rank, 80), callbacks, epochs=5)
    print(f"rank {engine.rank} trained epochs {started}", flush=True)
    if engine.rank == 0:
        (folder / "weights").write_bytes(b"".join(w.numpy().tobytes() for w in model.trainable_weights))


if __name__ == "__main__":
    main()
