"""The tables of docs/simulation.md, from the files of bench/simulation."""

from __future__ import annotations

from collections.abc import Mapping

from bench import document, results_file
from bench.simulation import costs, files
from bench.simulation.assumptions import Machine
from bench.simulation.grid import BANDWIDTH, JITTER, MACHINES, TOKENS

PAGE = document.DOCS / "simulation.md"
Row = tuple[str, ...]
Table = tuple[Row, list[Row]]


def write() -> None:
    """Raises results_file.ResultsError where a machine's costs were not simulated."""
    PAGE.write_text(filled(PAGE.read_text(), {"simulated": calls(simulated()), **measured()}))


def filled(text: str, tables: Mapping[str, Table]) -> str:
    """The text with these tables in it. Raises ValueError where it lacks a mark."""
    for name, (heads, rows) in tables.items():
        text = document.replaced(text, name, document.markdown(heads, rows))
    return text


def measured() -> dict[str, Table]:
    """The tables of files that git has."""
    return {"simulation agreement": agreement(), "simulation assumptions": assumptions()}


def simulated() -> list[dict]:
    """What files.SIMULATED has, of each cost file. Raises results_file.ResultsError where one was not simulated."""
    found = [files.simulated(path) for path in costs.paths()]
    for path in found:
        if not path.exists():
            raise results_file.ResultsError(f"{path}: there is no such file; make simulation writes it")
    return [results_file.read_as(path, files.SIMULATED) for path in found]


def calls(found: list[dict]) -> Table:
    """A line for each model and machine; columns for each costs and number of tokens."""
    cells: dict[Row, list[str]] = {}
    heads = []
    for data in found:
        heads += [f"{data['machine']}: {tokens:,} token{'s' * (tokens > 1)}" for tokens in TOKENS]
        for point in sorted(data["point"], key=lambda point: TOKENS.index(point["tokens"])):
            key = point["model"], f"{point['threads']}", f"{point['nodes']}"
            cells.setdefault(key, []).append(f"{_digits(point['ms'])} ms, {_percent(point['efficiency'])}")
    return ("model", "threads", "nodes", *heads), [(*key, *of_key) for key, of_key in cells.items()]


def agreement() -> Table:
    """Simulated / measured time: a line for each machine and number of threads."""
    cells: dict[Row, dict[str, str]] = {}
    for data in files.read_all("-checked", files.CHECKED):
        for call in data["call"]:
            tokens = f"{call['tokens']} token{'s' * (call['tokens'] > 1)} among {call['experts']} experts"
            ratio = f"{call['simulated_ms'] / call['measured_ms']:.2f}"
            cells.setdefault((data["machine"], f"{call['threads']}"), {})[tokens] = ratio
    heads = list(dict.fromkeys(tokens for of_key in cells.values() for tokens in of_key))
    return ("machine", "threads", *heads), [(*key, *(of_key[tokens] for tokens in heads)) for key, of_key in cells.items()]


def assumptions() -> Table:
    """What a made-up machine is."""
    m = Machine(*MACHINES[0], BANDWIDTH, jitter=JITTER)
    rows = [
        ("cores", f"{m.cores}, at most a thread each", "assumed"),
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


def _percent(share: float) -> str:
    return f"{100 * share:.0f} %"


def _digits(value: float) -> str:
    """Three, without an exponent."""
    return f"{float(f'{value:.3g}'):g}"
