"""`python -m bench.engines.worker_llama FOLDER THREADS`: runs a GGUF file in llama.cpp, as the driver asks.

By llama-cpp-python's low-level interface.

{"do": "load", "file": name}                             -> {"seconds": 1.2, "resident": bytes, "mapped": bytes, "about": {...}}
{"do": "logits", "tokens": 64, "into": file}             -> {}    float32 [tokens, vocabulary] as .npy in FOLDER
{"do": "generate", "batch": 1, "prompt": 128, "new": 32,
 "seed": 0}                                              -> {"prefill": {"seconds": 1.2}, "decode": ..., "peak": bytes}

Settings are llama.cpp's own, but for the window's cache: swa_full is off, as llama.cpp's commands have it. They are: weights in
the buffer type that it chooses, which repacks them for its kernels; at most 512 tokens at once; flash attention where it thinks
that it pays; a key-value cache in float16.

Threads: this build has OpenMP, whose threads wait for the next operation by spinning. ggml's own threads, of a build without
OpenMP, would spin as long as `poll` says, and here nothing reads it.
"""

from __future__ import annotations

import ctypes
import sys
import time
from importlib.metadata import version
from pathlib import Path

import llama_cpp as llama
import numpy as np

from bench.engines import texts
from bench.engines.memory import mapped, peak, reset_peak, resident
from bench.peers.workers.protocol import answer_all

#: A text to write before memory is looked at, as worker.py does: batch, prompt, new, seed.
SHORT = (1, 16, 3, 0)
#: The least of ggml's levels of messages that is written down: warnings.
LEAST_LEVEL = 3


@llama.llama_log_callback
def _log(level: int, text: bytes, data: ctypes.c_void_p) -> None:
    if level >= LEAST_LEVEL and level != 5:  # 5 goes on with the last message
        sys.stderr.write(text.decode(errors="replace"))


def opened(file: Path, *, mapped: bool = True) -> tuple[ctypes.c_void_p, int]:
    """A model and how many tokens it knows. mapped: its pages are those of the file, where its kernels need no copy."""
    llama.llama_log_set(_log, None)
    llama.llama_backend_init()
    settings = llama.llama_model_default_params()
    settings.use_mmap = mapped
    model = llama.llama_model_load_from_file(str(file).encode(), settings)
    if not model:
        raise RuntimeError(f"llama.cpp could not load {file.name}; its log is this process's")
    return model, llama.llama_vocab_n_tokens(llama.llama_model_get_vocab(model))


class Texts:
    """Texts that are read and continued at once. room: tokens of each."""

    def __init__(self, model: ctypes.c_void_p, batch: int, room: int, threads: int):
        settings = llama.llama_context_default_params()
        settings.n_seq_max = batch
        settings.n_ctx = batch * -(-room // 256) * 256
        settings.n_batch = batch * room
        settings.n_threads = settings.n_threads_batch = threads
        settings.swa_full = False
        self._context = llama.llama_init_from_model(model, settings)
        if not self._context:
            raise MemoryError(f"llama.cpp made no context for {batch} x {room} tokens")
        self._words = llama.llama_batch_init(batch * room, 0, 1)
        self._vocabulary = llama.llama_vocab_n_tokens(llama.llama_model_get_vocab(model))
        self._at = 0

    def read(self, tokens: np.ndarray, every: bool = False) -> np.ndarray:
        """The logits after the last token of each text, or after every one: float32 [logits, vocabulary], overwritten by the
        next call. tokens: int [texts, count]; they continue what was read."""
        texts_, count = tokens.shape
        words, used = self._words, 0
        words.n_tokens = texts_ * count
        for text in range(texts_):
            for place in range(count):
                words.token[used] = int(tokens[text, place])
                words.pos[used] = self._at + place
                words.n_seq_id[used], words.seq_id[used][0] = 1, text
                words.logits[used] = every or place == count - 1
                used += 1
        if status := llama.llama_decode(self._context, words):
            raise RuntimeError(f"llama_decode returned {status} for {texts_} x {count} tokens after {self._at}")
        self._at += count
        found = llama.llama_get_logits(self._context)  # waits until they are there
        rows = words.n_tokens if every else texts_
        return np.ctypeslib.as_array(found, (rows, self._vocabulary))

    def close(self) -> None:
        llama.llama_batch_free(self._words)
        llama.llama_free(self._context)


class Session:
    def __init__(self, folder: Path, threads: int):
        self._folder, self._threads = folder, threads

    def answer(self, message: dict) -> dict:
        message.pop("implementation", None)  # there is one alone
        return {"load": self._load, "logits": self._logits, "generate": self._generate}[message.pop("do")](**message)

    def _load(self, file: str) -> dict:
        before, mapped_before, start = resident(), mapped(), time.perf_counter()
        self._model, self._vocabulary = opened(self._folder / file)
        seconds = time.perf_counter() - start
        self._generate(*SHORT)
        memory = {"resident": resident() - before, "mapped": mapped() - mapped_before}
        return {"seconds": seconds, **memory, "about": {"llama_cpp": version("llama-cpp-python")}}

    def _logits(self, tokens: int, into: str) -> dict:
        text = Texts(self._model, 1, tokens, self._threads)
        np.save(self._folder / into, text.read(texts.tokens(self._vocabulary, 1, tokens, 0), every=True))
        text.close()
        return {}

    def _generate(self, batch: int, prompt: int, new: int, seed: int) -> dict:
        """As generation.generate() has it: the prompt ends with the logits of the first token, the rest with the last's."""
        reset_peak()
        words = texts.tokens(self._vocabulary, batch, prompt + new, seed)
        reading = Texts(self._model, batch, prompt + new, self._threads)
        began = time.perf_counter()
        reading.read(words[:, :prompt])
        first = time.perf_counter()
        for place in range(prompt, prompt + new - 1):
            reading.read(words[:, place : place + 1])
        last = time.perf_counter()
        reading.close()
        return {"prefill": {"seconds": first - began}, "decode": {"seconds": last - first}, "peak": peak()}


if __name__ == "__main__":
    answer_all(Session(Path(sys.argv[1]), int(sys.argv[2])).answer)
