"""Command lines of ``tf-ooo`` that cannot be right."""

from __future__ import annotations

from pathlib import Path

from tests.malformed.case import Case, CommandFailed, Draw, Lost

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
    arguments, named = draw.choice((*lines, _worker, _worker, _run, _rarer_options, _names))(draw)
    text = "tf-ooo " + " ".join(map(repr, arguments))

    def attempt(folder: Path) -> None:
        fill(folder)
        invoke(folder, *arguments)

    return Case("commands", text, named, attempt)


_Line = tuple[list[str], list[list[str]]]


def _files(draw: Draw) -> _Line:
    """A file that is not there, a folder, or of another kind."""
    path = draw.choice(
        (*FILES, "folder", "no such file", "", ".", "/dev/null", "/proc/self/mem", "costs.json/x", "\n")
    )
    lines: tuple[list[str], ...] = (
        ["plan", path],
        ["plan", path, "--measure"],
        ["plan", "costs.json", "--gains", path, "--schedule", "multi_stream"],
        ["simulate", path, "costs.json"],
        ["simulate", "schedule.txt", path],
    )
    return draw.choice(lines), [[path.strip() or "File", "COSTS", "SCHEDULE"]]


def _outputs(draw: Draw) -> _Line:
    """Files that cannot be written."""
    path = draw.choice(
        ("folder", "costs.json/out", "/proc/out", "/dev/full", "", "x" * 300, "costs.json/a/out")
    )
    flag = draw.choice(("--out", "--costs-out", "--html", "--png", "--trace"))
    lines: tuple[tuple[list[str], str], ...] = (
        (["plan", "costs.json", flag, path], flag),
        (["simulate", "schedule.txt", "costs.json", "--html", path], "--html"),
        (["simulate", "schedule.txt", "costs.json", "--trace", path], "--trace"),
        (["demo", "--out", draw.choice(("costs.json", "schedule.txt"))], "--out"),
    )
    arguments, name = draw.choice(lines)
    return arguments, [[name, path or "--", "null", arguments[-1]]]


def _plan_options(draw: Draw) -> _Line:
    """An option's value that is none."""
    from tf_ooo.planning.policies import POLICIES

    wrong: dict[str, tuple[str, ...]] = {
        "--devices": ("0", "-1", "two", "1.5", "", "7", "1e3", "99999999999999999999"),
        "--microbatches": ("0", "x", "-5", "1.0"),
        "--link": (
            "fast",
            "",
            "25",
            "-1Gbit",
            "25Gbit,fast",
            "nanGbit",
            "1e999Gbit",
            ",20us",
            "25Gbit,20us,3",
        ),
        "--memory": ("0", "16", "16gb", "-1GiB", "nan", "1e99GiB", "much", ""),
        "--schedule": (draw.misspelt(draw.choice(list(POLICIES))), "", "ALL", "1f1b,gpipe"),
        "--mode": ("fast", "", "Pipeline", "auto"),
        "--option": ("group", "group=", "=2", "depth=3", "group=two", "group=0", "group=1e9", "", "k=nan"),
        "--batch": ("0", "x", "-1"),
        f"--{draw.misspelt('devices')}": ("2",),
    }
    name = draw.choice(list(wrong))
    value = draw.choice(wrong[name])
    schedule = ["--schedule", "modulo"] if name == "--option" else []
    shown = [name.lstrip("-"), value or "''"] if name != "--devices" else ["devices", "layers", "stages"]
    return ["plan", "costs.json", "--devices", "2", *schedule, name, value], [
        [*shown, *(["group"] if schedule else [])]
    ]


def _worker(draw: Draw) -> _Line:
    """Clusters and tasks that cannot be served; none of these gets as far as listening."""
    clusters = (
        *("", "localhost", "localhost:", ":2222", "localhost:0,localhost:1", "localhost:99999,localhost:2"),
        *(
            "a b:1",
            "localhost:1;localhost:2",
            "http://localhost:2222",
            "[::1:2222",
            "::1:2222",
            "localhost:-1",
        ),
        *(",", "a:1,a:1"),
        *("localhost:2222,", "localhost:22222222", "192.0.2.1:2222,192.0.2.2:2222", "{'worker': []}"),
        "no.such.host.invalid:2222,b:2",
    )
    cluster = draw.choice(clusters)
    task = draw.choice(("0", "0", "0", "7", "-1", "x", "1.5", ""))
    more = draw.choice(
        ([], [], [], ["--inter-op-threads", "1"], ["--intra-op-threads", "-1"], ["--task", "9"])
    )
    line = ["worker", "--cluster", cluster, "--task", task, *more]
    return line, [["cluster", "task", "threads", *(part for part in cluster.split(",") if part)]]


def _run(draw: Draw) -> _Line:
    lines: tuple[tuple[list[str], str], ...] = (
        (["run"], "SCRIPT"),
        (["run", "--workers", "1", "train.py"], "workers"),
        (["run", "--workers", "2", "--ranks", "2", "train.py"], "ranks"),
        (["run", "--ranks", "0", "train.py"], "ranks"),
        (["run", "--max-restarts", "-1", "train.py"], "max-restarts"),
        (["run", "--cluster", "localhost", "train.py"], "cluster"),
        (["run", "--cluster", "localhost:1,localhost:1", "train.py"], "localhost:1"),
        (["run", "--workers", "two", "train.py"], "workers"),
        (["run", "--max-restarts", "0", "no_such_script.py"], "no_such_script.py"),
        (["run", "--max-restarts", "2", "no_such_script.py"], "no_such_script.py"),
        (["run", "--max-restarts", "0", "folder"], "folder"),
        (["run", "--workers", "2", "--max-restarts", "0", "no_such_script.py"], "no_such_script.py"),
        (["run", "--max-restarts", "0", "--schedule", "x"], "schedule"),
        (["run", "--workers", "99999999", "train.py"], "workers"),
        (["run", ""], "SCRIPT"),
    )
    line, name = draw.choice(lines)
    return line, [[name]]


def _rarer_options(draw: Draw) -> _Line:
    """Options of plans and simulations that ``_plan_options`` leaves out."""
    on_paper = ["simulate", "schedule.txt", "costs.json"]
    table = ["plan", "costs.json", "--devices", "2"]
    lines: tuple[tuple[list[str], str], ...] = (
        *(([*on_paper, "--steps", steps], "steps") for steps in ("0", "-1", "many", "1.5", "")),
        *(([*on_paper, "--link", link], "link") for link in ("fast", "25", "-1Gbit", "nanGbit", "10Gbit,x")),
        *(([*on_paper, "--speeds", speeds], "speeds") for speeds in ("fast", "", "0,1", "1,-1", "nan,1")),
        *(([*table, "--speeds", speeds], "speeds") for speeds in ("1,x", "", "1,0", "1;1", "inf,1")),
        *(([*table, "--stages", stages], "stages") for stages in ("", "no_such_layer", ";", "a;b;c")),
        *(([*table, "--recompute", recompute], "recompute") for recompute in ("some", "", "1")),
        *(([*table, "--precision", precision], "precision") for precision in ("fp8", "", "float32")),
        *(([*table, "--memory", limits], "memory") for limits in ("1GiB,x", "1GiB,", "1GiB,0")),
        (["plan", "--model", "no_such_module:Model"], "no_such_module"),
        (["plan", "--model", "tests.malformed.case:NoSuchModel"], "NoSuchModel"),
        (["plan", "--model", "no_colon"], "no_colon"),
        (["plan", "--model", ""], "model"),
        (["plan", "--model", "tests.malformed.case:Case", "--import", "no_such_module"], "no_such_module"),
        (["demo", "--schedules", "auto"], "schedules"),
        (["doctor", "--cluster", "a:1", "more"], "more"),
        (["bench", "single"], "bench"),
    )
    line, name = draw.choice(lines)
    return line, [[name]]


def _names(draw: Draw) -> _Line:
    command = draw.choice(("info", "doctor", "demo", "plan", "simulate", "doctor", "run", "worker"))
    lines: tuple[tuple[list[str], str], ...] = (
        ([draw.misspelt(command)], "command"),
        ([command, "--no-such-option"], "no-such-option"),
        ([command.upper()], command.upper()),
        (["demo", "--epochs", draw.choice(("0", "-1", "x", "nan", ""))], "epochs"),
        (["demo", "--schedule", draw.choice(("zb_h1", "fast", "", "AUTO"))], "schedule"),
        (["info", "more"], "more"),
        (["doctor", "--cluster", draw.choice(("a", "a:0", "a:b", "a:1,a:1"))], "cluster"),
        (["plan"], "COSTS|MODEL"),
        (["simulate", "schedule.txt"], "COSTS"),
        (["simulate", "schedule.txt", "costs.json", "--steps", draw.choice(("0", "x", "-1"))], "steps"),
        (["plan", "costs.json", "costs.json"], "costs.json"),
        (["worker"], "--cluster"),
        (["--verbos", "info"], "--verbos"),
        (["run", "--no-such-option", "train.py"], "no-such-option"),
    )
    line, name = draw.choice(lines)
    return line, [[name]]
