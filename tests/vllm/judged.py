"""How far log-probabilities of vLLM are from those of transformers' model in float32, position by position."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

import engine_models
import numpy as np
import runs
import torch
from serving import recorded
from transformers import AutoModelForCausalLM, PreTrainedModel


@dataclass(frozen=True)
class Errors:
    """judged: whether all routers chose as in float32, [positions] of all prompts. of: root mean squares, [positions]."""

    judged: np.ndarray
    of: np.ndarray

    @property
    def share(self) -> float:
        return float(self.judged.mean())

    @property
    def rms(self) -> float:
        return float(np.sqrt(np.mean(self.of[self.judged] ** 2)))

    @property
    def largest(self) -> float:
        return float(self.of[self.judged].max())


class Reference:
    """transformers' model in float32."""

    def __init__(self, folder: Path, change: Callable[[PreTrainedModel], None] | None = None):
        """change: of the model, after it is loaded."""
        options = {"dtype": torch.float32, "experts_implementation": "eager"}
        self._model = AutoModelForCausalLM.from_pretrained(folder, **options).eval()
        if change is not None:
            change(self._model)

    def errors(self, prompts: list[list[int]], result: runs.Result) -> Errors:
        """Along the tokens that vLLM has chosen, and with its experts: another choice of one token changes later ones."""
        judged, of = [], []
        for prompt, tokens, given, routing in zip(prompts, result.tokens, result.logprobs, result.routing, strict=True):
            taken = {int(layer): torch.tensor(rows) for layer, rows in routing.items()}
            text = [*prompt, *tokens[:-1]]
            _, chosen = self._computed(text)
            with self._routed(taken):
                expected, replayed = self._computed(text)
            assert len(given) == len(expected)
            assert chosen.keys() == replayed.keys() == taken.keys()
            assert all(torch.equal(replayed[layer], ids.sort(-1).values) for layer, ids in taken.items())
            for row, each in zip(expected, given, strict=True):
                difference = [row[int(token)] - found for token, found in each.items()]
                of.append(np.sqrt(np.mean(np.square(difference))))
            same = [(chosen[layer] == replayed[layer]).all(-1) for layer in taken]
            judged.append(torch.stack(same).all(0).numpy())
        return Errors(np.concatenate(judged), np.array(of))

    def _computed(self, tokens: list[int]) -> tuple[np.ndarray, dict[int, torch.Tensor]]:
        """Log-probabilities [positions, vocabulary], and the experts of each position in ascending order, by layer."""
        with torch.inference_mode(), recorded(self._model) as calls:
            logits = self._model(input_ids=torch.tensor([tokens])).logits[0]
        chosen = {_layer(name): ids.sort(-1).values for name, [(ids, _)] in calls.items()}
        return torch.log_softmax(logits, -1).numpy(), chosen

    @contextmanager
    def _routed(self, taken: dict[int, torch.Tensor]) -> Iterator[None]:
        """Let the model's routers choose these experts. Each gives them the weights that it gives what it chooses."""
        topk, current = torch.topk, {}

        def given(scores, k, *arguments, **options):
            found, ids = topk(scores, k, *arguments, **options), current.get("ids")
            if ids is None or found.indices.shape != ids.shape:  # that is not the choice of experts
                return found
            return torch.return_types.topk((scores.gather(-1, ids), ids))

        def begin(ids):
            return lambda _module, _arguments: current.update(ids=ids)

        handles = []
        for name, _ in engine_models.experts(self._model):
            block = self._model.get_submodule(name.rpartition(".")[0])
            handles.append(block.register_forward_pre_hook(begin(taken[_layer(name)])))
        torch.topk = given
        try:
            yield
        finally:
            torch.topk = topk
            for handle in handles:
                handle.remove()


def _layer(name: str) -> int:
    return int(re.search(r"layers\.(\d+)\.", name)[1])
