"""Figures of a result, what a results file keeps of it, and its tables."""

from __future__ import annotations

import datetime
import statistics
from collections.abc import Iterator

import numpy as np
from rich.console import Console

from bench import tables
from bench.distributed import forecast, model
from bench.results_file import Results, digits

Row = tuple[str, ...]
#: A model within this of what was measured is as it should be.
AIM = 0.15


def published(saved: dict) -> dict:
    """A results file's `distributed`. Times are medians over the calls.

    ms: of a call, until its last rank has ended, of which messages_ms went by in rounds of messages. compute_ms: of the same
    call without the other ranks, of which host_ms is not the kernels' own time. model_ms: compute_ms and what rounds are
    expected to take. alone_ms: of one process on as many
    CPUs as a rank has, with the tokens of all ranks; ratio: how many times as long as the ranks it takes, the median of the
    calls' own. bytes: that the rank sends which sends most.
    """
    return {
        "date": datetime.date.fromisoformat(saved["date"]),
        **({"commit": saved["commit"]} if saved["commit"] else {}),
        "source": "make bench-distributed",
        "model": saved["model"]["name"],
        "weights": saved["model"]["weights"],
        **{name: saved["model"][name] for name in ("experts", "top_k", "hidden", "intermediate")},
        "shards": saved["shards"],
        "absent": saved["absent"],
        "group": [_group(group) for group in saved["groups"]],
    }


def _group(group: dict) -> dict:
    ranks = group["ranks"]
    exchanges = {int(size): statistics.median(seconds) for size, seconds in group["exchange"].items()}
    network = model.Network.measured(exchanges, ranks) if exchanges else None
    about = {name: group[name] for name in ("network", "communicator", "ranks", "cpus", "shared")}
    if network:
        about |= {"latency_us": digits(network.latency * 1e6), "gb_s": digits(network.bandwidth / 1e9)}
    return about | {
        "packed_gb": digits(group["nbytes"] / 1e9),
        "exchange": [{"bytes": size, "us": digits(seconds * 1e6)} for size, seconds in exchanges.items()],
        "call": [_call(point, network) for point in group["points"]],
    }


def _call(point: dict, network: model.Network | None) -> dict:
    calls = point["calls"]
    took = [model.call_seconds(call["edges"]) for call in calls]
    computed = [model.compute_seconds(call["replayed"]) for call in calls]
    rounds = [[np.array(each) for each in call["rounds"]] for call in calls]
    exchanged = [model.exchange_seconds(network, each) if network else 0.0 for each in rounds]
    hosts = [max(0.0, seconds - call["experts"]) for seconds, call in zip(computed, calls, strict=True)]

    def ms(values) -> float:
        return digits(1e3 * statistics.median(values))

    return {
        "tokens": point["tokens"],
        "count": point["count"],
        "ms": ms(took),
        "messages_ms": ms(model.messages_seconds(call["edges"]) for call in calls),
        "compute_ms": ms(computed),
        "host_ms": ms(hosts),
        "model_ms": ms(a + b for a, b in zip(computed, exchanged, strict=True)),
        "alone_ms": ms(call["alone"] for call in calls),
        "ratio": digits(statistics.median(call["alone"] / seconds for call, seconds in zip(calls, took, strict=True))),
        "rounds": len(rounds[0]),
        "bytes": round(statistics.median(map(_most_sent, rounds))),
    }


def _most_sent(rounds: list[np.ndarray]) -> int:
    """By one rank to others in all rounds."""
    return int((sum(rounds) * ~np.eye(len(rounds[0]), dtype=bool)).sum(axis=1).max()) if rounds else 0


def error(call: dict) -> float:
    """Of the model: above 0 where it expects more than was measured."""
    return call["model_ms"] / call["ms"] - 1


def calls(found: list[Results]) -> tuple[Row, list[Row]]:
    """A line for each number of ranks and tokens in each network."""
    heads = ("CPU", "network", "ranks", "tokens", "call", "one process", "ratio", "computing", "of it outside of kernels")
    heads += ("rounds", "a rank sends", "messages", "model", "its error")
    return heads, [
        (
            label,
            group["network"],
            _ranks(group),
            f"{call['count']}" + (" for each rank" if call["tokens"] == "own" else ""),
            _ms(call["ms"]),
            _ms(call["alone_ms"]),
            f"{call['ratio']:.2f} x",
            _ms(call["compute_ms"]),
            _ms(call["host_ms"]),
            f"{call['rounds']}",
            _bytes(call["bytes"]),
            _ms(call["messages_ms"]),
            _ms(call["model_ms"]),
            f"{100 * error(call):+.0f} %",
        )
        for label, group in _groups(found)
        for call in group["call"]
    ]


def gains(found: list[Results]) -> tuple[Row, list[Row]]:
    """The ratios of calls() alone, of ranks that have CPUs of their own and get the same tokens."""
    groups = [(label, group) for label, group in _groups(found) if group["ranks"] > 1 and not group["shared"]]
    ratios = [{call["count"]: call["ratio"] for call in group["call"] if call["tokens"] == "same"} for _, group in groups]
    counts = sorted(set().union(*ratios))
    rows = []
    for (label, group), by_count in zip(groups, ratios, strict=True):
        cells = (f"{by_count[count]:.2f} x" if count in by_count else "-" for count in counts)
        rows.append((label, group["network"], f"{group['ranks']}", *cells))
    words = (f"{count} token{'s' * (count > 1)}" for count in counts)
    return ("CPU", "network", "ranks", *words), rows


def networks(found: list[Results]) -> tuple[Row, list[Row]]:
    """What an exchange of messages alone takes."""
    groups = [(label, group) for label, group in _groups(found) if group["exchange"]]
    sizes = sorted({each["bytes"] for _, group in groups for each in group["exchange"]})
    rows = []
    for label, group in groups:
        took = {each["bytes"]: f"{_digits(each['us'])} µs" for each in group["exchange"]}
        limits = f"{_digits(group['latency_us'])} µs", f"{_digits(8 * group['gb_s'])} Gbit/s"
        rows.append((label, group["network"], _ranks(group), *limits, *(took.get(size, "-") for size in sizes)))
    return ("CPU", "network", "ranks", "latency", "bandwidth", *map(_bytes, sizes)), rows


def _groups(found: list[Results]) -> Iterator[tuple[str, dict]]:
    for results in found:
        for group in results.data.get("distributed", {}).get("group", ()):
            yield results.label, group


def _ranks(group: dict) -> str:
    cpus = f"{group['cpus']} CPU{'s' * (group['cpus'] > 1)} each" + (", shared" if group["shared"] else "")
    return f"{group['ranks']}, {cpus}"


def _ms(value: float) -> str:
    return f"{_digits(value)} ms"


def _bytes(count: int) -> str:
    for unit, size in (("MB", 1e6), ("kB", 1e3)):
        if count >= size:
            return f"{_digits(count / size)} {unit}"
    return f"{count} B"


def _digits(value: float) -> str:
    """A number of three digits as text, without an exponent."""
    return f"{float(f'{value:.3g}'):g}"


def show(saved: dict, console: Console | None = None) -> None:
    """The tables of a result, and how near the model is."""
    console = console or tables.console(200)
    found = [Results({"cpu": saved["cpu"], "date": saved["date"], "distributed": published(saved)})]
    what = f"{saved['model']['name']}, {saved['model']['weights']}, {saved['shards']} virtual shards"
    for title, make in (
        (f"calls: {what}", calls),
        ("exchanges of messages alone, by bytes to each other rank", networks),
        ("model: tokens/s of the routed experts", forecast.table),
        ("model: what it assumes", forecast.assumptions),
    ):
        heads, rows = make(found)
        console.print(tables.table(heads, rows, names=3, title=title))
    off = [(group, call) for _, group in _groups(found) for call in group["call"] if abs(error(call)) > AIM]
    for group, call in off:
        where = f"{group['network']}, {group['ranks']} ranks, {call['tokens']} {call['count']}"
        messages = f"messages {_ms(call['messages_ms'])}, expected {_ms(call['model_ms'] - call['compute_ms'])}"
        text = f"the model is off by {error(call):+.0%}: {where}: {messages}"
        console.print(text, highlight=False, markup=False, soft_wrap=True)
    for name, why in saved["absent"].items():
        console.print(f"out: {name}: {why}", highlight=False, markup=False, soft_wrap=True)
