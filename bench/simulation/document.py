"""The tables of docs/simulation.md, from the files of bench/simulation."""

from __future__ import annotations

from bench import document
from bench.simulation import costs, files
from bench.simulation.assumptions import Machine
from bench.simulation.grid import NODES, THREADS

PAGE = document.DOCS / "simulation.md"
PICTURE = document.DOCS / "img" / "simulation.png"
Row = tuple[str, ...]


def write() -> None:
    PAGE.write_text(filled(PAGE.read_text()))


def filled(text: str) -> str:
    """The text with all tables in it. Raises ValueError where it lacks a mark."""
    for name, make in TABLES.items():
        heads, rows = make()
        text = document.replaced(text, name, document.markdown(heads, rows) if rows else "Nothing was simulated yet.\n")
    return text


def _simulated() -> list[dict]:
    return files.read_all("-simulated", files.SIMULATED)


def _costs() -> list[costs.Costs]:
    return [costs.read(path) for path in sorted(costs.FOLDER.glob("*.toml"))]


def largest() -> tuple[Row, list[Row]]:
    """Where the time goes with all threads."""
    heads = ("costs of", "model", "tokens", "nodes", "ms", "efficiency", "of the dispatch", "idle")
    heads += ("before it", "dealing", "gates", "the end", "read")
    rows = []
    for data in _simulated():
        for point in data["point"]:
            if point["threads"] == max(THREADS):
                about = data["machine"], point["model"], f"{point['tokens']}", f"{point['nodes']}", _digits(point["ms"])
                shares = (
                    _percent(point[name]) for name in ("efficiency", "dispatch", "idle", "before", "dealing", "gates", "end")
                )
                rows.append((*about, *shares, f"{point['read']:.2f} x"))
    return heads, rows


def by_threads() -> tuple[Row, list[Row]]:
    """Milliseconds, idle share and efficiency."""
    rows = []
    for data in _simulated():
        lines: dict[Row, dict[int, str]] = {}
        for point in data["point"]:
            key = data["machine"], point["model"], f"{point['tokens']}", f"{point['nodes']}"
            cell = f"{_digits(point['ms'])} ms, {_percent(point['idle'])}, {_percent(point['efficiency'])}"
            lines.setdefault(key, {})[point["threads"]] = cell
        rows += [(*key, *(cells[threads] for threads in THREADS)) for key, cells in lines.items()]
    threads = (f"{threads} thread{'s' * (threads > 1)}" for threads in THREADS)
    return ("costs of", "model", "tokens", "nodes", *threads), rows


def agreement() -> tuple[Row, list[Row]]:
    heads = ("machine", "model", "threads", "tokens", "among experts", "measured", "simulated", "simulated / measured")
    rows = []
    for data in files.read_all("-checked", files.CHECKED):
        for call in data["call"]:
            about = data["machine"], call["model"], f"{call['threads']}", f"{call['tokens']}", f"{call['experts']}"
            measured, simulated = call["measured_ms"], call["simulated_ms"]
            rows.append((*about, f"{_digits(measured)} ms", f"{_digits(simulated)} ms", f"{simulated / measured:.2f}"))
    return heads, rows


def assumptions() -> tuple[Row, list[Row]]:
    """What a made-up machine is."""
    rows = []
    for data in _simulated():
        m = Machine(NODES[0], max(THREADS), data["bandwidth_gb_s"] * 1e9, jitter=data["jitter"])
        rows += [
            ("cores", f"{m.cores}, on {', '.join(map(str, NODES))} nodes; a thread each", "assumed"),
            ("L3", f"{m.domain_bytes >> 20} MiB for each {m.domain_cores} cores", "AMD EPYC of Zen 4"),
            (
                "memory of all nodes together",
                f"{data['bandwidth_gb_s']:.0f} GB/s, equal parts",
                "assumed: 24 channels of DDR5-4800 give 922 in theory",
            ),
            ("a thread sees what one with the same L3 wrote", f"{1e9 * m.near:.0f} ns", "measured, `handoff_us`"),
            ("with another L3", f"{1e9 * m.far:.0f} ns", "assumed, for other nodes, too"),
            ("adding up a row of a panel", f"{1e9 * m.add:.0f} ns", "assumed"),
            ("sharpness of the corner between reading and computing", f"{m.sharpness:g}", "fitted to calls of 2 threads"),
            ("deviation of the workers' speeds", _percent(data["jitter"]), "assumed"),
        ]
        break
    return ("what", "how much", "source"), rows


def machines() -> tuple[Row, list[Row]]:
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
    for found in _costs():
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


TABLES = {
    "simulated 128": largest,
    "simulated threads": by_threads,
    "simulation agreement": agreement,
    "simulation assumptions": assumptions,
    "simulation costs": machines,
}
