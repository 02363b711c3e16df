"""The tables of docs/performance.md, of other pages and of README, from all files of bench/results.

Each stands between marks that name it.
"""

from __future__ import annotations

import functools
import re
from collections.abc import Iterable
from pathlib import Path

from bench import full_tables, page_layers, page_text, readme, soak
from bench.distributed import forecast
from bench.distributed import report as distributed
from bench.full_tables import Row, Tables
from bench.results_file import Results, ResultsError, read_all

DOCS = Path(__file__).resolve().parents[1] / "docs"
PAGE, DISTRIBUTED, RELIABILITY = DOCS / "performance.md", DOCS / "several-machines.md", DOCS / "reliability.md"


def write() -> None:
    """Put the tables of all results into the pages."""
    for page, tables in PAGES.items():
        page.write_text(filled(page.read_text(), read_all(), tables))


def filled(text: str, found: list[Results], tables: Tables) -> str:
    """The text with all tables in it. Raises ValueError where it lacks a mark."""
    for name, make in tables.items():
        heads, rows = make(found)
        text = replaced(text, name, markdown(heads, rows) if rows else "No results file has these yet.\n")
    return text


def replaced(text: str, name: str, section: str) -> str:
    """The text with what stands between the marks of that name replaced."""
    begin, end = f"<!-- table: {name} -->\n", f"<!-- end of {name} -->"
    pattern = re.compile(f"{re.escape(begin)}.*?{re.escape(end)}", re.DOTALL)
    if not pattern.search(text):
        raise ValueError(f"expected the marks {begin.strip()!r} and {end!r}, found none or only one")
    return pattern.sub(lambda _: begin + section + end, text)


def markdown(heads: Row, rows: Iterable[Row]) -> str:
    return "".join(f"| {' | '.join(line)} |\n" for line in (heads, ("---",) * len(heads), *rows))


def full(found: list[Results], word: str = "") -> str:
    """Every table with all its columns, as Markdown, of the files whose names have the word in them.

    Raises ResultsError where there is none.
    """
    chosen = [results for results in found if word in results.file_name]
    if not chosen:
        names = ", ".join(results.file_name for results in found)
        raise ResultsError(f"--show {word}: expected a part of a file's name, such as one of {names}")
    made = {name: make(chosen) for name, make in full_tables.TABLES.items()}
    return "\n".join(f"## {name}\n\n{markdown(heads, rows)}" for name, (heads, rows) in made.items() if rows)


TABLES: Tables = {
    "cpus": page_layers.cpus,
    "whole": functools.partial(page_text.texts, section="whole"),
    "long texts": functools.partial(page_text.texts, section="whole", long=True),
    "gguf": functools.partial(page_text.texts, section="gguf"),
    "cold": page_text.cold,
    "transformers": page_text.transformers,
    "vllm": page_text.vllm,
    "vllm servers": page_text.vllm_servers,
    "vllm dense": page_text.vllm_dense,
    "formats": page_layers.formats,
    "ways": page_layers.ways,
    "peers": page_layers.peers,
    "linear peers": page_layers.linear,
    "modes": page_layers.activation_modes,
    "training": page_layers.training,
    "loading": page_layers.loading,
}
#: Each page's tables.
PAGES: dict[Path, Tables] = {
    PAGE: TABLES,
    DISTRIBUTED: {
        "distributed": distributed.gains,
        "distributed forecast": forecast.page_table,
        "distributed assumptions": forecast.assumptions,
    },
    RELIABILITY: {"soak": soak.table, "terms": soak.terms},
    readme.PAGE: {"text": readme.text, "weights": readme.table},
}
