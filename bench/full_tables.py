"""All tables of the results files, with every column: `make results ARGS=--show` prints them."""

from __future__ import annotations

import functools
import math
import statistics
from collections.abc import Callable

from bench import cost_model, explain, modes, readme
from bench.cases import EVERYWHERE
from bench.cost_model import Machine
from bench.distributed import forecast
from bench.distributed import report as distributed
from bench.engines import cold_report
from bench.engines import page as whole
from bench.explain import Call
from bench.linear import page as linear
from bench.models import models
from bench.peers.formats import FORMATS
from bench.results_file import Results
from bench.results_schema import LOADING
from bench.training import report as training_report
from bench.vllm import dense, servers_report
from bench.vllm import report as vllm_report

Row = tuple[str, ...]
Table = tuple[Row, list[Row]]
Tables = dict[str, Callable[[list[Results]], Table]]
NONE = "-"
#: What stands behind the names of ktmoe's ways that other libraries are compared with, by the field that has the name.
MARKS = {"auto": "auto", "auto for int8": "int8"}
#: Where no more were tried.
ONE_STREAM = "1 alone"


def cpus(found: list[Results]) -> Table:
    heads = (
        "CPU",
        "threads",
        "instruction sets",
        "L2 of a core",
        "last cache",
        "reads",
        "streams",
        "compiler",
        "date",
        "commit",
        "by",
    )
    rows = []
    for results in found:
        data, cpu, limits = results.data, results.data["cpu"], results.data.get("limits", {})
        caches = (f"{cpu[name] / 2**20:g} MiB" if name in cpu else NONE for name in ("l2_bytes", "llc_bytes"))
        read = f"{limits['read_gb_s']:.3g} GB/s" if "read_gb_s" in limits else NONE
        streams = f"{limits['read_streams']}" if "read_streams" in limits else ONE_STREAM if "layer" in data else NONE
        made = data.get("compiler", NONE), f"{data['date']}", f"`{data['commit']}`", data["source"]
        rows.append((results.label, f"{cpu['threads']}", ", ".join(cpu.get("features", [NONE])), *caches, read, streams, *made))
    return heads, rows


def ways(found: list[Results]) -> Table:
    """EVERYWHERE in every way to compute; the same way on each CPU, one below the other."""
    layers = [(layer, results) for results in found for layer in results.entries("layer") if layer["model"] == EVERYWHERE]
    measured = sorted({point["rows"] for layer, _ in layers for point in layer.get("per_expert", ())})
    columns = [("decode", 1), ("decode", 4), ("decode", 16), *(("per_expert", rows) for rows in measured)]
    heads = ("backend", "instruction set", "activations", "CPU", "decode, 1 token", "4 tokens", "16 tokens")
    heads += tuple(f"prefill, {rows} tokens an expert" if rows == measured[0] else f"{rows}" for rows in measured)
    heads += ("bound",)
    order = list(dict.fromkeys(_way(layer) for layer, _ in layers))
    rows = []
    for layer, results in sorted(layers, key=lambda pair: order.index(_way(pair[0]))):
        cells = [rate_of(results, point_of(layer, *column), column[0]) for column in columns]
        if any(cell != NONE for cell in cells):
            mode = layer["activations"] + choices(layer)
            bound = f"{100 * layer['bound']:.2g} %" if "bound" in layer else NONE
            rows.append((f"`{layer['backend']}`", layer["isa"], mode, results.label, *cells, bound))
    return heads, rows


def _way(layer: dict) -> tuple[str, ...]:
    return layer["backend"], layer["isa"], layer["activations"], layer["rounding"], layer.get("tuned_for", "decode")


def choices(layer: dict) -> str:
    folded = ", folded" if layer["rounding"] == "folded" else ""
    return folded + (", for prefill" if layer.get("tuned_for") == "prefill" else "")


def other_models(found: list[Results]) -> Table:
    columns = [("decode", 1), ("decode", 16), ("prefill", 1024), ("prefill", 4096)]
    heads = ("model", "weights", "backend", "CPU", "experts", "decode, 1 token", "16 tokens", "prefill, 1024 tokens", "4096")
    rows = []
    for model in models():
        for results in found:
            for layer in results.entries("layer"):
                if layer["model"] == model != EVERYWHERE:
                    weights = layer["weights"] + choices(layer)
                    experts = f"{layer['experts']}" + (f" x {layer['copies']}" if layer["copies"] > 1 else "")
                    cells = (rate_of(results, point_of(layer, *column), column[0]) for column in columns)
                    rows.append((model, weights, f"`{layer['backend']}`", results.label, experts, *cells))
    return heads, rows


def kernels(found: list[Results]) -> Table:
    heads = ("weights", "instruction set", "activations", "scales", "CPU", "1 row, from memory", "192 rows, from L2")
    entries = [(kernel, results) for results in found for kernel in results.entries("kernel")]
    names = ("weights", "isa", "activations", "scales")
    order = list(dict.fromkeys(tuple(kernel[name] for name in names) for kernel, _ in entries))
    rows = []
    for kernel, results in sorted(entries, key=lambda pair: order.index(tuple(pair[0][name] for name in names))):
        few, many = (next(iter(kernel.get(where, ())), None) for where in ("memory", "l2"))
        cells = rate_of(results, few, "decode"), rate_of(results, many, "prefill")
        rows.append((*(kernel[name] for name in names), results.label, *cells))
    return heads, rows


def pool(found: list[Results]) -> Table:
    def cell(entry: dict) -> str:
        share = f", {100 * entry['of_call']:.2g} % of the call" if "of_call" in entry else ""
        return f"{entry['us']:.2g} µs{share}"

    return _by_work(found, "pool", cell)


def loading(found: list[Results]) -> Table:
    words = {
        "seconds": lambda x: f"{x:.2g} s",
        "gb_s": lambda x: f"{x:.2g} GB/s",
        "of_memcpy": lambda x: f"{100 * x:.0f} % of memcpy",
        "of_reading": lambda x: f"{x:.3g} x reading",
        "of_reading_into_new_memory": lambda x: f"{x:.2g} x reading into new memory",
        "parsing_seconds": lambda x: f"{x:.2g} s of it parsing",
        "peak_rss_of_packed": lambda x: f"peak RSS {x:.3g} x packed",
        "packed_of_checkpoint": lambda x: f"{x:.4f} x the checkpoint",
    }
    return _by_work(found, "load", lambda entry: ", ".join(words[name](entry[name]) for name in LOADING if name in entry))


def _by_work(found: list[Results], section: str, cell: Callable[[dict], str]) -> Table:
    """A column for each CPU."""
    found = [results for results in found if results.entries(section)]
    columns = [{entry["work"]: cell(entry) for entry in results.entries(section)} for results in found]
    works = dict.fromkeys(work for column in columns for work in column)
    return ("", *(results.label for results in found)), [(w, *(column.get(w, NONE) for column in columns)) for w in works]


def peers(weights: str, found: list[Results]) -> Table:
    """A line for each library, ktmoe's own ways to compute among them; columns for the numbers of tokens."""
    entries = [(results, entry) for results in found for entry in results.entries("peers") if entry["weights"] == weights]
    tokens = sorted({call["tokens"] for _, entry in entries for library in entry["library"] for call in library["calls"]})
    words = [f"{count:,} token{'s' if count > 1 else ''}" for count in tokens]
    rows = []
    for results, entry in entries:
        for library in entry["library"]:
            calls = {call["tokens"]: call for call in library["calls"]}
            cells = (_call(calls[count]) if count in calls else NONE for count in tokens)
            errors = dict.fromkeys(f"{100 * library[name]:.2g}" for name in ("least_error", "most_error") if name in library)
            error = f"{' to '.join(errors)} %" if errors else NONE
            name = library["name"] + "".join(f", {mark}" for mark, of in MARKS.items() if library["name"] == entry.get(of))
            rows.append((results.label, f"{entry['experts']}", name, library["activations"], *cells, error))
    return ("CPU", "experts", "library", "activations", *words, "distance from float64"), rows


def _call(call: dict) -> str:
    lead = f", {call['lead']:.1f} x" if "lead" in call else ""
    return f"{three_digits(call['ms'])} ms{lead}" + (f", int8 {call['int8_lead']:.1f} x" if "int8_lead" in call else "")


def engines(found: list[Results]) -> Table:
    """A line for each way to generate text with a model; columns for the lengths of prompts and the numbers of texts."""
    entries = [
        (results, comparison, way)
        for results in found
        for comparison in results.data.get("engines", {}).get("comparison", ())
        for way in comparison["way"]
    ]
    tokens = sorted({row["tokens"] for *_, way in entries for row in way["prefill"]})
    texts = sorted({row["texts"] for *_, way in entries for row in way["decode"]})
    heads = ("CPU", "model", "layers", "way", *(f"prefill, {count} tokens" for count in tokens))
    heads += (*(f"decode, {count} text{'s' * (count > 1)}" for count in texts), "experts in decode", "memory", "loading")
    rows = []
    for results, comparison, way in entries:
        prefill = {row["tokens"]: row for row in way["prefill"]}
        decode = {row["texts"]: row for row in way["decode"]}
        cells = [_tokens_rate(prefill.get(count)) for count in tokens] + [_tokens_rate(decode.get(count)) for count in texts]
        first, read = decode[min(decode)], "1 stream" if results.of_one_stream("engines") else "read"
        experts = f"{100 * first['experts']:.0f} %, {first['read_gb_s']:.3g} GB/s, {100 * first['of_read']:.0f} % of {read}"
        load = f"{way['load_s']:.2g} s" if "load_s" in way else NONE
        layers = f"{comparison['layers']} of {comparison['of_layers']}"
        memory = f"{way['peak_gb']:.3g} GB"
        rows.append((results.label, comparison["model"], layers, way["name"], *cells, experts, memory, load))
    return heads, rows


def vllm(found: list[Results]) -> Table:
    """A line for each way to generate text in vLLM."""
    return _of_vllm(found, "vllm", vllm_report.table)


def vllm_servers(found: list[Results]) -> Table:
    """A line for each server with each number of users."""
    return _of_vllm(found, "vllm_servers", servers_report.table)


def vllm_dense(found: list[Results]) -> Table:
    """A line for each dense layer: how many times as fast as vLLM ktmoe is."""
    made = [(results.label, *dense.table(entry)) for results in found if (entry := results.data.get("vllm_dense"))]
    return ("CPU", *(made[0][1] if made else ())), [(label, *row) for label, _, rows in made for row in rows]


def _of_vllm(found: list[Results], section: str, table: Callable[[dict], tuple[Row, list[Row]]]) -> Table:
    tables = [(results, entry, *table(entry)) for results in found if (entry := results.data.get(section))]
    heads = ("CPU", "model", "layers", *(tables[0][2] if tables else ()))
    return heads, [
        (results.label, entry["model"], f"{entry['layers']} of {entry['of_layers']}", *row)
        for results, entry, _, rows in tables
        for row in rows
    ]


def _tokens_rate(row: dict | None) -> str:
    if row is None:
        return NONE
    return f"{three_digits(row['tokens_s'])} tokens/s" + (f", {row['lead']:.1f} x" if "lead" in row else "")


def cost_numbers(found: list[Results]) -> Table:
    heads = ("CPU", "instruction set", "activations", "c, ns a byte", "e", "o", "read, GB/s", "peak, GFLOP/s", "crossover")
    rows = []
    for results in found:
        for name, kernel in explain.kernels(results).items():
            mine = [call for call in explain.calls(results) if call.kernel == name and call.shape.name == EVERYWHERE]
            read, peak = (statistics.median(getattr(call.machine, limit) for call in mine) for limit in ("read", "peak"))
            machine = Machine(results.data["cpu"]["threads"], read, peak)
            crossover = cost_model.crossover(models()[EVERYWHERE], kernel, machine)
            numbers = f"{kernel.decode_ns:.2f}", f"{kernel.efficiency:.2f}", f"{kernel.overlap:.2f}"
            reads = f"{read / 1e9:.0f}" + (" by 1 stream" if results.of_one_stream() else "")
            rows.append((results.label, *name, *numbers, reads, f"{peak / 1e9:.0f}", f"{crossover:.1f}"))
    return heads, rows


def cost_checks(found: list[Results]) -> Table:
    """Calls that the numbers were not found by: of one CPU, model and kernel in a line."""
    heads = ("CPU", "instruction set", "model", "call: measured ms, predicted / measured", "median", "worst")
    rows = []
    for results in found:
        kernels = explain.kernels(results)
        groups: dict[tuple, list[Call]] = {}
        for call in explain.calls(results):
            if call.kernel in kernels and not call.fitted:
                groups.setdefault((call.kernel, call.shape.name), []).append(call)
        for (name, model), calls in groups.items():
            kernel = kernels[name]
            words = "; ".join(f"{_words(c)}: {three_digits(1e3 * c.seconds)}, {c.predicted(kernel):.2f}" for c in calls)
            ratios = [call.predicted(kernel) for call in calls]
            worst = max(ratios, key=lambda ratio: abs(math.log(ratio)))
            rows.append((results.label, name[0], model, words, f"{statistics.median(ratios):.2f}", f"{worst:.2f}"))
    return heads, rows


def three_digits(value: float) -> str:
    """A number of three digits as text, without an exponent."""
    return f"{float(f'{value:.3g}'):g}"


def _words(call: Call) -> str:
    what, number = call.what
    return f"{number} an expert" if what == "per_expert" else f"{number} token{'s' if number > 1 else ''}"


def point_of(layer: dict, what: str, number: int) -> dict | None:
    return next((point for point in layer.get(what, ()) if number in (point.get("tokens"), point.get("rows"))), None)


def rate_of(results: Results, point: dict | None, what: str) -> str:
    """Decode by what it reads, all else by what it multiplies."""
    rate, unit, share = ("gb_s", "GB/s", "of_read") if what == "decode" else ("gflop_s", "GFLOP/s", "of_peak")
    if not point or rate not in point:
        return NONE
    number = f"{point[rate]:.1f}" if what == "decode" else f"{point[rate]:.0f}"
    of = readme.of_what(results) if what == "decode" else ""
    return f"{number} {unit}" + (f", {100 * point[share]:.0f} %{of}" if share in point else "")


TABLES: Tables = {
    "CPUs": cpus,
    "V4-Flash in every way to compute": ways,
    "other models": other_models,
    "kernels alone": kernels,
    "activation modes": modes.table,
    "dense matrices": linear.table,
    "dense matrices beside other libraries": linear.peers_table,
    "experts in transformers": engines,
    "whole models": whole.table,
    "one GGUF file": functools.partial(whole.table, section="gguf"),
    "the first token": cold_report.page_table,
    "vLLM": vllm,
    "servers of vLLM and llama.cpp": vllm_servers,
    "dense layers in vLLM": vllm_dense,
    "training": training_report.table,
    "a layer on several machines": distributed.calls,
    "networks between them": distributed.networks,
    "a forecast of several machines": forecast.table,
    "the pool": pool,
    "loading": loading,
    **{f"{weights} beside other libraries": functools.partial(peers, weights) for weights in FORMATS},
    "numbers of the cost formula": cost_numbers,
    "the cost formula beside measured calls": cost_checks,
}
