"""Pages of the site that stand elsewhere, for mkdocs: changelog, contributing, examples, ``tf-ooo --help``.

mkdocs looks for links from the docs folder on; those files say ``docs/...``.
"""

from __future__ import annotations

import ast
import json
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import click
from mkdocs.exceptions import PluginError
from mkdocs.structure.files import File

from tf_ooo.cli import main

ROOT = Path(__file__).parents[1]
PAGES = {"CHANGELOG.md": "changelog.md", "CONTRIBUTING.md": "contributing.md"}
TO_EXAMPLES = "examples.md"
COLUMNS, MOST_ENTRIES = 100, 20


def on_files(files: Any, config: Any) -> Any:
    """Adds the pages to those of the docs folder."""
    for source, page in PAGES.items():
        text = within_docs((ROOT / source).read_text())
        files.append(File.generated(config, page, content=text))
    files.append(File.generated(config, TO_EXAMPLES, content=examples()))
    files.append(File.generated(config, "command_line.md", content=command_line()))
    return files


def on_nav(nav: Any, **_: Any) -> Any:
    """PluginError: nobody reads a menu of more entries."""
    if len(nav.pages) > MOST_ENTRIES:
        raise PluginError(f"the menu has {len(nav.pages)} entries; at most {MOST_ENTRIES} are read")
    return nav


def on_page_markdown(markdown: str, **_: Any) -> str:
    """Examples are files of the repository, and on the site parts of one page."""
    return re.sub(r"\]\((?:\.\./)*examples/([\w./]+)\)", rf"]({TO_EXAMPLES}#\1)", markdown)


def on_page_content(html: str, page: Any, **_: Any) -> str:
    """PluginError: an example of a docstring came out as a quotation, with a bar beside each line."""
    if page.file.src_uri == "api.md" and "<blockquote>" in html:
        raise PluginError(f"api.md has {html.count('<blockquote>')} quotations; examples are to be code")
    return html


def within_docs(text: str) -> str:
    """Links of a file beside the docs folder, from within that folder."""
    return re.sub(r"\]\(docs/", "](", text)


def examples() -> str:
    """All examples as they are, each below its name."""
    parts = [
        "# Examples\n\nEach is a file in `examples/`. Run it with `python`.\n",
        "Examples 01, 02, 03, 05 and the first notebook need scikit-learn: `pip install '.[digits]'`.\n",
        *_shown(ROOT / "examples", ""),
    ]
    parts.append("## The paper's networks {#paper}\n\nIn `examples/paper/`.\n")
    parts += _shown(ROOT / "examples" / "paper", "paper/")
    parts.append("## Notebooks {#notebooks}\n\nIn `examples/notebooks/`; here without what cells say.\n")
    parts += map(_notebook, sorted((ROOT / "examples" / "notebooks").glob("*.ipynb")))
    return "\n".join(parts)


def _notebook(file: Path) -> str:
    """Its cells, under its name and its own title."""
    cells = [(cell["cell_type"], "".join(cell["source"])) for cell in json.loads(file.read_text())["cells"]]
    title, _, first = cells[0][1].removeprefix("# ").partition("\n")
    shown = [first.strip()]
    shown += (f"```python\n{text}\n```" if kind == "code" else text for kind, text in cells[1:])
    return f"## `{file.name}`: {title} {{#notebooks/{file.name}}}\n\n" + "\n\n".join(shown) + "\n"


def _shown(folder: Path, above: str) -> Iterator[str]:
    for file in sorted(folder.iterdir()):
        if file.suffix not in (".py", ".yaml"):
            continue
        text = file.read_text()
        language = file.suffix.removeprefix(".").replace("py", "python")
        yield f"## {_title(file, text)} {{#{above}{file.name}}}\n\n```{language}\n{text}```\n"


def _title(file: Path, text: str) -> str:
    """Its name, and the first line of its docstring."""
    said = ast.get_docstring(ast.parse(text)) if file.suffix == ".py" else None
    return f"`{file.name}`: {said.splitlines()[0]}" if said else f"`{file.name}`"


def command_line() -> str:
    """The help of each command."""
    parts = ["# Command line\n\n`tf-ooo` and `python -m tf_ooo` are the same.\n"]
    parts += (f"## {name}\n\n```text\n{text}\n```\n" for name, text in _helps(main, "tf-ooo", None))
    return "\n".join(parts)


def _helps(command: click.Command, name: str, parent: click.Context | None) -> Iterator[tuple[str, str]]:
    context = click.Context(command, parent, name.rpartition(" ")[2], max_content_width=COLUMNS)
    yield name, command.get_help(context)
    if isinstance(command, click.Group):
        for below in command.list_commands(context):
            below_it = command.get_command(context, below)
            if below_it is not None:
                yield from _helps(below_it, f"{name} {below}", context)
