"""Dense layers in bfloat16: vLLM's own product beside ktmoe's, by their sizes and the number of tokens.

ktmoe.vllm.dense_choice has what follows from it: from which size on ktmoe computes such a layer.
"""

from __future__ import annotations

import statistics
from collections.abc import Callable
from pathlib import Path

from bench.peers import environments, processes
from bench.results_file import digits
from bench.vllm import ways
from bench.vllm.ways import WAYS

#: (n, k) of layers that models have, the smallest first: routers, MLA's projections, q, k, v and o, a part of an output layer.
SHAPES = {
    "router of gpt-oss-20b": (32, 2880),
    "router of Qwen3-30B-A3B": (128, 2048),
    "k of Qwen3-30B-A3B": (512, 2048),
    "router of DeepSeek-V3": (256, 7168),
    "kv_a of DeepSeek-V3": (576, 7168),
    "q, k and v of Qwen3-30B-A3B": (5120, 2048),
    "o of gpt-oss-20b": (2880, 4096),
    "q, k and v of gpt-oss-20b": (5120, 2880),
    "a quarter of gpt-oss-20b's output layer": (50272, 2880),
}


def measure(rounds: int, folder: Path, progress: Callable[[str], object]) -> dict:
    """The result, which is JSON. Raises WorkerError."""
    python = environments.python(environments.VLLM, progress)
    worker = processes.Process([python, "-m", "bench.vllm.worker_dense"], folder / "dense.log", ways.variables(folder, WAYS[0]))
    try:
        found = {}
        for name, (n, k) in SHAPES.items():
            progress(f"dense layers, {name}")
            found[name] = worker.ask(do="measure", n=n, k=k, rounds=rounds)
    finally:
        worker.close()
    return {"layers": {name: {"n": n, "k": k, **found[name]} for name, (n, k) in SHAPES.items()}}


def section(saved: dict) -> dict:
    """A results file's `vllm_dense`, but for what it says of its run. lead: how many times as fast as vLLM ktmoe is, the median
    of the rounds' own ratios. gb_s: what ktmoe reads of the weights with one token."""
    return {"layer": [_layer(name, about) for name, about in saved["layers"].items()]}


def _layer(name: str, about: dict) -> dict:
    pairs = zip(about["tokens"], about["vllm"], about["ktmoe"], strict=True)
    leads = {tokens: statistics.median(a / b for a, b in zip(own, ours, strict=True)) for tokens, own, ours in pairs}
    read = 2 * about["n"] * about["k"] / statistics.median(about["ktmoe"][0]) / 1e9
    tokens = [{"tokens": tokens, "lead": digits(lead)} for tokens, lead in leads.items()]
    return {"name": name, "n": about["n"], "k": about["k"], "gb_s": digits(read), "tokens": tokens}


def table(found: dict) -> tuple[tuple[str, ...], list[tuple[str, ...]]]:
    """(heads, rows) of section()."""
    first = found["layer"][0]["tokens"]
    heads = ("layer", "weights", *(f"{each['tokens']} token{'s' * (each['tokens'] > 1)}" for each in first))
    rows = [
        (
            f"{layer['name']}, {layer['n']} x {layer['k']}",
            f"{2 * layer['n'] * layer['k'] / 2**20:.3g} MiB",
            *(f"{each['lead']:.2f} x" for each in layer["tokens"]),
        )
        for layer in found["layer"]
    ]
    return heads, rows
