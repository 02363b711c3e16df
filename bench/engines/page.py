"""Whole models in a results file, in their whole table: of make bench-engines."""

from __future__ import annotations

import datetime
from collections.abc import Sequence

from bench.engines import whole_report
from bench.results_file import Results, digits

NONE = "-"


def section(saved: dict, comparisons: Sequence[str]) -> dict | None:
    """A results file's `whole` or `gguf`, of these comparisons that make bench-engines saved; None if it has none of them.

    Ways that failed are left out.
    """
    found = [
        {
            **{name: comparison[name] for name in ("model", "layers", "of_layers", "vocabulary", "by_turns")},
            **({"file": comparison["file"]} if "file" in comparison else {}),
            "way": [
                _way(name, about, figures)
                for name, about in comparison["ways"].items()
                if not about["failure"] and (figures := whole_report.figures(comparison, name))
            ],
        }
        for comparison in saved["comparisons"]
        if comparison["comparison"] in comparisons
    ]
    if not found:
        return None
    commit = {"commit": saved["commit"]} if saved["commit"] else {}
    date = datetime.date.fromisoformat(saved["date"])
    return {"date": date, **commit, "source": "make bench-engines", "comparison": found}


def _way(name: str, about: dict, found: dict) -> dict:
    def line(fields: dict) -> dict:
        known = {"ratio": fields["ratio"], "of_limit": fields.get("of_limit")}
        return {"tokens_s": digits(fields["rate"]), **{key: digits(value) for key, value in known.items() if value}}

    return {
        "name": name,
        **({"error": digits(about["error"])} if about["error"] is not None else {}),
        **{f"{what}_gb": digits(found[what] / 1e9) for what in ("resident", "mapped", "packed")},
        "load_s": digits(found["load"]),
        "prefill": [{"tokens": tokens, **line(fields)} for tokens, fields in found["prefill"].items()],
        "decode": [{"texts": texts, "after": after, **line(fields)} for (texts, after), fields in found["decode"].items()],
    }


def table(found: list[Results], section: str = "whole") -> tuple[tuple[str, ...], list[tuple[str, ...]]]:
    """A line for each way; columns for the numbers of texts and of tokens. section: "whole" or "gguf"."""
    entries = [
        (results.label, comparison, way)
        for results in found
        for comparison in results.data.get(section, {}).get("comparison", ())
        for way in comparison["way"]
    ]
    texts = sorted({(row["texts"], row["after"]) for *_, way in entries for row in way["decode"]}, key=lambda at: at[::-1])
    texts.sort(key=lambda at: at[0])
    tokens = sorted({row["tokens"] for *_, way in entries for row in way["prefill"]})
    rows = []
    for label, comparison, way in entries:
        decode = {(row["texts"], row["after"]): row for row in way["decode"]}
        prefill = {row["tokens"]: row for row in way["prefill"]}
        cells = [_cell(decode.get(at)) for at in texts] + [_cell(prefill.get(count)) for count in tokens]
        mapped = f", {way['mapped_gb']:.2g} of it mapped" if way["mapped_gb"] > way["packed_gb"] / 100 else ""
        memory = f"{way['resident_gb']:.3g} GB, {way['resident_gb'] / way['packed_gb']:.2f} x{mapped}"
        model = " ".join(filter(None, (comparison["model"], comparison.get("file"))))
        name = model, f"{comparison['layers']} of {comparison['of_layers']}", way["name"]
        rows.append((label, *name, *cells, memory, f"{way['load_s']:.2g} s"))
    heads = (*(texts_head(*at) for at in texts), *(f"prefill, {count:,} tokens" for count in tokens))
    return ("CPU", "model", "layers", "way", *heads, "memory", "loading"), rows


def texts_head(texts: int, after: int) -> str:
    return f"decode, {texts} text{'s' * (texts > 1)} after {after:,} tokens"


def _cell(row: dict | None) -> str:
    if row is None:
        return NONE
    limit = f", {100 * row['of_limit']:.0f} % of the limit" if "of_limit" in row else ""
    ratio = f", {row['ratio']:.2f} x llama.cpp" if "ratio" in row else ""
    return f"{row['tokens_s']:.3g} tokens/s{limit}{ratio}"
