"""The tables of docs/performance.md that are of CPUs, layers and matrices, with few columns.

bench/full_tables.py has the whole ones.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable

from bench import full_tables, modes, readme
from bench.cases import EVERYWHERE
from bench.full_tables import NONE, Row, Table, choices, point_of, three_digits
from bench.linear.page import FEW_ROWS
from bench.models import models
from bench.results_file import Results, newest
from bench.training.report import RECOMPUTE

#: The instruction sets that decide which kernels a CPU gets, with the names of a results file.
FAST = ("avx512_bf16", "avx512_vnni", "avx_vnni", "amx_bf16")
#: Tokens of a call beside other libraries, and tokens that an expert gets.
FEW_TOKENS, TOKENS_OF_EXPERT = (1, 16), (24, 96)
#: The numbers of rows that the table of dense matrices has.
LINEAR_ROWS = (1, 16, 1024)


def cpus(found: list[Results]) -> Table:
    rows = []
    for results in found:
        data, limits = results.data, results.data.get("limits", {})
        fast = ", ".join(name for name in FAST if name in data["cpu"].get("features", ())) or NONE
        cache = f"{data['cpu']['llc_bytes'] / 2**20:g} MiB" if "llc_bytes" in data["cpu"] else NONE
        streams = f"{limits['read_streams']} streams" if "read_streams" in limits else "1 stream alone"
        read = f"{limits['read_gb_s']:.3g} GB/s, {streams}" if "read_gb_s" in limits else NONE
        made = f"{data['date']}", f"`{data['commit']}`"
        rows.append((results.label, f"{data['cpu']['threads']}", fast, cache, read, *made))
    return ("CPU", "threads", "fast instructions", "last cache", "reads", "date", "commit"), rows


def formats(found: list[Results]) -> Table:
    """README's kinds of weights, on the CPU that most of them were measured on."""
    lines = [(results, _of_formats(results)) for results in found]
    results, rows = max(lines, key=lambda pair: len(pair[1]), default=(None, []))
    if not rows:
        return (), []
    heads = ("model", "backend", f"decode, 1 token{_of_what(results)}", "16 tokens", "prefill")
    return (f"weights, on {results.label}", *heads), rows


def _of_formats(results: Results) -> list[Row]:
    rows = []
    for kind in readme.weights():
        for layer in results.entries("layer"):
            if layer["model"] == kind.measured and not choices(layer):
                last = max(layer.get("prefill", ()), key=lambda point: point["tokens"], default=None)
                few = (_with_share(point_of(layer, "decode", tokens), "gb_s", "GB/s", "of_read") for tokens in (1, 16))
                many = _with_share(last, "gflop_s", "GFLOP/s", "of_peak") + (f", {last['tokens']:,} tokens" if last else "")
                rows.append((kind.name, layer["model"], f"`{layer['backend']}`", *few, many))
                break
    return rows


def _with_share(point: dict | None, rate: str, unit: str, share: str) -> str:
    return f"{point[rate]:.3g} {unit}, {_share(point, share)}" if point and rate in point else NONE


def ways(found: list[Results]) -> Table:
    """EVERYWHERE in every way to compute: shares of reading with 1 and 16 tokens, and of the peak with most rows."""
    cells: dict[Row, dict[str, str]] = {}
    for results in found:
        layers = [layer for layer in results.entries("layer") if layer["model"] == EVERYWHERE and "per_expert" in layer]
        for layer in layers if len(layers) > 1 else ():
            few = [_share(point_of(layer, "decode", tokens), "of_read") for tokens in (1, 16)]
            last = max(layer["per_expert"], key=lambda point: point["rows"])
            cell = f"{', '.join(few)}; {_share(last, 'of_peak')}"
            name = f"`{layer['backend']}`", layer["isa"], layer["activations"] + choices(layer)
            cells.setdefault(name, {})[_column(results)] = cell
    columns = list(dict.fromkeys(column for of_way in cells.values() for column in of_way))
    return ("backend", "instructions", "activations", *columns), [
        (*name, *(of_way.get(column, NONE) for column in columns)) for name, of_way in cells.items()
    ]


def _column(results: Results) -> str:
    return results.label + _of_what(results)


def _of_what(results: Results) -> str:
    return f" (shares{readme.of_what(results)})" if results.of_one_stream() else ""


def _share(point: dict | None, share: str) -> str:
    return f"{100 * point[share]:.0f} %" if point and share in point else NONE


def peers(found: list[Results]) -> Table:
    """How many times as fast as the fastest other library ktmoe is, by its default and, where recorded, in int8."""
    rows = []
    top_k = models()[EVERYWHERE].top_k
    for results in found:
        for entry in results.entries("peers"):
            calls = [*FEW_TOKENS, *(each * entry["experts"] // top_k for each in TOKENS_OF_EXPERT)]
            for mode, lead in (("auto", "lead"), ("int8", "int8_lead")):
                fastest = [_fastest(entry, tokens, lead) for tokens in calls]
                ours = next((library for library in entry["library"] if library["name"] == entry.get(mode)), None)
                if ours and any(cell != NONE for cell in fastest):
                    rows.append((entry["weights"], results.label, ours["activations"], *fastest))
    heads = [f"{tokens} token{'s' * (tokens > 1)}" for tokens in FEW_TOKENS]
    heads += [f"{tokens} tokens an expert" for tokens in TOKENS_OF_EXPERT]
    return ("weights", "CPU", "ktmoe's activations", *heads), sorted(rows, key=lambda row: row[2] == "int8")


def _fastest(entry: dict, tokens: int, lead: str) -> str:
    """In int8: beside those that round to int8, which alone have such a lead."""
    calls = {
        library["name"]: call
        for library in entry["library"]
        for call in library["calls"]
        if call["tokens"] == tokens and lead in call and not library["name"].startswith("ktmoe ")
    }
    if not calls:
        return NONE
    name = min(calls, key=lambda name: calls[name]["ms"])
    return f"{calls[name][lead]:.2f} x {name.partition(' ')[0]}"


def linear(found: list[Results]) -> Table:
    """Ranges over the matrices of one kind of weights: ktmoe's share of the nearer limit, and its lead over each library."""
    last = newest(found, "linear_peers")
    if last is None:
        return (), []
    label, beside = last
    lines: dict[Row, list[dict]] = {}
    for call in beside["call"]:
        kind = call["weights"].partition(",")[0] if call["model"] != "any" else call["call"]
        for library in call["library"]:
            lines.setdefault((kind, library["name"]), []).append(library)
    rows = [(*names, *(_range(libraries, number) for number in LINEAR_ROWS)) for names, libraries in lines.items()]
    return (f"weights, on {label}", "library", *(f"{number:,} row{'s' * (number > 1)}" for number in LINEAR_ROWS)), rows


def _range(libraries: Iterable[dict], rows: int) -> str:
    """Of ktmoe, which has no lead: a share of reading up to FEW_ROWS rows, of the peak above."""
    points = [point for library in libraries for point in library["point"] if point["rows"] == rows]
    if not points:
        return NONE
    if all("lead" in point for point in points):
        return _from_to([point["lead"] for point in points], lambda lead: f"{lead:.2f}") + " x"
    share, what = ("of_read", "read") if rows <= FEW_ROWS else ("of_peak", "peak")
    return _from_to([100 * point[share] for point in points], lambda share: f"{share:.0f}") + f" % of {what}"


def _from_to(values: list[float], words: Callable[[float], str]) -> str:
    return " to ".join(dict.fromkeys((words(min(values)), words(max(values)))))


def activation_modes(found: list[Results]) -> Table:
    """Calls in a mode beside exact bf16 of the same backend."""
    last = newest(found, "modes")
    if last is None:
        return (), []
    label, measured = last
    rows = []
    for mode in measured["mode"]:
        if mode["beside"] != modes.FORWARD:
            calls = (f"{three_digits(call['ms'])} ms, {call['ratio']:.2f} x" for call in mode["call"])
            rows.append((f"`{mode['backend']}`", f"`{mode['activations']}`", mode["form"], *calls))
    return (f"backend, on {label}", "activations", "rows", *(call["work"] for call in measured["mode"][0]["call"])), rows


def loading(found: list[Results]) -> Table:
    """Of the CPUs whose seconds are known."""
    return full_tables.loading([results for results in found if any("seconds" in each for each in results.entries("load"))])


def training(found: list[Results]) -> Table:
    """A step of LoRA, without the ways of ktmoe's that are not its default."""
    last = newest(found, "training")
    if last is None:
        return (), []
    label, measured = last
    rows = []
    for run in measured["run"]:
        for each in run["participant"]:
            if not each["name"].endswith(RECOMPUTE):
                shares = (f"{100 * each[f'{part}_of_peak']:.0f} %" for part in ("forward", "backward"))
                step = f"{three_digits(each['step_s'])} s", f"{each['ratio']:.2f} x"
                memory = f"{each['loaded_gb']:.1f} + {each['step_gb']:.1f} GB" if "loaded_gb" in each else NONE
                rows.append((f"{run['experts']}", f"{run['rows']}", each["name"], *shares, *step, memory))
    heads = ("rows an expert", "participant", "forward, of peak", "backward", "step", "of ktmoe's", "memory")
    return (f"experts, on {label}", *heads), rows
