"""Command lines of ``tf-ooo`` that cannot be right."""

from __future__ import annotations

import shlex
from pathlib import Path

from tests.harness.drawing import Draw
from tests.malformed.case import Case, CommandFailed, Lost

FILES = ("costs.json", "schedule.txt", "binary.json", "model.keras", "model.h5", "train.py", "gains.json")


def invoke(folder: Path, *arguments: object) -> str:
    """Runs ``tf-ooo`` with these; what it printed.

    Raises:
        CommandFailed: with what it printed, from what was raised inside, if that was no usage error.
        Lost: a file that stood there has another content.
    """
    from click.testing import CliRunner

    from tf_ooo.cli import main

    before = contents(folder)
    result = CliRunner().invoke(main, [str(argument) for argument in arguments], env={"COLUMNS": "400"})
    after = contents(folder)
    changed = [name for name, content in before.items() if after.get(name) != content]
    if result.exit_code and changed:
        raise Lost(f"{changed[0]} has been changed: {result.output}")
    if result.exit_code and after.keys() - before.keys():
        raise Lost(f"{sorted(after.keys() - before.keys())} were left behind: {result.output}")
    if result.exit_code:
        inside = None if isinstance(result.exception, SystemExit) else result.exception
        trace = f"Traceback: {type(inside).__name__}: {inside}" if inside is not None else ""
        raise CommandFailed(result.output + trace, result.exit_code) from inside
    return result.output


def contents(folder: Path) -> dict[str, bytes]:
    """Return the contents of all files."""
    return {str(path.relative_to(folder)): path.read_bytes() for path in folder.rglob("*") if path.is_file()}


def fill(folder: Path) -> None:
    """Files to be named: good ones, and such as are something else."""
    import tf_ooo
    from tests.malformed.costs import gains_text, good_text, layers

    (folder / "costs.json").write_text(good_text())
    (folder / "gains.json").write_text(gains_text())
    schedule = tf_ooo.plan(layers=layers(), devices=2, microbatches=4, schedule="1f1b")
    (folder / "schedule.txt").write_text(schedule.to_text())
    (folder / "binary.json").write_bytes(bytes(range(256)) * 4)
    (folder / "model.keras").write_bytes(b"PK\x03\x04 no archive")
    (folder / "model.h5").write_bytes(b"\x89HDF\r\n\x1a\n no file")
    (folder / "train.py").write_text("raise SystemExit(0)\n")
    (folder / "folder").mkdir()


def drawn_commands(draw: Draw) -> Case:
    """A command line, and what of it has to be named."""
    lines = (_files, _files, _outputs, _plan_options, _plan_options)
    line = draw.choice((*lines, _worker, _worker, _run, _rarer_options, _names))(draw)
    text = "tf-ooo " + " ".join(map(repr, line.words))

    def attempt(folder: Path) -> None:
        fill(folder)
        invoke(folder, *line.words)

    return Case("commands", text, [[word for word in line.named if word]], attempt)


class _Line:
    """A command line, of which one word must be named; ``?`` in the text stands for the value."""

    def __init__(self, text: str, *named: str, value: str = "") -> None:
        self.words = [value if word == "?" else word for word in shlex.split(text)]
        self.named = named


def _files(draw: Draw) -> _Line:
    """A file that is not there, a folder, or of another kind."""
    path = draw.choice(
        (*FILES, "folder", "no such file", "", ".", "/dev/null", "/proc/self/mem", "costs.json/x", "\n")
    )
    text = draw.choice(
        (
            "plan ?",
            "plan ? --measure",
            "plan costs.json --gains ? --schedule multi_stream",
            "simulate ? costs.json",
            "simulate schedule.txt ?",
        )
    )
    return _Line(text, path.strip() or "File", "COSTS", "SCHEDULE", value=path)


def _outputs(draw: Draw) -> _Line:
    """Files that cannot be written."""
    path = draw.choice(
        ("folder", "costs.json/out", "/proc/out", "/dev/full", "", "x" * 300, "costs.json/a/out")
    )
    plan = draw.choice(("--out", "--costs-out", "--html", "--png", "--trace"))
    simulate = draw.choice(("--html", "--trace"))
    text = draw.choice(
        (
            f"plan costs.json {plan} ?",
            f"simulate schedule.txt costs.json {simulate} ?",
            "demo --out costs.json",
            "demo --out schedule.txt",
        )
    )
    flag, last = text.split()[-2:]
    return _Line(text, flag, "null", path if last == "?" else last, "" if path else "--", value=path)


def _plan_options(draw: Draw) -> _Line:
    """An option's value that is none."""
    from tf_ooo.planning.policies import POLICIES

    links = ("fast", "", "25", "-1Gbit", "25Gbit,fast", "nanGbit", "1e999Gbit", ",20us", "25Gbit,20us,3")
    wrong: dict[str, tuple[str, ...]] = {
        "--devices": ("0", "-1", "two", "1.5", "", "7", "1e3", "99999999999999999999"),
        "--microbatches": ("0", "x", "-5", "1.0"),
        "--link": links,
        "--memory": ("0", "16", "16gb", "-1GiB", "nan", "1e99GiB", "much", ""),
        "--schedule": (draw.misspelt(draw.choice(list(POLICIES))), "", "ALL", "1f1b,gpipe"),
        "--mode": ("fast", "", "Pipeline", "auto"),
        "--option": ("group", "group=", "=2", "depth=3", "group=two", "group=0", "group=1e9", "", "k=nan"),
        "--batch": ("0", "x", "-1"),
        f"--{draw.misspelt('devices')}": ("2",),
    }
    name = draw.choice(list(wrong))
    value = draw.choice(wrong[name])
    named = [name.lstrip("-"), value or "''"] if name != "--devices" else ["devices", "layers", "stages"]
    schedule = "--schedule modulo" if name == "--option" else ""
    text = f"plan costs.json --devices 2 {schedule} {name} ?"
    return _Line(text, *named, "group" if schedule else "", value=value)


CLUSTERS = (
    "", "localhost", "localhost:", ":2222", "localhost:0,localhost:1", "localhost:99999,localhost:2", "a b:1",
    "localhost:1;localhost:2", "http://localhost:2222", "[::1:2222", "::1:2222", "localhost:-1", ",",
    "a:1,a:1", "localhost:2222,", "localhost:22222222", "192.0.2.1:2222,192.0.2.2:2222", "{'worker': []}",
    "no.such.host.invalid:2222,b:2",
)  # fmt: skip


def _worker(draw: Draw) -> _Line:
    """Clusters and tasks that cannot be served; none of these gets as far as listening."""
    cluster = draw.choice(CLUSTERS)
    task = draw.choice(("0", "0", "0", "7", "-1", "x", "1.5", ""))
    more = draw.choice(("", "", "", "--inter-op-threads 1", "--intra-op-threads -1", "--task 9"))
    text = f"worker --cluster ? --task {task or shlex.quote('')} {more}"
    return _Line(text, "cluster", "task", "threads", *cluster.split(","), value=cluster)


def _run(draw: Draw) -> _Line:
    lines = (
        ("run", "SCRIPT"),
        ("run --workers 1 train.py", "workers"),
        ("run --workers 2 --ranks 2 train.py", "ranks"),
        ("run --ranks 0 train.py", "ranks"),
        ("run --max-restarts -1 train.py", "max-restarts"),
        ("run --cluster localhost train.py", "cluster"),
        ("run --cluster localhost:1,localhost:1 train.py", "localhost:1"),
        ("run --workers two train.py", "workers"),
        ("run --max-restarts 0 no_such_script.py", "no_such_script.py"),
        ("run --max-restarts 2 no_such_script.py", "no_such_script.py"),
        ("run --max-restarts 0 folder", "folder"),
        ("run --workers 2 --max-restarts 0 no_such_script.py", "no_such_script.py"),
        ("run --max-restarts 0 --schedule x", "schedule"),
        ("run --workers 99999999 train.py", "workers"),
        ("run ''", "SCRIPT"),
    )
    return _Line(*draw.choice(lines))


PLAN, SIMULATE = "plan costs.json --devices 2 {}", "simulate schedule.txt costs.json {}"
# No option may have these values.
RARER = (
    (SIMULATE, "--steps", ("0", "-1", "many", "1.5", "")),
    (SIMULATE, "--link", ("fast", "25", "-1Gbit", "nanGbit", "10Gbit,x")),
    (SIMULATE, "--speeds", ("fast", "", "0,1", "1,-1", "nan,1")),
    (PLAN, "--speeds", ("1,x", "", "1,0", "1;1", "inf,1")),
    (PLAN, "--stages", ("", "no_such_layer", ";", "a;b;c")),
    (PLAN, "--recompute", ("some", "", "1")),
    (PLAN, "--precision", ("fp8", "", "float32")),
    (PLAN, "--memory", ("1GiB,x", "1GiB,", "1GiB,0")),
)
RARE_LINES = (
    ("plan --model no_such_module:Model", "no_such_module"),
    ("plan --model tests.malformed.case:NoSuchModel", "NoSuchModel"),
    ("plan --model no_colon", "no_colon"),
    ("plan --model ''", "model"),
    ("plan --model tests.malformed.case:Case --import no_such_module", "no_such_module"),
    ("demo --schedules auto", "schedules"),
    ("doctor --cluster a:1 more", "more"),
    ("bench single", "bench"),
)


def _rarer_options(draw: Draw) -> _Line:
    """Options of plans and simulations that ``_plan_options`` leaves out."""
    lines = [(text.format(f"{name} ?"), name[2:], each) for text, name, values in RARER for each in values]
    text, named, value = draw.choice([*lines, *((*line, "") for line in RARE_LINES)])
    return _Line(text, named, value=value)


def _names(draw: Draw) -> _Line:
    command = draw.choice(("info", "doctor", "demo", "plan", "simulate", "doctor", "run", "worker"))
    values: dict[str, tuple[str, ...]] = {
        "demo --epochs ?": ("0", "-1", "x", "nan", ""),
        "demo --schedule ?": ("zb_h1", "fast", "", "AUTO"),
        "doctor --cluster ?": ("a", "a:0", "a:b", "a:1,a:1"),
        "simulate schedule.txt costs.json --steps ?": ("0", "x", "-1"),
    }
    lines = (
        *((text, text.split("--")[1].split()[0]) for text in values),
        (draw.misspelt(command), "command"),
        (f"{command} --no-such-option", "no-such-option"),
        (command.upper(), command.upper()),
        ("info more", "more"),
        ("plan", "COSTS|MODEL"),
        ("simulate schedule.txt", "COSTS"),
        ("plan costs.json costs.json", "costs.json"),
        ("worker", "--cluster"),
        ("--verbos info", "--verbos"),
        ("run --no-such-option train.py", "no-such-option"),
    )
    text, named = draw.choice(lines)
    return _Line(text, named, value=draw.choice(values.get(text, ("",))))
