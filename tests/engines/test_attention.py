"""Attention by torch's flash kernel, with sinks, masks and windows, beside float64 numpy and transformers' eager."""

import numpy as np
import pytest
import torch
from engine_models import logits, make, prompts
from transformers.models.gpt_oss.modeling_gpt_oss import eager_attention_forward

from ktmoe.transformers import attention as module_of_attention
from ktmoe.transformers.attention import NAME, NAME_OF_ADDED, attention
from ktmoe.transformers.step import prepare


def reference(query, key, value, sees, sinks, scaling):
    """[batch, queries, heads, value dim] in float64, one head at a time. sees: bool [batch, queries, keys]."""
    batch, heads, queries, _ = query.shape
    shared = heads // key.shape[1]
    output = np.zeros((batch, queries, heads, value.shape[-1]))
    for text in range(batch):
        for head in range(heads):
            logits = query[text, head] @ key[text, head // shared].T * scaling
            logits = np.where(sees[text], logits, -np.inf)
            sink = np.full((queries, 1), -np.inf if sinks is None else sinks[head])
            top = np.maximum(logits.max(1, keepdims=True), sink)
            weights = np.exp(logits - top)
            total = weights.sum(1, keepdims=True) + np.exp(sink - top)
            output[text, :, head] = weights / total @ value[text, head // shared]
    return output


def module(sinks, heads, key_heads):
    found = torch.nn.Module().eval()
    found.sinks, found.num_key_value_groups, found.is_causal = sinks, heads // key_heads, True
    return found


CASES = {
    "one token": {"queries": 1, "keys": 70},
    "one token of padded texts": {"queries": 1, "keys": 70, "padding": 9},
    "one key": {"queries": 1, "keys": 1},
    "a prompt": {"queries": 70, "keys": 70},
    "a padded prompt": {"queries": 70, "keys": 70, "padding": 9},
    "behind a cache": {"queries": 20, "keys": 70},
    "a window": {"queries": 600, "keys": 600, "window": 16},
    "a window behind a cache": {"queries": 300, "keys": 600, "window": 16, "padding": 9},
    "each head its keys": {"queries": 1, "keys": 70, "key_heads": 8},
    "one head of keys": {"queries": 20, "keys": 70, "key_heads": 1},
    "one token, values of fewer numbers": {"queries": 1, "keys": 70, "value_dim": 24},
    "a prompt, values of fewer numbers": {"queries": 70, "keys": 70, "padding": 9, "value_dim": 24},
}


@pytest.mark.parametrize("sinks", [True, False], ids=["sinks", "none"])
@pytest.mark.parametrize("name", CASES)
@torch.no_grad()
def test_it_is_nearer_to_float64_than_eager(name, sinks):
    case = {"padding": 0, "window": None, "key_heads": 2, "value_dim": 32} | CASES[name]
    queries, keys, heads, dim = case["queries"], case["keys"], 8, 32
    generator = torch.Generator().manual_seed(5)
    query = 2 * torch.randn(2, heads, queries, dim, generator=generator).bfloat16()
    key, value = (
        torch.randn(2, case["key_heads"], keys, width, generator=generator).bfloat16() for width in (dim, case["value_dim"])
    )
    sink = torch.randn(heads, generator=generator).bfloat16() if sinks else torch.full([heads], -1e4).bfloat16()
    positions = torch.arange(queries)[:, None] + keys - queries
    sees = torch.arange(keys) <= positions
    plain = (queries == 1 or queries == keys) and not case["padding"]
    if case["window"]:
        sees, plain = sees & (torch.arange(keys) > positions - case["window"]), False
    sees = sees.expand(2, 1, queries, keys).clone()
    sees[0, :, :, : case["padding"]] = False
    owner = module(sink, heads, case["key_heads"])
    found, _ = attention(owner, query, key, value, None if plain else sees, scaling=dim**-0.5, s_aux=sink if sinks else None)
    added = torch.zeros(sees.shape).masked_fill(~sees, torch.finfo(torch.bfloat16).min).bfloat16()
    eager, _ = eager_attention_forward(owner, query, key, value, added, dim**-0.5)
    exact = [states.double().numpy() for states in (query, key, value)]
    expected = reference(*exact, sees[:, 0].numpy(), sink.double().numpy() if sinks else None, dim**-0.5)
    some = sees[:, 0].any(-1).numpy()  # a query that is padding may say anything that is finite

    def error(output):
        assert output.isfinite().all()
        return np.linalg.norm((output.double().numpy() - expected)[some])

    assert found.shape == eager.shape
    assert error(found) <= 1.05 * error(eager)
    assert error(found) <= 2**-7 * np.linalg.norm(expected[some])


@torch.no_grad()
def test_a_mask_of_numbers_for_each_head():
    """Callers may pass a mask of 4 dimensions, which transformers hands on."""
    generator = torch.Generator().manual_seed(5)
    query, key, value = (torch.randn(2, heads, 1 if heads == 8 else 30, 16, generator=generator) for heads in (8, 2, 2))
    sees = torch.rand(2, 8, 1, 30, generator=generator) < 0.7
    added = torch.zeros(sees.shape).masked_fill(~sees, torch.finfo(torch.float32).min)
    sinks = torch.randn(8, generator=generator)
    eager, _ = eager_attention_forward(module(sinks, 8, 2), query, key, value, added, 0.25)
    for mask in (sees, added):
        found, _ = attention(module(sinks, 8, 2), query, key, value, mask, scaling=0.25, s_aux=sinks)
        torch.testing.assert_close(found, eager, atol=1e-5, rtol=1e-5)


def texts(model, **options):
    """Greedy tokens of two texts, of which the second is padded at its left."""
    ids = prompts(batch=2)
    mask = torch.ones_like(ids)
    mask[1, :7] = 0
    return model.generate(ids, attention_mask=mask, max_new_tokens=30, do_sample=False, pad_token_id=0, **options)


_SMALL_WINDOW = {"sliding_window": 16}
#: Models, what their configs are told, and the attention that they are given.
MODELS = {
    "gpt_oss": (_SMALL_WINDOW, NAME),
    "qwen3_moe": ({}, NAME),
    "mixtral": ({}, NAME),
    "granitemoe_swa": (_SMALL_WINDOW, NAME),
    "mimo_v2_flash": (_SMALL_WINDOW | {"v_head_dim": 8}, NAME),
    "deepseek_v3": ({"v_head_dim": 8}, NAME),
    "deepseek_v4": (_SMALL_WINDOW | {"index_topk": 3}, NAME_OF_ADDED),  # fewer than the compressed entries of these texts
}


@pytest.mark.parametrize("model_type", MODELS)
def test_a_model_says_the_same(model_type):
    """In float32, where a router's pick hardly hangs on the last bit: padded, longer than the window, by beams, in chunks."""
    changes, name = MODELS[model_type]
    ways = [{}, {"num_beams": 3}, {"prefill_chunk_size": 5}]
    if model_type != "deepseek_v4":  # whose cache has a kind of its own
        ways.append({"cache_implementation": "static", "disable_compile": True})
    model = make(model_type, changes).float()
    for parameter, value in model.named_parameters():
        if parameter.endswith("sinks"):
            torch.nn.init.normal_(value, generator=torch.Generator().manual_seed(7))
    expected = [texts(model, **way) for way in ways]
    before = logits(model, prompts())
    prepare(model)
    assert model.config._attn_implementation == name
    for way, theirs in zip(ways, expected, strict=True):
        assert torch.equal(texts(model, **way), theirs), way
    torch.testing.assert_close(logits(model, prompts()), before, atol=1e-3, rtol=1e-3)


@pytest.mark.parametrize("model_type", ["gpt_oss", "qwen3_moe"])
def test_gradients_are_those_of_transformers(model_type):
    """The kernel's log-sum-exp has no gradient, so that training attends as transformers does."""
    model = make(model_type).float()
    ids = prompts()

    def gradient():
        model.zero_grad()
        model(ids, labels=ids).loss.backward()
        return model.model.layers[0].self_attn.q_proj.weight.grad.clone()

    expected = gradient()
    prepare(model)
    torch.testing.assert_close(gradient(), expected, atol=1e-5, rtol=1e-3)


def test_other_attention_stays(monkeypatch):
    """A model with another kind of eager attention keeps it, and a caller's choice stays."""
    monkeypatch.setattr(module_of_attention, "WITH_SINKS", {})
    for model_type, options in {"gpt_oss": {}, "qwen3_moe": {"attend": False}}.items():
        model = make(model_type)
        before = model.config._attn_implementation
        prepare(model, **options)
        assert model.config._attn_implementation == before
