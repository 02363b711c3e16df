"""Prompt lookup and an assistant model beside plain greedy decoding, with ktmoe. measure() needs torch, compare() does not.

A random model predicts nothing, so it accepts what is proposed only where its own text repeats. The calls of the model say how
much that was; the seconds say what a call of several proposed tokens costs.
"""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable
from pathlib import Path

from rich.table import Table

from bench import tables
from bench.engines import session
from bench.engines.shapes import Engine

PROMPT, NEW, PROPOSED = 64, 64, 4
#: Layers of the assistant, which has the model's shape.
ASSISTANT_LAYERS = 1


def compare(
    engine: Engine, layers: int, rounds: int, python: Path, folder: Path, progress: Callable[[str], object]
) -> dict[str, dict]:
    """{way: median seconds, calls of the model, and whether the tokens were those of plain decoding}."""
    config = engine.config(layers)
    small = folder.with_name("assistant")
    for part, of_part in ((folder, config), (small, engine.config(ASSISTANT_LAYERS) | {"vocab_size": config["vocab_size"]})):
        progress(f"{engine.name}: writing {of_part['num_hidden_layers']} layers")
        session.write(python, part, of_part)
    worker = session.start(python, folder, "assisted", {"OMP_WAIT_POLICY": "passive"})
    try:
        worker.ask(do="load", config=config, owner="ktmoe", weights="MXFP4", dense="packed", patience=session.PATIENCE)
        progress(f"{engine.name}: {rounds} rounds")
        return worker.ask(do="assisted", assistant=str(small), rounds=rounds, patience=session.PATIENCE)
    finally:
        worker.close()


def measure(model, assistant, rounds: int) -> dict[str, dict]:
    """compare()'s result. model, assistant: of transformers. The ways have turns; a round before them warms up."""
    import torch

    from bench.engines import generation

    inputs = generation.tokens(model, 1, 16, 0).repeat(1, PROMPT // 16)
    given = {"attention_mask": torch.ones_like(inputs), "do_sample": False, "max_new_tokens": NEW, "min_new_tokens": NEW}
    assistant.generation_config.num_assistant_tokens = PROPOSED
    assistant.generation_config.num_assistant_tokens_schedule = "constant"
    ways = {
        "plain": {},
        "prompt lookup": {"prompt_lookup_num_tokens": PROPOSED},
        "assistant": {"assistant_model": assistant},
    }
    calls = []
    hook = model.register_forward_pre_hook(lambda *_: calls.append(1))
    seconds, found, texts = {way: [] for way in ways}, {}, {}
    for number in range(rounds + 1):
        for way, options in ways.items():
            calls.clear()
            start = time.perf_counter()
            texts[way] = model.generate(inputs, **given, **options)
            if number:
                seconds[way].append(time.perf_counter() - start)
            same = torch.equal(texts[way], texts["plain"])
            found[way] = {"calls": len(calls), "same_tokens": same}
    hook.remove()
    return {way: found[way] | {"seconds": statistics.median(seconds[way])} for way in ways}


def table(title: str, found: dict[str, dict]) -> Table:
    rows = []
    for way, one in found.items():
        rates = f"{NEW / one['seconds']:.3g}", str(one["calls"]), f"{1e3 * one['seconds'] / one['calls']:.3g}"
        rows.append((way, *rates, str(one["same_tokens"])))
    return tables.table(("way", "tokens/s", "calls of\nthe model", "ms\na call", "plain\ntokens"), rows, title=title)
