"""The tables of docs/simulation.md, from the files of bench/simulation."""

from __future__ import annotations

from collections.abc import Mapping

from bench import document, results_file
from bench.simulation import costs, files
from bench.simulation.assumptions import Machine
from bench.simulation.grid import BANDWIDTH, JITTER, NODES, THREADS

PAGE = document.DOCS / "simulation.md"
PICTURE = document.DOCS / "img" / "simulation.png"
Row = tuple[str, ...]
Table = tuple[Row, list[Row]]


def write() -> None:
    """Raises results_file.ResultsError where a machine's costs were not simulated."""
    data = simulated()
    tables = {"simulated 128": largest(data), "simulated threads": by_threads(data), **measured()}
    PAGE.write_text(filled(PAGE.read_text(), tables))


def filled(text: str, tables: Mapping[str, Table]) -> str:
    """The text with these tables in it. Raises ValueError where it lacks a mark."""
    for name, (heads, rows) in tables.items():
        text = document.replaced(text, name, document.markdown(heads, rows))
    return text


def measured() -> dict[str, Table]:
    """The tables of files that git has."""
    return {"simulation agreement": agreement(), "simulation assumptions": assumptions(), "simulation costs": machines()}


def simulated() -> list[dict]:
    """What files.SIMULATED has, of each cost file. Raises results_file.ResultsError where one was not simulated."""
    found = [files.simulated(path) for path in costs.paths()]
    for path in found:
        if not path.exists():
            raise results_file.ResultsError(f"{path}: there is no such file; make simulation writes it")
    return [results_file.read_as(path, files.SIMULATED) for path in found]


def largest(found: list[dict]) -> Table:
    """Where the time goes with all threads."""
    heads = ("costs of", "model", "tokens", "nodes", "ms", "efficiency", "of the dispatch", "idle")
    heads += ("before it", "dealing", "gates", "the end", "read")
    rows = []
    for data in found:
        for point in data["point"]:
            if point["threads"] == max(THREADS):
                about = data["machine"], point["model"], f"{point['tokens']}", f"{point['nodes']}", _digits(point["ms"])
                shares = (
                    _percent(point[name]) for name in ("efficiency", "dispatch", "idle", "before", "dealing", "gates", "end")
                )
                rows.append((*about, *shares, f"{point['read']:.2f} x"))
    return heads, rows


def by_threads(found: list[dict]) -> Table:
    """Milliseconds, idle share and efficiency."""
    rows = []
    for data in found:
        lines: dict[Row, dict[int, str]] = {}
        for point in data["point"]:
            key = data["machine"], point["model"], f"{point['tokens']}", f"{point['nodes']}"
            cell = f"{_digits(point['ms'])} ms, {_percent(point['idle'])}, {_percent(point['efficiency'])}"
            lines.setdefault(key, {})[point["threads"]] = cell
        rows += [(*key, *(cells[threads] for threads in THREADS)) for key, cells in lines.items()]
    threads = (f"{threads} thread{'s' * (threads > 1)}" for threads in THREADS)
    return ("costs of", "model", "tokens", "nodes", *threads), rows


def agreement() -> Table:
    heads = ("machine", "model", "threads", "tokens", "among experts", "measured", "simulated", "simulated / measured")
    rows = []
    for data in files.read_all("-checked", files.CHECKED):
        for call in data["call"]:
            about = data["machine"], call["model"], f"{call['threads']}", f"{call['tokens']}", f"{call['experts']}"
            measured, simulated = call["measured_ms"], call["simulated_ms"]
            rows.append((*about, f"{_digits(measured)} ms", f"{_digits(simulated)} ms", f"{simulated / measured:.2f}"))
    return heads, rows


def assumptions() -> Table:
    """What a made-up machine is."""
    m = Machine(NODES[0], max(THREADS), BANDWIDTH, jitter=JITTER)
    rows = [
        ("cores", f"{m.cores}, on {', '.join(map(str, NODES))} nodes; a thread each", "assumed"),
        ("L3", f"{m.domain_bytes >> 20} MiB for each {m.domain_cores} cores", "AMD EPYC of Zen 4"),
        (
            "memory of all nodes together",
            f"{m.bandwidth / 1e9:.0f} GB/s, equal parts",
            "assumed: 24 channels of DDR5-4800 give 922 in theory",
        ),
        ("a thread sees what one with the same L3 wrote", f"{1e9 * m.near:.0f} ns", "measured, `handoff_us`"),
        ("with another L3", f"{1e9 * m.far:.0f} ns", "assumed, for other nodes, too"),
        ("adding up a row of a panel", f"{1e9 * m.add:.0f} ns", "assumed"),
        ("sharpness of the corner between reading and computing", f"{m.sharpness:g}", "fitted to calls of 2 threads"),
        ("deviation of the workers' speeds", _percent(m.jitter), "assumed"),
    ]
    return ("what", "how much", "source"), rows


def machines() -> Table:
    """What was measured."""
    heads = (
        "costs of",
        "weights",
        "instruction set",
        "1 row",
        "4",
        "16",
        "96",
        "peak of a core",
        "reads, 1 thread",
        "before a call",
        "a slot",
    )
    rows = []
    for found in map(costs.read, costs.paths()):
        for kernel in found.kernel:
            ns = (f"{dict(zip(kernel.rows, kernel.memory_ns, strict=True))[rows]:.3g} ns" for rows in (1, 4, 16, 96))
            before = f"{found.before[0]['us']:.2g} to {found.before[-1]['us']:.2g} µs"
            peak, read = f"{kernel.peak_gflop_s:.0f} GFLOP/s", f"{found.read_gb_s['1']:.3g} GB/s"
            rows.append((found.machine, kernel.weights, kernel.isa, *ns, peak, read, before, f"{found.route_ns:.2g} ns"))
    return heads, rows


def _percent(share: float) -> str:
    return f"{100 * share:.0f} %"


def _digits(value: float) -> str:
    """Three, without an exponent."""
    return f"{float(f'{value:.3g}'):g}"
