"""Draws how each way's devices spent a step, as rows of letters and colours on one scale."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from rich.text import Text

from tf_ooo.demo.training import AUTO, ONE_F_ONE_B, STOCK, Trained
from tf_ooo.units import seconds_text

# A column shows the task that runs at its middle; letters tell kinds apart where there are no colours.
_LOOKS = {"F": ("F", "white on blue"), "dO": ("O", "black on dark_orange"), "dW": ("W", "white on green")}
_IDLE = ("\N{MIDDLE DOT}", "dim")
_ROW = "  device {device} "
_TITLES = {
    STOCK: "stock fit, one device",
    ONE_F_ONE_B: "1F1B, as PyTorch and Megatron run it",
    AUTO: "tf_ooo, schedule='auto'",
}


def strips(ways: Sequence[Trained], columns: int) -> Iterator[Text]:
    """Yield a title and a row for each device of each way; all have the same scale, in so many columns."""
    longest_s = max(end for way in ways for *_, end in way.tasks)
    width = columns - len(_ROW.format(device=0))
    for way in ways:
        yield Text(f"{_TITLES[way.name]}: {seconds_text(way.step_s)} a step", style="bold")
        end_s = max(end for *_, end in way.tasks)
        count = max(1, round(width * end_s / longest_s))
        for device in sorted({task[0] for task in way.tasks}):
            yield _row(way, device, [(column + 0.5) * end_s / count for column in range(count)])
    legend = Text("  ")
    for kind, name in (("F", "forward"), ("dO", "output gradient"), ("dW", "weight gradient")):
        legend.append(*_LOOKS[kind]).append(f" {name} ({kind})   ")
    yield legend.append(*_IDLE).append(" waits")


def _row(way: Trained, device: int, moments_s: Sequence[float]) -> Text:
    row = Text(_ROW.format(device=device + 1))
    tasks = [(kind, start, end) for of, kind, start, end in way.tasks if of == device]
    for moment_s in moments_s:
        kind = next((kind for kind, start, end in tasks if start <= moment_s < end), "")
        row.append(*_LOOKS.get(kind, _IDLE))
    return row


def verdict(ways: Sequence[Trained]) -> str:
    """Say in a line how many times as fast ours is, and whether its weights are the same."""
    stock, other, ours = ways
    bits = "the same bits" if ours.same_bits else "OTHER WEIGHTS"
    return (
        f"auto is {other.step_s / ours.step_s:.2f} times as fast as 1F1B, with {bits}, and "
        f"{stock.step_s / ours.step_s:.2f} times as fast as stock on one device, whose weights differ by at "
        f"most {ours.difference:.0e} (micro-batches add up in another order)"
    )
