"""Figures of whole models, and their tables on a terminal."""

from __future__ import annotations

import statistics
from collections.abc import Iterator

from rich.console import Console

from bench import tables
from bench.engines.ways import OF_WHOLE, PACKED, TORCH

NONE = "-"


def figures(comparison: dict, way: str) -> dict | None:
    """Medians over the rounds; None where a way has none. Rates are of tokens a second, of all texts together.

    prefill, by tokens of one text, and decode, by (texts, tokens of each before): rate, and ratio: how many times as fast as
    the way beside it, None where there is none. decode also: of_limit, the time that reading a step's bytes takes as a share of
    the time, None where no way counted experts. resident, mapped, packed: bytes after loading; packed: of what the process says
    that it holds. load: seconds.
    """
    rounds = [row for row in comparison["rounds"] if way in row["ways"]]
    if not rounds:
        return None
    loaded = comparison["ways"][way]["load"]
    found = {"prefill": {}, "decode": {}, "load": loaded["seconds"], "packed": sum(loaded["bytes"].values())}
    found |= {name: loaded[name] for name in ("resident", "mapped")}
    for index, call in enumerate(rounds[0]["ways"][way]):
        batch, prompt, new = call["batch"], call["prompt"], call["new"]
        if batch == 1 and new == 1:
            found["prefill"][prompt] = _rates(comparison, way, index, "prefill", prompt)
        if new > 1:
            shares = [share for row in rounds if (share := _of_limit(comparison, way, row, index)) is not None]
            decode = _rates(comparison, way, index, "decode", batch * (new - 1))
            found["decode"][batch, prompt] = decode | {"of_limit": statistics.median(shares) if shares else None}
    return found


def ratio(comparison: dict, way: str, other: str, index: int, phase: str) -> float | None:
    """How many times as fast a way is as another one: the median over the rounds of one number. None where one has none."""

    def seconds(name: str) -> dict[int, float]:
        rounds = comparison["rounds"]
        return {row["number"]: row["ways"][name][index][phase]["seconds"] for row in rounds if name in row["ways"]}

    ours, theirs = seconds(way), seconds(other)
    ratios = [theirs[number] / ours[number] for number in ours if number in theirs]
    return statistics.median(ratios) if ratios else None


def _rates(comparison: dict, way: str, index: int, phase: str, tokens: int) -> dict:
    seconds = [row["ways"][way][index][phase]["seconds"] for row in comparison["rounds"] if way in row["ways"]]
    beside = comparison["ways"][way]["beside"]
    found = ratio(comparison, way, beside, index, phase) if beside else None
    return {"rate": tokens / statistics.median(seconds), "ratio": found}


def _of_limit(comparison: dict, way: str, row: dict, index: int) -> float | None:
    """The time to read what a call's steps read, at the bandwidth measured before it, as a share of the call's time."""
    chosen = _chosen(comparison, row["number"], index)
    if chosen is None:
        return None
    call, about = row["ways"][way][index], comparison["ways"][way]
    cache = call["batch"] * comparison["cache_bytes"][str(call["prompt"])]
    experts = sum(count * nbytes for count, nbytes in zip(chosen, about["expert_bytes"], strict=True))
    nbytes = experts + (call["new"] - 1) * (about["load"]["bytes"]["dense"] + cache)
    return nbytes / row["reads"][way] / call["decode"]["seconds"]


def _chosen(comparison: dict, number: int, index: int) -> list[int] | None:
    """Distinct experts of each step of a call's decode, added up for each layer. llama.cpp has the same tokens."""
    for row in comparison["rounds"]:
        for calls in row["ways"].values() if row["number"] == number else ():
            if "experts" in calls[index]["decode"]:
                return calls[index]["decode"]["experts"]["experts"]
    return None


def show(result: dict, console: Console | None = None) -> None:
    console = console or tables.console(180)
    found = [comparison for comparison in result["comparisons"] if comparison["comparison"] in OF_WHOLE]
    for comparison in found:
        console.print(_table(comparison))
        for note in _notes(comparison):
            console.print(note, highlight=False, markup=False, soft_wrap=True)
    if found:
        console.print(f"{result['cpu']['name']}, {result['cpu']['threads']} threads; {result['date']}", highlight=False)


def _table(comparison: dict) -> object:
    measured = {way: found for way in comparison["ways"] if (found := figures(comparison, way))}
    texts = list(dict.fromkeys(key for found in measured.values() for key in found["decode"]))
    prompts = list(dict.fromkeys(tokens for found in measured.values() for tokens in found["prefill"]))
    heads = [f"decode\n{batch} text{'s' * (batch > 1)}\nafter {prompt:,}" for batch, prompt in texts]
    heads += [f"prefill\n{tokens:,}" for tokens in prompts]
    rows = []
    for way, found in measured.items():
        cells = [_cell(found["decode"].get(key)) for key in texts] + [_cell(found["prefill"].get(tokens)) for tokens in prompts]
        mapped = f", {found['mapped'] / 1e9:.1f} mapped" if found["mapped"] > found["packed"] / 100 else ""
        memory = f"{found['resident'] / 1e9:.2f} ({found['resident'] / found['packed']:.2f}x{mapped})"
        error = comparison["ways"][way]["error"]
        rows.append((way, *cells, memory, f"{found['load']:.1f}", NONE if error is None else f"{error:.2%}"))
    model = " ".join(filter(None, (comparison["model"], comparison.get("file"))))
    title = f"{model}, {comparison['layers']} of {comparison['of_layers']} layers, tokens a second"
    return tables.table(("way", *heads, "memory, GB\n(of packed)", "loading\ns", "error"), rows, title=title)


def _cell(phase: dict | None) -> str:
    if phase is None:
        return NONE
    limit = f", {phase['of_limit']:.0%}" if phase.get("of_limit") else ""
    return f"{phase['rate']:.3g}{limit}" + (f" ({phase['ratio']:.2f}x)" if phase["ratio"] else "")


def _notes(comparison: dict) -> Iterator[str]:
    count = len({row["number"] for row in comparison["rounds"]})
    how = (
        "by turns in the same rounds"
        if comparison["by_turns"]
        else "one process after the other, which rounds of one number pair"
    )
    yield f"{count} rounds, {how}. %: of the limit, the time to read a step's bytes at the read bandwidth before the turn"
    which = "on the same file" if "file" in comparison else "with dense matrices of as many bytes"
    yield f"(x): as fast as llama.cpp {which}, the median of the rounds' own ratios"
    if TORCH.name in comparison["ways"]:
        yield f"{PACKED.name} / {TORCH.name}: {', '.join(_of_torch(comparison)) or NONE}"
    yield from comparison["notes"]
    for way, about in comparison["ways"].items():
        if about["failure"]:
            yield f"out: {way}: {about['failure']}"


def _of_torch(comparison: dict) -> Iterator[str]:
    """What says whether dense matrices are packed by default."""
    calls = next((row["ways"][PACKED.name] for row in comparison["rounds"] if PACKED.name in row["ways"]), ())
    for index, call in enumerate(calls):
        phase = "decode" if call["new"] > 1 else "prefill"
        found = ratio(comparison, PACKED.name, TORCH.name, index, phase)
        if found:
            yield f"{phase} {call['batch']} x {call['prompt']}: {found:.2f}x"
