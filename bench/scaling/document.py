"""Tables in docs, between marks that name them."""

from __future__ import annotations

from bench.scaling.report import Cells


def markdown_table(cells: Cells) -> str:
    rules = ["---" if number < cells.names else "--:" for number in range(len(cells.heads))]
    return "".join(f"| {' | '.join(line)} |\n" for line in (cells.heads, rules, *cells.rows))


def replace_part(text: str, name: str, part: str) -> str:
    """text with what stands between the marks of that name replaced."""
    begin, end = f"<!-- scaling: {name} -->\n", f"<!-- end of {name} -->"
    before, found, rest = text.partition(begin)
    _, ended, after = rest.partition(end)
    if not found or not ended:
        raise ValueError(f"expected the marks {begin.strip()!r} and {end!r}, found {'only the first' if found else 'neither'}")
    return before + begin + part + end + after
