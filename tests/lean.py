"""Checks that `make lint` runs: sentences in docstrings and comments, and a budget of lines for each room."""

import ast
import re
import sys
import tokenize
from collections import Counter
from collections.abc import Iterator
from pathlib import Path

ROOT = Path(__file__).parents[1]
READ = ("grappler_passes", "tf_ooo", "keras_callbacks", "benchmarks", "tests", "examples", "setup.py")
# A text that begins with one of these has its subject and its verb elsewhere, or nowhere.
OPENERS = re.compile(r"(Of|What|As|Which|Where|Whose|Those|That|Whether)\b")
VERB = (
    r"(?:is|are|was|were|has|have|had|does|do|did|can|cannot|could|may|might|must|will|would|should"
    r"|need|stay|take|run|wait|say|go|goe|get|give|keep|come|count|make|tell|stand|hold|train)s?"
)
# "That is", or a clause with its subject behind the comma that ends the opening one.
SENTENCE = re.compile(
    rf"(?:Those|That) {VERB}\b|(?:Where|As)\b[^:;]*"
    rf", (?!and |or |but |as |of |in |if |unless |with |which |that |where |whose |what )[^,:;]*\b{VERB}\b"
)
DOCUMENTED = (ast.Module, ast.ClassDef, ast.FunctionDef, ast.AsyncFunctionDef)


def is_fragment(text: str) -> bool:
    """Tell whether the first sentence begins with an opener and has no verb of its own."""
    sentence = re.split(r"(?<=[.!?])\s", " ".join(text.split()))[0]
    return bool(OPENERS.match(sentence)) and not SENTENCE.match(sentence)


def docstrings(source: str) -> Iterator[tuple[int, str]]:
    """Yield line and text of each docstring, those that follow a constant included."""
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, DOCUMENTED):
            for statement in node.body:
                value = statement.value if isinstance(statement, ast.Expr) else None
                if isinstance(value, ast.Constant) and isinstance(value.value, str):
                    yield statement.lineno, value.value


def comments(source: str) -> Iterator[tuple[int, str]]:
    """Yield line and text of each block of full-line comments."""
    block, last = list[str](), (0, 0)
    for token in tokenize.generate_tokens(iter(source.splitlines(keepends=True)).__next__):
        if token.type != tokenize.COMMENT or token.line[: token.start[1]].strip():
            continue
        row, column = token.start
        if block and (row, column) != (last[0] + 1, last[1]):
            yield last[0] - len(block) + 1, " ".join(block)
            block = []
        block.append(token.string.lstrip("#: "))
        last = row, column
    if block:
        yield last[0] - len(block) + 1, " ".join(block)


def fragments(root: Path, read: tuple[str, ...] = READ) -> list[str]:
    """Return ``file:line: text`` of each docstring or comment that is no sentence."""
    paths = [path for name in read for path in (sources(root / name) or [root / name])]
    return [
        f"{path.relative_to(root)}:{line}: no sentence: {text.strip().splitlines()[0]}"
        for path in paths
        if path.suffix == ".py"
        for line, text in (*docstrings(path.read_text()), *comments(path.read_text()))
        if is_fragment(text)
    ]


def sources(folder: Path) -> list[Path]:
    """Return the files of Python and C in a folder."""
    return sorted(path for path in folder.rglob("*") if path.suffix in (".py", ".pyi", ".c"))


def lines_of_rooms(root: Path, rooms: dict[str, int]) -> Counter[str]:
    """Count the lines of each room; a file belongs to the deepest folder that a room names."""
    room_of = {root / folder: room for room in rooms for folder in room.split()}
    lines: Counter[str] = Counter()
    for path in {path for folder in room_of for path in sources(folder)}:
        room = room_of[next(parent for parent in path.parents if parent in room_of)]
        lines[room] += len(path.read_text().splitlines())
    return lines


def over_budget(root: Path, rooms: dict[str, int]) -> list[str]:
    """Return a line for each room that has more lines than its budget."""
    return [
        f"{room}: {lines} lines, {lines - rooms[room]} above its budget in pyproject.toml"
        for room, lines in lines_of_rooms(root, rooms).items()
        if lines > rooms[room]
    ]


if __name__ == "__main__":
    import tomllib  # Python 3.10, which runs tests too, has none.

    table = tomllib.loads((ROOT / "pyproject.toml").read_text())["tool"]["tf_ooo"]["rooms"]
    sys.exit("\n".join(fragments(ROOT) + over_budget(ROOT, table)) or None)
