"""Examples in docstrings as code on the site: for Markdown a line that begins with ``>>>`` is a quotation."""

from __future__ import annotations

import re
from typing import Any

import griffe

_EXAMPLE = re.compile(r"^(?P<indent> *)>>> .*(?:\n(?P=indent)(?:>>>|\.\.\.)(?: .*)?)*", re.MULTILINE)


def fenced(text: str) -> str:
    """Each block of lines with prompts in a fence of its own, without the prompts."""

    def fence(example: re.Match[str]) -> str:
        indent = example["indent"]
        lines = [line[len(indent) + 4 :] for line in example[0].split("\n")]
        return "\n".join(f"{indent}{line}".rstrip() for line in ["```python", *lines, "```"])

    return _EXAMPLE.sub(fence, text)


class FencedExamples(griffe.Extension):
    """For mkdocstrings, before a docstring is taken apart."""

    def on_instance(self, *, obj: griffe.Object, **_: Any) -> None:
        if obj.docstring is not None:
            obj.docstring.value = fenced(obj.docstring.value)
