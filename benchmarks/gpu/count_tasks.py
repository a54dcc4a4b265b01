"""Print how many kernels a step's compiled tasks start, by stage, beside the same layers in one module."""

import json
from collections import Counter
from pathlib import Path

import click
import pandas as pd

from benchmarks.gpu.export_tasks import ONE_DEVICE, UPDATE
from benchmarks.report.tables import markdown


@click.command()
@click.argument("folder", type=click.Path(exists=True, file_okay=False, path_type=Path))
def main(folder: Path) -> None:
    """Read what export_tasks wrote, and run_hlo's lines for it in FOLDER/STEM.kernels."""
    rows = [line for path in sorted(folder.glob("*.json")) for line in counted(path)]
    click.echo(markdown(pd.DataFrame(rows)))


def counted(path: Path) -> list[dict[str, object]]:
    """Return a line for each stage of an exported pipeline, and one for all of it with what runs op by op."""
    said = json.loads(path.read_text())
    lines = map(json.loads, path.with_suffix(".kernels").read_text().splitlines())
    kernels = {line["way"]: line["kernels"] for line in lines}
    count, ours, updates = said["microbatches"], Counter[int](), Counter[int]()
    for stage, function, times in said["calls"]:
        ours[stage] += kernels[function] * times
        updates[stage] += kernels[function] * times if "_U_" in function else 0
    in_one_module = {stage: kernels[f"stage-{stage}"] * count + updates[stage] for stage in sorted(ours)}
    alone = sum(said["op_by_op"].values())
    of_keras = kernels[ONE_DEVICE] * count + kernels[UPDATE]
    table = [
        (f"stage {stage}", ours[stage], kernels_in_one) for stage, kernels_in_one in in_one_module.items()
    ]
    table.append(("all, with single ops, and Keras's step", ours.total() + alone, of_keras))
    return [
        {
            "Network": said["network"], "Schedule": said["schedule"], "Part": part,
            "Kernels": mine, "In one module": other, "Ratio": round(mine / other, 2),
        }
        for part, mine, other in table
    ]  # fmt: skip


if __name__ == "__main__":
    main()
