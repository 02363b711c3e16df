"""Every way of serving a model: the same bits of logits, and no parameter of its experts left."""

from concurrent.futures import ThreadPoolExecutor

import pytest
import torch
from engine_models import ARCHITECTURES, experts, logits, prompts
from helpers import folds
from quantized_checkpoints import PACKED
from serving import WAYS, assert_served, eager, packed, switched

import ktmoe.transformers as served


@pytest.mark.smoke
@pytest.mark.parametrize("name", ARCHITECTURES)
def test_the_same_bits(checkpoint, name):
    folder, ids = checkpoint(name), prompts()
    of_eager, found = logits(eager(folder), ids), {}
    for way, make in WAYS.items():
        model = make(folder)
        found[way] = logits(model, ids)
        assert_served(model)
    experts_alone = packed(folder, dense="torch")
    experts_alone.set_attn_implementation(eager(folder).config._attn_implementation)
    firsts = {True: logits(experts_alone, ids), False: found["pack()"]}
    for first in firsts.values():
        assert first.dtype == of_eager.dtype
        assert not torch.equal(first, of_eager)  # whose sums are other ones
    assert [way for way, values in found.items() if not torch.equal(values, firsts["implementation" in way])] == []


@pytest.mark.smoke
@pytest.mark.parametrize("name", [name for name, each in PACKED.items() if each.exact])
def test_the_same_bits_as_of_dequantized_weights(checkpoint, name):
    """transformers' own bfloat16 numbers are the packed ones. Where kernels fold scales into weights, sums are the same, too;
    where they do not, test_packed_experts.py has a bound on either."""
    folder, ids = checkpoint(name), prompts()
    options = {"activations": "bf16"}  # on AVX2, "auto" would round to integers what is multiplied by codes
    model, dequantized = served.load(folder, source="checkpoint", **options), packed(folder, **options)
    for each in (model, dequantized):
        assert_served(each)
        assert torch.isfinite(logits(each, ids)).all()
    (_, module), *_ = experts(model)
    assert torch.equal(logits(model, ids), logits(dequantized, ids)) or not folds(module.ktmoe_layer)


@pytest.mark.smoke
@pytest.mark.parametrize("name", PACKED)
def test_packed_codes_stay_packed(checkpoint, name):
    """A weight takes 4 or 8 bits and its part of a scale, not bfloat16's 16; load() alone does that, too."""
    model = served.load(checkpoint(name))
    assert_served(model)
    for module in model.modules():
        if layer := getattr(module, "ktmoe_layer", None):
            weights = 3 * layer.num_experts * layer.hidden * layer.intermediate
            assert layer.nbytes / weights < (1.1 if "FP8" in name else 0.8)


def test_first_calls_at_once(checkpoint):
    """Of several threads, one packs each layer, and all have the same bits."""
    folder, ids = checkpoint("qwen3_moe"), prompts()
    model, threads = switched(folder), 4
    with ThreadPoolExecutor(threads) as pool:
        found = list(pool.map(lambda _: logits(model, ids), range(threads)))
    assert_served(model)
    for values in found:
        assert torch.equal(values, logits(packed(folder), ids))
