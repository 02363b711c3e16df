"""`python -m bench.engines.first_token ENGINE FILE THREADS HOW`: start, read 16 tokens by a GGUF file, choose the next, end.

ENGINE: "ktmoe" or "llama.cpp". HOW: of ktmoe the packed cache, or "none"; of llama.cpp "mmap" or "no mmap". It prints
{"began": ..., "imported": ..., "loaded": ..., "token": ...}, by the clock that all processes share, and "chosen", the token.
"""

from __future__ import annotations

import time

BEGAN = time.monotonic()

import json  # noqa: E402  the clock comes first
import sys  # noqa: E402
from pathlib import Path  # noqa: E402

PROMPT = 16


def main(engine: str, file: str, threads: str, how: str) -> dict:
    times = {"began": BEGAN}
    return (_ktmoe if engine == "ktmoe" else _llama)(Path(file), int(threads), how, times)


def _ktmoe(file: Path, threads: int, how: str, times: dict) -> dict:
    import torch
    import transformers

    import ktmoe.transformers
    from bench.engines import texts

    times["imported"] = time.monotonic()
    torch.set_num_threads(threads)
    transformers.logging.disable_progress_bar()
    model = ktmoe.transformers.load(file, threads=threads, cache=None if how == "none" else how)
    times["loaded"] = time.monotonic()
    words = torch.from_numpy(texts.tokens(model.config.vocab_size, 1, PROMPT, 0))
    written = model.generate(words, attention_mask=torch.ones_like(words), max_new_tokens=1, do_sample=False)
    return times | {"token": time.monotonic(), "chosen": int(written[0, -1])}


def _llama(file: Path, threads: int, how: str, times: dict) -> dict:
    from bench.engines import texts, worker_llama

    times["imported"] = time.monotonic()
    model, vocabulary = worker_llama.opened(file, mapped=how == "mmap")
    times["loaded"] = time.monotonic()
    text = worker_llama.Texts(model, 1, PROMPT + 1, threads)
    chosen = int(text.read(texts.tokens(vocabulary, 1, PROMPT, 0)).argmax())
    return times | {"token": time.monotonic(), "chosen": chosen}


if __name__ == "__main__":
    print(json.dumps(main(*sys.argv[1:])))
