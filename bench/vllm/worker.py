"""`python -m bench.vllm.worker`: runs a model in vLLM, as the driver asks. Needs vLLM.

{"do": "load", "folder": name}                          -> {"seconds": 1.2, "memory": bytes, "version": "0.32.0",
                                                            "packed": 2}    layers that ktmoe computes
{"do": "generate", "batch": 1, "prompt": 512, "new": 33,
 "seed": 0}                                             -> {"prefill": seconds, "decode": seconds}
"""

from __future__ import annotations

import time
from pathlib import Path

import numpy as np
import vllm
from vllm.model_executor.layers.fused_moe import RoutedExperts

from bench.peers.workers.protocol import answer_all


class Session:
    def answer(self, message: dict) -> dict:
        return {"load": self._load, "generate": self._generate}[message.pop("do")](**message)

    def _load(self, folder: str) -> dict:
        start = time.perf_counter()
        # the model runs in this process; no prompt is known from the one before
        self._model = vllm.LLM(
            folder,
            skip_tokenizer_init=True,
            enforce_eager=True,
            enable_prefix_caching=False,
            dtype="bfloat16",
            max_model_len=2048,
        )
        found = {"seconds": time.perf_counter() - start, "memory": own_memory(), "version": vllm.__version__}
        return found | {"packed": sum(self._model.apply_model(packed_layers))}

    def _generate(self, batch: int, prompt: int, new: int, seed: int) -> dict:
        """prefill: until all texts have their first token. decode: from then on."""
        vocabulary = self._model.model_config.get_vocab_size()
        words = np.random.default_rng(seed).integers(0, vocabulary, (batch, prompt))
        settings = vllm.SamplingParams(temperature=0, max_tokens=new, ignore_eos=True)
        engine = self._model.llm_engine
        began = time.perf_counter()
        for number, text in enumerate(words.tolist()):
            engine.add_request(f"{seed}-{number}", {"prompt_token_ids": text}, settings)
        started, first = set(), None
        while engine.has_unfinished_requests():
            started |= {output.request_id for output in engine.step() if output.outputs[0].token_ids}
            if first is None and len(started) == batch:
                first = time.perf_counter()
        return {"prefill": first - began, "decode": time.perf_counter() - first}


def packed_layers(model) -> int:
    """Layers whose experts ktmoe computes."""
    experts = [module for module in model.modules() if isinstance(module, RoutedExperts)]
    return sum(getattr(module.quant_method, "packed", None) is not None for module in experts)


def own_memory() -> int:
    """RssAnon of this process in bytes: mapped files are not in it."""
    [line] = [line for line in Path("/proc/self/status").read_text().splitlines() if line.startswith("RssAnon:")]
    return 1024 * int(line.split()[1])


if __name__ == "__main__":
    answer_all(Session().answer)
