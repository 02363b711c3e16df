"""Dense layers in bfloat16: vLLM's own product and ktmoe's, in turns. `python -m bench.vllm.worker_dense` runs where vLLM is.

{"do": "measure", "n": 5120, "k": 2880, "rounds": 5} -> {"tokens": [1, 4, ...], "vllm": [[seconds, ...], ...], "ktmoe": ...}
Seconds are those of one call, a list for each number of tokens.
"""

from __future__ import annotations

import time

import ml_dtypes
import torch
from vllm.model_executor.layers.utils import dispatch_cpu_unquantized_gemm

from bench.peers.workers.protocol import answer_all
from ktmoe.linear import Linear
from ktmoe.matrix import Matrix
from ktmoe.vllm import operator
from ktmoe.weights.formats import BF16

#: Decode of 1 to 64 texts, and a prompt.
TOKENS = (1, 4, 16, 64, 512)
#: Bytes of matrices that calls take turns with, so that they come from memory: more than caches have.
TURNS = 1 << 29


class Session:
    def answer(self, message: dict) -> dict:
        return {"measure": self._measure}[message.pop("do")](**message)

    def _measure(self, n: int, k: int, rounds: int) -> dict:
        count = max(2, min(64, TURNS // (2 * n * k)))
        weights = [torch.randn(n, k).to(torch.bfloat16) for _ in range(count)]
        packed = [_packed(weight) for weight in weights]
        own = [_own(weight) for weight in weights]
        found = {"tokens": list(TOKENS), "vllm": [], "ktmoe": []}
        with torch.inference_mode():
            for tokens in TOKENS:
                x = torch.randn(tokens, k).to(torch.bfloat16)
                ways = {
                    "vllm": lambda x=x: [layer.cpu_linear(x, layer.weight, None) for layer in own],
                    "ktmoe": lambda x=x: [operator.product(x, n, layer.ktmoe) for layer in packed],
                }
                seconds = {way: [] for way in ways}
                for number in range(rounds + 1):  # the first is for warming up
                    for way in list(ways)[:: -1 if number % 2 else 1]:
                        start = time.perf_counter()
                        ways[way]()
                        seconds[way].append((time.perf_counter() - start) / count)
                for way in ways:
                    found[way].append(seconds[way][1:])
        return found


def _packed(weight: torch.Tensor) -> torch.nn.Module:
    codes = weight.view(torch.int16).numpy().view(ml_dtypes.bfloat16)
    module = torch.nn.Module()
    module.linear = Linear(Matrix("matrix", BF16, tuple(weight.shape), codes))
    operator.hold(module, module.linear)
    return module


def _own(weight: torch.Tensor) -> torch.nn.Module:
    module = torch.nn.Module()
    module.weight = torch.nn.Parameter(weight.clone(), requires_grad=False)
    dispatch_cpu_unquantized_gemm(module, remove_weight=True)
    return module


if __name__ == "__main__":
    answer_all(Session().answer)
