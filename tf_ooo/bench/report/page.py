"""A page of Markdown whose tables are made from the kept runs, and whose words are written by hand.

A table stands between ``<!-- figures: data parallel -->`` and ``<!-- end of figures -->``.
"""

from __future__ import annotations

import re
from collections.abc import Mapping

from tf_ooo.errors import OptionsError

_BLOCK = re.compile(r"(<!-- figures: (?P<name>[^\n]*?) -->\n).*?(<!-- end of figures -->)", re.DOTALL)


def with_tables(page: str, tables: Mapping[str, str]) -> str:
    """The page with each table where its name stands.

    Raises:
        OptionsError: a name that no table has; no place for any table.
    """
    names = [match["name"] for match in _BLOCK.finditer(page)]
    unknown = [name for name in names if name not in tables]
    if unknown or not names:
        said = f"no table is called {unknown[0]!r}" if unknown else "it has no place for a table"
        raise OptionsError(
            f"{said}; places look like '<!-- figures: NAME -->', a line below it '<!-- end of figures -->', "
            f"with {', '.join(tables)} as NAME"
        )
    return _BLOCK.sub(lambda match: f"{match[1]}\n{tables[match['name']]}\n\n{match[3]}", page)
