"""Figures of a result, its tables, and what a results file keeps of it: of steps here, of other parts beside them."""

from __future__ import annotations

import datetime
import statistics

from rich.console import Console

from bench import tables
from bench.results_file import digits
from bench.vllm import dense, servers_report


def published(saved: dict) -> dict[str, dict]:
    """A results file's `vllm`, `vllm_servers` and `vllm_dense`, as far as they were measured. Ways that failed are left out."""
    about = {
        "date": datetime.date.fromisoformat(saved["date"]),
        **({"commit": saved["commit"]} if saved["commit"] else {}),
        "source": "make bench-vllm",
    }
    model = {name: saved[name] for name in ("model", "of_layers")}
    found = {"vllm": ("steps", steps), "vllm_servers": ("servers", servers_report.section)}
    made = {section: about | model | figures(saved[part]) for section, (part, figures) in found.items() if part in saved}
    return made | ({"vllm_dense": about | dense.section(saved["dense"])} if "dense" in saved else {})


def steps(saved: dict) -> dict:
    """tokens_s: of all texts together. lead: how many times as fast the base is, the median of the rounds' own ratios."""
    return {
        "version": next(about["load"]["version"] for about in saved["ways"].values() if about["load"]),
        "layers": saved["layers"],
        "way": [_way(saved, name) for name, about in saved["ways"].items() if not about["failure"]],
    }


def _way(saved: dict, name: str) -> dict:
    about = saved["ways"][name]
    found = {"prefill": [], "decode": []}
    for index, call in enumerate(saved["calls"]):
        what, tokens = ("decode", call["new"] - 1) if call["new"] > 1 else ("prefill", call["prompt"])
        seconds = [row[name][index][what] for row in saved["rounds"]]
        leads = [row[name][index][what] / row[saved["base"]][index][what] for row in saved["rounds"]]
        lead = {"lead": digits(statistics.median(leads))} if name != saved["base"] else {}
        number = {"tokens": tokens} if what == "prefill" else {"texts": call["batch"]}
        rate = call["batch"] * tokens / statistics.median(seconds)
        found[what].append({**number, "tokens_s": digits(rate), **lead})
    load = {"memory_gb": digits(about["load"]["memory"] / 1e9), "load_s": digits(about["load"]["seconds"])}
    environment = {"environment": about["environment"]} if about["environment"] else {}
    return {"name": name, "weights": about["weights"], **environment, **load, **found}


def show(saved: dict, console: Console | None = None) -> None:
    console = console or tables.console(120)
    titles = {"vllm": "tokens a second of the engine alone", "vllm_servers": "servers"}
    made = {"vllm": table, "vllm_servers": servers_report.table}
    for section, found in published(saved).items():
        if section == "vllm_dense":
            heads, rows = dense.table(found)
            console.print(tables.table(heads, rows, title="dense layers in bfloat16, how many times as fast as vLLM ktmoe is"))
            continue
        heads, rows = made[section](found)
        of = f"{found['model']}, {found['layers']} of {found['of_layers']} layers, vLLM {found['version']}"
        console.print(tables.table(heads, rows, title=f"{of}, {titles[section]}"))
    for part, ways in (("steps", "ways"), ("servers", "servers")):
        for name, about in saved.get(part, {}).get(ways, {}).items():
            if about["failure"]:
                console.print(f"out: {part}: {name}: {about['failure']}", highlight=False, markup=False, soft_wrap=True)


def table(found: dict) -> tuple[tuple[str, ...], list[tuple[str, ...]]]:
    """(heads, rows) of the steps that are published."""
    first = found["way"][0]
    heads = [f"prefill, {phase['tokens']} tokens" for phase in first["prefill"]]
    heads += [f"decode, {phase['texts']} text{'s' * (phase['texts'] > 1)}" for phase in first["decode"]]
    rows = [
        (way["name"], *map(_rate, way["prefill"] + way["decode"]), f"{way['memory_gb']:.3g} GB", f"{way['load_s']:.2g} s")
        for way in found["way"]
    ]
    return ("way", *heads, "memory", "loading"), rows


def _rate(phase: dict) -> str:
    rate = float(f"{phase['tokens_s']:.3g}")
    return f"{rate:g} tokens/s" + (f", {phase['lead']:.1f} x" if "lead" in phase else "")
