"""The tables of docs/performance.md that are of text: each is of the CPU that was measured last, and has few columns.

bench/full_tables.py has the whole ones.
"""

from __future__ import annotations

from bench.engines.page import texts_head
from bench.full_tables import NONE, Table
from bench.results_file import Results, newest
from bench.vllm import dense
from bench.vllm import report as vllm_report

#: The servers that ktmoe's stands beside.
SERVERS = ("vLLM BF16", "llama.cpp MXFP4, dense BF16")
#: The lengths of prompts beside transformers, and the numbers of tokens of dense layers in vLLM.
PROMPTS = (128, 512)
DENSE_TOKENS = (1, 16, 512)


def _layers(entry: dict) -> str:
    model = " ".join(filter(None, (entry["model"], entry.get("file"))))
    return f"{model}, {entry['layers']} of {entry['of_layers']} layers"


def texts(found: list[Results], section: str, *, long: bool = False) -> Table:
    """Whole models: tokens/s, the share of the limit, and the ratio to llama.cpp. long: after long texts."""
    last = newest(found, section)
    if last is None:
        return (), []
    label, whole = last
    entries = [(of, way) for of in whole["comparison"] for way in of["way"] if bool(way["prefill"]) is not long]
    calls = sorted({(row["texts"], row["after"]) for _, way in entries for row in way["decode"]})
    prompts = sorted({row["tokens"] for _, way in entries for row in way["prefill"]})[:1]
    rows = []
    for comparison, way in entries:
        decode = {(row["texts"], row["after"]): row for row in way["decode"]}
        prefill = {row["tokens"]: row for row in way["prefill"]}
        cells = [_text(decode.get(call)) for call in calls] + [_text(prefill.get(tokens)) for tokens in prompts]
        rows.append((_layers(comparison), way["name"], *cells, f"{way['resident_gb']:.3g} GB"))
    heads = [texts_head(*call) for call in calls] + [f"prefill, {tokens:,} tokens" for tokens in prompts]
    return (f"on {label}", "way", *heads, "memory"), rows


def _text(row: dict | None) -> str:
    if row is None:
        return NONE
    limit = f", {100 * row['of_limit']:.0f} %" if "of_limit" in row else ""
    return f"{row['tokens_s']:.3g}{limit}" + (f", **{row['ratio']:.2f} x**" if "ratio" in row else "")


def cold(found: list[Results]) -> Table:
    """A line for each model and state of the page cache; a column for each way."""
    last = newest(found, "cold")
    if last is None:
        return (), []
    label, of_cold = last
    lines: dict[tuple[str, ...], dict[str, str]] = {}
    for comparison in of_cold["comparison"]:
        size = f"{comparison['file_gb']:.3g} GB; {comparison['disk_gb_s']:.2g} GB/s"
        for way in comparison["way"]:
            total = f"{way['total_s']:.3g} s{_times(way, 'ratio')}"
            after = f"{way['load_s'] + way['token_s']:.3g} s{_times(way, 'ratio_after')}"
            lines.setdefault((_layers(comparison), size, way["read"]), {})[way["name"]] = f"{total}; {after}"
    ways = list(dict.fromkeys(name for cells in lines.values() for name in cells))
    rows = [(*names, *(cells.get(way, NONE) for way in ways)) for names, cells in lines.items()]
    return (f"file, on {label}", "size; disk", "read", *ways), rows


def _times(fields: dict, name: str) -> str:
    return f", {fields[name]:.2f} x" if name in fields else ""


def transformers(found: list[Results]) -> Table:
    """How many times as fast ktmoe's experts are as those of transformers itself."""
    last = newest(found, "engines")
    if last is None:
        return (), []
    label, engines = last
    heads, rows = [], []
    for comparison in engines["comparison"]:
        for way in comparison["way"]:
            if way["name"].startswith("transformers "):
                prefill = [row for row in way["prefill"] if row["tokens"] in PROMPTS]
                heads = [f"prefill, {row['tokens']:,} tokens" for row in prefill]
                heads += [f"decode, {row['texts']} text{'s' * (row['texts'] > 1)}" for row in way["decode"]]
                leads = (f"{row['lead']:.2f} x" for row in prefill + way["decode"])
                memory = f"{comparison['way'][0]['peak_gb']:.3g} GB; {way['peak_gb']:.3g} GB"
                rows.append((_layers(comparison), way["name"].removeprefix("transformers "), *leads, memory))
    return (f"on {label}", "transformers", *heads, "memory"), rows


def vllm(found: list[Results]) -> Table:
    """The engine alone."""
    last = newest(found, "vllm")
    if last is None:
        return (), []
    label, entry = last
    heads, rows = vllm_report.table(entry)
    return (f"{_layers(entry)}, on {label}", *heads[1:]), rows


def vllm_servers(found: list[Results]) -> Table:
    """A line for each number of users: ktmoe's server, and how many times as fast it is as the others."""
    last = newest(found, "vllm_servers")
    if last is None:
        return (), []
    label, entry = last
    servers = {server["name"]: {point["users"]: point for point in server["users"]} for server in entry["server"]}
    (ours,) = (name for name in servers if name not in SERVERS)
    rows = []
    for users, mine in servers[ours].items():
        others = [servers[name].get(users, {}) if name in servers else {} for name in SERVERS]
        first = ", ".join(f"{other['first_s']:.3g} s" if other else NONE for other in others)
        leads = (", ".join(_lead(other, name) for other in others) for name in ("decode_lead", "lead"))
        rates = (f"{mine[name]:.3g}" for name in ("decode_tokens_s", "tokens_s"))
        beside = (f"{rate}; {lead}" for rate, lead in zip(rates, leads, strict=True))
        rows.append((f"{users}", f"{mine['first_s']:.3g} s; {first}", *beside))
    of = "tokens/s; beside vLLM, llama.cpp"
    heads = ("first token after; vLLM, llama.cpp", f"decode alone, {of}", f"whole, {of}")
    return (f"users, {_layers(entry)}, on {label}", *heads), rows


def _lead(other: dict, name: str) -> str:
    return f"{other[name]:.2f} x" if name in other else NONE


def vllm_dense(found: list[Results]) -> Table:
    last = newest(found, "vllm_dense")
    if last is None:
        return (), []
    label, entry = last
    layers = [
        layer | {"tokens": [each for each in layer["tokens"] if each["tokens"] in DENSE_TOKENS]} for layer in entry["layer"]
    ]
    heads, rows = dense.table(entry | {"layer": layers})
    return (f"layer, on {label}", *heads[1:]), rows
