"""Figures of a result, and its tables on a terminal."""

from __future__ import annotations

import statistics
from collections.abc import Iterator

from rich.console import Console

from bench import tables
from bench.engines.ways import OF_EXPERTS

NONE = "-"


def figures(comparison: dict, way: str) -> dict | None:
    """Medians over the rounds; None where a way has none. Rates are of tokens a second, of all texts together.

    prefill, by tokens of one text, and decode, by texts: rate, and lead: by how much the base's call is faster, None for the
    base itself; share: of the time, in the experts. decode also: read, bytes a second of distinct experts' weights in the
    experts' time, and of_read, as a share of the round's read bandwidth.
    peak: bytes while it generated. load: what the worker said.
    """
    rounds = [row for row in comparison["rounds"] if way in row["ways"]]
    if not rounds:
        return None
    about = comparison["ways"][way]
    found = {"prefill": {}, "decode": {}, "load": about["load"]}
    found["peak"] = max(call["peak"] for row in rounds for call in row["ways"][way])
    for index, call in enumerate(rounds[0]["ways"][way]):
        calls = [(row, row["ways"][way][index]) for row in rounds]
        if call["batch"] == 1:
            found["prefill"][call["prompt"]] = _phase(comparison, way, index, "prefill", call["prompt"])
        if call["new"] > 1:
            decode = _phase(comparison, way, index, "decode", call["batch"] * (call["new"] - 1))
            rates = [_read(about, one["decode"]["experts"]) for _, one in calls]
            decode["read"] = statistics.median(rates)
            decode["of_read"] = statistics.median(rate / row["read"] for rate, (row, _) in zip(rates, calls, strict=True))
            found["decode"][call["batch"]] = decode
    return found


def _phase(comparison: dict, way: str, index: int, phase: str, tokens: int) -> dict:
    def took(row: dict, name: str) -> float:
        return row["ways"][name][index][phase]["seconds"]

    base = comparison["base"]
    rounds = [row for row in comparison["rounds"] if way in row["ways"]]
    leads = [took(row, way) / took(row, base) for row in rounds if base in row["ways"]]
    shares = [row["ways"][way][index][phase]["experts"]["seconds"] / took(row, way) for row in rounds]
    return {
        "rate": tokens / statistics.median(took(row, way) for row in rounds),
        "lead": statistics.median(leads) if leads and way != base else None,
        "share": statistics.median(shares),
    }


def _read(about: dict, experts: dict) -> float:
    return sum(experts["experts"]) * about["expert_bytes"] / experts["seconds"]


def wrong(result: dict) -> list[str]:
    """Ways whose logits were wrong."""
    return [
        f"{comparison['model']}: {way}"
        for comparison in result["comparisons"]
        for way, about in comparison["ways"].items()
        if (about["failure"] or "").startswith("WRONG")
    ]


def show(result: dict, console: Console | None = None) -> None:
    console = console or tables.console(160)
    for comparison in result["comparisons"]:
        if comparison["comparison"] not in OF_EXPERTS:
            continue
        console.print(_table(comparison))
        for note in _notes(comparison):
            console.print(note, highlight=False, markup=False, soft_wrap=True)
    console.print(f"{result['cpu']['name']}, {result['cpu']['threads']} threads; {result['date']}", highlight=False)


def _table(comparison: dict) -> object:
    measured = {way: found for way in comparison["ways"] if (found := figures(comparison, way))}
    prompts = list(dict.fromkeys(tokens for found in measured.values() for tokens in found["prefill"]))
    texts = list(dict.fromkeys(count for found in measured.values() for count in found["decode"]))
    heads = [f"prefill\n{tokens}" for tokens in prompts]
    heads += [f"decode\n{count} text{'s' * (count > 1)}" for count in texts]
    heads += ["experts'\nshare", "experts\nread GB/s", "of\nread", "memory\nGB", "loading\ns", "error"]
    rows = []
    for way, found in measured.items():
        cells = [_rate(found["prefill"].get(tokens)) for tokens in prompts] + [_rate(found["decode"].get(n)) for n in texts]
        one = found["decode"][texts[0]]
        load, error = found["load"], comparison["ways"][way]["error"]
        about = [f"{one['share']:.0%}", f"{one['read'] / 1e9:.1f}", f"{one['of_read']:.0%}", f"{found['peak'] / 1e9:.2f}"]
        rows.append((way, *cells, *about, f"{load['seconds']:.1f}", NONE if error is None else f"{error:.2%}"))
    title = f"{comparison['model']}, {comparison['layers']} of {comparison['of_layers']} layers, tokens a second"
    return tables.table(("way", *heads), rows, title=title)


def _rate(phase: dict | None) -> str:
    if phase is None:
        return NONE
    return f"{phase['rate']:.3g}" + (f" ({phase['lead']:.2f}x)" if phase["lead"] else "")


def _notes(comparison: dict) -> Iterator[str]:
    count = len(comparison["rounds"])
    yield f"(x): how many times as fast {comparison['base']} is, the median of the rounds' own ratios; {count} rounds"
    yield "experts: of decode with one text; the read bandwidth is of the same rounds. loading: bfloat16 is made, not read"
    for way, about in comparison["ways"].items():
        if about["failure"]:
            yield f"out: {way}: {about['failure']}"
