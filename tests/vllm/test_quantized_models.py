"""Whole models with quantized experts in vLLM: what they answer, beside transformers' model of the same numbers."""

from __future__ import annotations

import numpy as np
import pytest
import quantized_models
import runs
import torch


@pytest.fixture(scope="module")
def answers(tmp_path_factory):
    """Name -> (folder, what vLLM answered), all of one process."""
    folder = tmp_path_factory.mktemp("quantized")
    folders = {name: quantized_models.write(name, folder / str(i)) for i, name in enumerate(quantized_models.MODELS)}
    found = runs.start([runs.Job(str(path)) for path in folders.values()], folder / "run")
    return {name: (path, result) for (name, path), result in zip(folders.items(), found, strict=True)}


def log_probabilities(model, prompt: list[int], tokens: list[int]) -> np.ndarray:
    """Log-probabilities of what may follow, [tokens, vocabulary], where the tokens before are given."""
    with torch.inference_mode():
        logits = model(input_ids=torch.tensor([prompt + tokens[:-1]])).logits[0, len(prompt) - 1 :]
    return torch.log_softmax(logits.float(), -1).numpy()


def difference(path, result: runs.Result, quantized: bool) -> float:
    """Root mean square over all log probabilities that vLLM gave."""
    model = quantized_models.exact(path, quantized)
    errors = []
    for prompt, tokens, given in zip(runs.PROMPTS, result.tokens, result.logprobs, strict=True):
        expected = log_probabilities(model, list(prompt), tokens)
        errors += [row[int(token)] - found for row, each in zip(expected, given, strict=True) for token, found in each.items()]
    return float(np.sqrt(np.mean(np.square(errors))))


@pytest.mark.smoke
@pytest.mark.parametrize("name", quantized_models.MODELS)
def test_answers(answers, name):
    """They are those of the packed numbers, and not of those that were packed; every layer was ktmoe's, and is kept once."""
    path, result = answers[name]
    assert result.error == ""
    error, other = (difference(path, result, quantized) for quantized in (True, False))
    assert error < 0.5 * other
    assert len(result.calls) == 2
    assert min(result.calls.values()) >= runs.NEW
    assert result.left == 0


def test_two_layouts_of_the_same_numbers(answers):
    """GPTQ and AWQ: symmetric, with the same scales, and zero points of 8."""
    assert answers["GPTQ"][1].tokens == answers["AWQ"][1].tokens
