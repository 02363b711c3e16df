"""generate(): padded batches, caches, beams, one token and none, as one by one.

The rest of the models is in float32, so that what torch adds up in another order hardly changes a router's pick or a token.
"""

import pytest
import torch
from engine_models import VOCABULARY, experts, logits, prompts

import ktmoe.transformers as served

PADDING, NEW = 0, 8


@pytest.fixture(scope="module", params=["qwen3_moe", "gpt-oss MXFP4", "deepseek_v4"])
def model(request, checkpoint):
    return served.load(checkpoint(request.param), dtype=torch.float32)


@pytest.fixture(scope="module")
def plain(checkpoint):
    return served.load(checkpoint("qwen3_moe"), dtype=torch.float32)


def generate(model, ids, **options):
    with torch.inference_mode():
        return model.generate(ids, max_new_tokens=NEW, do_sample=False, pad_token_id=PADDING, **options)


@pytest.mark.smoke
def test_a_batch_is_one_by_one(model):
    ids = prompts(batch=3)
    together = generate(model, ids)
    assert together.shape == (3, ids.shape[1] + NEW)
    for row, alone in enumerate(ids):
        assert torch.equal(generate(model, alone[None])[0], together[row])


@pytest.mark.smoke
def test_padding(plain):
    """What a shorter prompt says does not depend on the longer one beside it; padding has experts, too."""
    long, short = prompts(batch=2)
    short = short[:9]
    padded = torch.cat([torch.full((len(long) - len(short),), PADDING), short])
    mask = torch.stack([torch.ones_like(long), (padded != PADDING).long()])
    together = generate(plain, torch.stack([long, padded]), attention_mask=mask)
    for row, alone in enumerate((long, short)):
        assert torch.equal(generate(plain, alone[None])[0, -NEW:], together[row, -NEW:])


def test_static_cache(plain):
    ids = prompts()
    assert torch.equal(generate(plain, ids, cache_implementation="static"), generate(plain, ids))


def test_without_a_cache(model):
    """All tokens anew in each step give the tokens that one new row at a time gives."""
    ids = prompts()
    assert torch.equal(generate(model, ids, use_cache=False), generate(model, ids))


@pytest.mark.smoke
def test_beams(plain):
    """Several rows for each prompt; the sequence found is at least as likely as the greedy one."""
    ids = prompts()
    found = {beams: generate(plain, ids, num_beams=beams) for beams in (1, 4)}

    def likelihood(text):
        scores = logits(plain, text[:, :-1]).log_softmax(-1)
        return scores.gather(-1, text[:, 1:, None])[:, ids.shape[1] - 1 :, 0].sum(-1)

    assert not torch.equal(found[1], found[4])
    assert (likelihood(found[4]) >= likelihood(found[1]) - 0.1).all()


def test_samples_are_those_of_a_seed(plain):
    ids, found = prompts(), []
    for _ in range(2):
        torch.manual_seed(7)
        found.append(plain.generate(ids, max_new_tokens=NEW, do_sample=True, top_k=20, pad_token_id=PADDING))
    assert torch.equal(*found)


def test_one_token(model):
    found = logits(model, prompts(batch=1, length=1))
    assert found.shape == (1, 1, VOCABULARY)
    assert torch.isfinite(found).all()


def test_no_token(model):
    """transformers' attention takes no empty batch, its experts do."""
    for _, module in experts(model):
        hidden = module.ktmoe_layer.hidden
        found = module(torch.zeros((0, hidden)).bfloat16(), torch.zeros((0, 3), dtype=torch.long), torch.zeros((0, 3)))
        assert (found.shape, found.dtype) == ((0, hidden), torch.bfloat16)


def test_a_prompt_embedded_elsewhere(plain):
    ids = prompts()
    with torch.inference_mode():
        embedded = plain(inputs_embeds=plain.get_input_embeddings()(ids)).logits
    assert torch.equal(embedded, logits(plain, ids))
