"""How far logits are from float32's, beside transformers' own bfloat16, and greedy tokens where that leaves no doubt.

A router's near tie may fall either way, and then a token has other experts: no error of theirs. So what is compared has
the same routing: that of one run is replayed in the others.
"""

import pytest
import torch
from engine_models import ARCHITECTURES, logits, prompts
from quantized_checkpoints import PACKED
from serving import eager, eager_float32, recorded, replayed

import ktmoe.transformers as served

#: The largest error, as a multiple of that of eager bfloat16, which rounds gate, up, h and each expert's output; ktmoe rounds h
#: and a token's output.
AT_MOST = 1.2
NEW_TOKENS = 24


def distance(a: torch.Tensor, b: torch.Tensor) -> float:
    return float((a.double() - b.double()).norm() / b.double().norm())


@pytest.mark.smoke("one")
@pytest.mark.parametrize("name", [*ARCHITECTURES, *PACKED])
def test_error(checkpoint, name):
    """Of all logits of 192 tokens, as a part of their norm; float32's routing is replayed."""
    folder, ids = checkpoint(name), prompts(batch=8)
    full = eager_float32(folder)
    with recorded(full) as routing:
        expected = logits(full, ids)
    found = []
    for model in (eager(folder), served.load(folder, activations="bf16")):
        with replayed(model, routing):
            found.append(distance(logits(model, ids), expected))
    of_eager, ours = found
    assert ours <= AT_MOST * of_eager
    assert of_eager < 0.1  # so that this means something


@pytest.mark.smoke("one")
@pytest.mark.parametrize("name", [*ARCHITECTURES, *PACKED])
def test_greedy_tokens(checkpoint, name):
    """What ktmoe generates is what eager would say next, wherever eager's margin between its first and second token is too
    large for the errors to turn it round.

    Where eager's logits are off by at most E and ktmoe's by AT_MOST times that, a difference of two logits changes by at most
    2 E + 2 AT_MOST E from one to the other. The routing of ktmoe's own steps is replayed.
    """
    folder, prompt = checkpoint(name), prompts(batch=1, length=16)
    model = served.load(folder, activations="bf16")
    with recorded(model) as routing:
        text = model.generate(prompt, max_new_tokens=NEW_TOKENS, do_sample=False)
    assert text.shape == (1, prompt.shape[1] + NEW_TOKENS)
    found = []
    for other in (eager(folder), eager_float32(folder)):
        with replayed(other, routing):
            found.append(logits(other, text[:, :-1])[0].double())
    of_eager, full = found
    error = (of_eager - full).abs().max()
    new = of_eager[prompt.shape[1] - 1 :]
    first, second = new.topk(2).values.unbind(-1)
    sure = first - second > (2 + 2 * AT_MOST) * error
    assert sure.sum() >= NEW_TOKENS // 4
    assert torch.equal(text[0, prompt.shape[1] :][sure], new.argmax(-1)[sure])
