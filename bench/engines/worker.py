"""`python -m bench.engines.worker FOLDER THREADS`: runs a model in a process of its own, as the driver asks. Needs torch.

{"do": "write", "config": {...}, "dense": "BF16"}   -> {}    a checkpoint into FOLDER
{"do": "write_bf16", "config": {...}, "into": folder} -> {}   the same numbers in bfloat16, into a folder of its own
{"do": "write_gguf", "into": file, "dense": "BF16",
 "tokenizer": false}                                 -> {"experts": bytes, "dense": bytes, "embedding": bytes}
                                                          the same numbers as GGUF, into FOLDER
{"do": "load", "config": {...}, "owner": name,
 "weights": name, "dense": "packed", "file": name}  -> {"seconds": 1.2, "peak": bytes, "resident": bytes, "mapped": bytes,
                                                        "bytes": {...}, "about": {...}}    bytes: as of write_gguf.
                                                          file: a GGUF file in FOLDER
{"do": "logits", "implementation": name,
 "tokens": 64, "into": file}                        -> {}    float32 [tokens, vocabulary] as .npy in FOLDER
{"do": "generate", "implementation": name,
 "batch": 1, "prompt": 128, "new": 32, "seed": 0}   -> {"prefill": ..., "decode": ..., "peak": bytes}
{"do": "assisted", "assistant": folder, "rounds": 3} -> {"plain": {"seconds": 1.2, ...}, ...}
"""

from __future__ import annotations

import sys
import time
from importlib.metadata import version
from pathlib import Path

import numpy as np
import torch
import transformers

import ktmoe
import ktmoe.transformers
from bench.engines import assisted, generation, gguf_model, torch_model
from bench.engines.memory import mapped, peak, reset_peak, resident
from bench.peers.workers.protocol import answer_all

#: A text to write before memory is looked at: pages of files that are mapped come with the first one. batch, prompt, new, seed.
SHORT = (1, 16, 3, 0)


class Session:
    def __init__(self, folder: Path, threads: int):
        self._folder, self._threads = folder, threads
        torch.set_num_threads(threads)
        ktmoe.set_num_threads(threads)
        transformers.logging.set_verbosity_error()
        transformers.logging.disable_progress_bar()

    def answer(self, message: dict) -> dict:
        match message.pop("do"):
            case "write":
                torch_model.write(self._folder, **message)
                return {}
            case "write_bf16":
                torch_model.made(self._folder, message["config"]).save_pretrained(message["into"])
                return {}
            case "write_gguf":
                return gguf_model.write(self._folder, self._folder / message.pop("into"), **message)
            case "load":
                return self._load(**message)
            case "logits":
                return self._logits(**message)
            case "generate":
                return self._generate(**message)
            case "assisted":
                assistant = ktmoe.transformers.load(message["assistant"], threads=self._threads)
                return assisted.measure(self._model, assistant, message["rounds"])
        raise ValueError(f"unknown message {message}")

    def _load(
        self, owner: str, weights: str, config: dict | None = None, dense: str | None = None, file: str | None = None
    ) -> dict:
        reset_peak()
        before, mapped_before, start = resident(), mapped(), time.perf_counter()
        if (owner, weights) == ("ktmoe", "MXFP4") or file:
            held = {"dense": dense} if dense else {}
            self._model = ktmoe.transformers.load(self._folder / (file or ""), threads=self._threads, **held)
        else:
            self._model = torch_model.made(self._folder, config)
            if owner == "ktmoe":
                ktmoe.transformers.pack(self._model, threads=self._threads)
        seconds = time.perf_counter() - start
        layers = [module.ktmoe_layer for module in self._model.modules() if hasattr(module, "ktmoe_layer")]
        kernels = sorted({f"{layer.backend} {layer.activations}" for layer in layers})
        about = {"torch": version("torch"), "transformers": version("transformers"), "kernels": kernels}
        most = peak()
        generation.generate(self._model, *SHORT)
        memory = {"peak": most, "resident": resident() - before, "mapped": mapped() - mapped_before}
        return {"seconds": seconds, **memory, "about": about, "bytes": torch_model.held_bytes(self._model)}

    def _logits(self, implementation: str, tokens: int, into: str) -> dict:
        self._model.set_experts_implementation(implementation)
        np.save(self._folder / into, generation.logits(self._model, tokens).numpy())
        return {}

    def _generate(self, implementation: str, batch: int, prompt: int, new: int, seed: int) -> dict:
        self._model.set_experts_implementation(implementation)
        reset_peak()
        return {**generation.generate(self._model, batch, prompt, new, seed), "peak": peak()}


if __name__ == "__main__":
    answer_all(Session(Path(sys.argv[1]), int(sys.argv[2])).answer)
