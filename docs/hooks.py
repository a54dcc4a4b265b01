"""Pages of the site that stand elsewhere in the repository, for mkdocs: changelog, contributing, examples.

mkdocs looks for links from the docs folder on; those files say ``docs/...``.
"""

from __future__ import annotations

import ast
import re
from pathlib import Path
from typing import Any

from mkdocs.structure.files import File

ROOT = Path(__file__).parents[1]
PAGES = {"CHANGELOG.md": "changelog.md", "CONTRIBUTING.md": "contributing.md"}
TO_EXAMPLES = "examples.md"


def on_files(files: Any, config: Any) -> Any:
    """Adds the pages to those of the docs folder."""
    for source, page in PAGES.items():
        text = within_docs((ROOT / source).read_text())
        files.append(File.generated(config, page, content=text))
    files.append(File.generated(config, TO_EXAMPLES, content=examples()))
    return files


def on_page_markdown(markdown: str, **_: Any) -> str:
    """Examples are files of the repository, and on the site parts of one page."""
    return re.sub(r"\]\((?:\.\./)*examples/([\w./]+)\)", rf"]({TO_EXAMPLES}#\1)", markdown)


def within_docs(text: str) -> str:
    """Links of a file beside the docs folder, from within that folder."""
    return re.sub(r"\]\(docs/", "](", text)


def examples() -> str:
    """All examples as they are, each below its name."""
    parts = ["# Examples\n\nEach is a file in `examples/`. Run it with `python`.\n"]
    for file in sorted((ROOT / "examples").iterdir()):
        if file.suffix not in (".py", ".yaml"):
            continue
        text = file.read_text()
        language = file.suffix.removeprefix(".").replace("py", "python")
        parts.append(f"## {_title(file, text)} {{#{file.name}}}\n\n```{language}\n{text}```\n")
    return "\n".join(parts)


def _title(file: Path, text: str) -> str:
    """Its name, and the first line of its docstring."""
    said = ast.get_docstring(ast.parse(text)) if file.suffix == ".py" else None
    return f"`{file.name}`: {said.splitlines()[0]}" if said else f"`{file.name}`"
