"""The key-value cache that grows in place holds what transformers' own cache holds, after any calls, without copying it."""

import random

import pytest
import torch
from engine_models import make, prompts
from transformers import DynamicCache
from transformers.cache_utils import DynamicLayer, DynamicSlidingWindowLayer

from ktmoe.transformers.growing_cache import GrowingLayer, GrowingSlidingLayer, grow, grow_caches

WINDOW = 16


def states(generator, batch, tokens):
    return (torch.randn(batch, 2, tokens, dim, generator=generator) for dim in (8, 4))


def change(layer, what, number):
    """One of the calls that transformers makes between updates."""
    if what == "crop":
        layer.crop(-number)
    elif what == "reorder":
        layer.reorder_cache(torch.tensor([1, 1, 0]))
    elif what == "select":
        layer.batch_select_indices(torch.tensor([2, 0, 1]))
    elif what == "repeat":
        layer.batch_repeat_interleave(2)
        layer.batch_select_indices(torch.tensor([0, 3, 5]))
    elif what == "reset":
        layer.reset()


@pytest.mark.parametrize("kind", ["all", "window", "recorded window"])
@torch.no_grad()
def test_it_holds_what_transformers_own_holds(kind):
    """600 calls in a random order, in 1 to 40 tokens at a time, each beside the same call of transformers' layer."""
    draw, generator = random.Random(1), torch.Generator().manual_seed(1)
    ours, theirs = (
        (GrowingLayer(), DynamicLayer()) if kind == "all" else (GrowingSlidingLayer(WINDOW), DynamicSlidingWindowLayer(WINDOW))
    )
    if kind == "recorded window":
        ours.activate_past_recording()
        theirs.activate_past_recording()
    kinds = ["crop"] * (kind != "window") + ["reorder", "select", "repeat"]
    for step in range(600):
        count = draw.choice([1, 1, 1, 1, 2, 5, 40])
        assert ours.get_mask_sizes(count) == theirs.get_mask_sizes(count)
        new = tuple(states(generator, 3, count))
        for found, expected in zip(ours.update(*new), theirs.update(*new), strict=True):
            assert torch.equal(found, expected)
        if step == 300 and kind == "all":
            change(ours, "reset", 0), change(theirs, "reset", 0)
        elif draw.random() < 0.2:
            what = draw.choice(kinds)
            number = draw.randrange(min(count, 4))
            change(ours, what, number), change(theirs, what, number)
        assert ours.get_seq_length() == theirs.get_seq_length()


@torch.no_grad()
def test_tokens_are_not_copied():
    """One token after another goes into the same memory, and so does one behind a cut."""
    generator = torch.Generator().manual_seed(1)
    layer = GrowingLayer()
    layer.update(*states(generator, 1, 100))
    place = layer.keys.data_ptr(), layer.values.data_ptr()
    for _ in range(50):
        layer.update(*states(generator, 1, 1))
    layer.crop(-30)
    layer.update(*states(generator, 1, 1))
    assert (layer.keys.data_ptr(), layer.values.data_ptr()) == place


@torch.no_grad()
def test_a_window_lets_go_of_a_long_prompt():
    generator = torch.Generator().manual_seed(1)
    layer = GrowingSlidingLayer(WINDOW)
    layer.update(*states(generator, 1, 5000))
    layer.update(*states(generator, 1, 1))
    assert layer.keys.untyped_storage().nbytes() < 1000 * 2 * 8 * 4


def test_gradients_flow_through_it():
    """What is kept for a backward pass is not written over."""
    generator = torch.Generator().manual_seed(1)
    layer, total = GrowingLayer(), 0
    first, weight = next(states(generator, 1, 3)), torch.ones(1, requires_grad=True)
    for _ in range(3):
        keys, _ = layer.update(first * weight, first * weight)
        total = total + keys.square().sum()
    total.backward()
    assert torch.allclose(weight.grad, 2 * 6 * first.square().sum())


def test_inference_mode_then_none():
    """torch forbids to write into what inference mode has made."""
    generator = torch.Generator().manual_seed(1)
    layer, new = GrowingLayer(), list(states(generator, 1, 4))
    with torch.inference_mode():
        layer.update(*new)
    with torch.no_grad():
        keys, _ = layer.update(*new)
    assert torch.equal(keys, torch.cat([new[0], new[0]], 2))


@pytest.mark.parametrize("model_type", ["gpt_oss", "deepseek_v3", "deepseek_v4", "qwen3_next"])
def test_generate_uses_it(model_type):
    """The tokens of a model whose caches grow are those of one whose caches do not: alone, by beams, with tokens looked up."""
    model = make(model_type).float()
    ways = [{}, {"num_beams": 3}]
    if model_type in ("gpt_oss", "deepseek_v3"):
        ways.append({"prompt_lookup_num_tokens": 3})

    def texts():
        options = {"max_new_tokens": 30, "do_sample": False, "pad_token_id": 0}
        ids = prompts(batch=1).repeat(1, 2)
        return [model.generate(ids, **options, **way, return_dict_in_generate=True) for way in ways]

    expected = texts()
    grow_caches(model)
    found = texts()
    for ours, theirs in zip(found, expected, strict=True):
        assert torch.equal(ours.sequences, theirs.sequences)
    kinds = {type(layer) for layer in found[0].past_key_values.layers}
    assert kinds & {GrowingLayer, GrowingSlidingLayer} or model_type == "deepseek_v4"
    assert not kinds & {DynamicLayer, DynamicSlidingWindowLayer}


@torch.no_grad()
def test_a_cache_in_use_stays_as_it_is():
    model = make("gpt_oss")
    cache = DynamicCache(config=model.config)
    model(prompts(), past_key_values=cache)
    before = list(cache.layers)
    assert grow(cache).layers == before
