"""Answers that go on from the cache of the one before: the same tokens as without it, and only new ones are computed."""

from __future__ import annotations

import gc
import weakref
from contextlib import contextmanager

import engine_models
import pytest
import torch
from torch import nn
from transformers import DynamicCache, GenerationConfig
from transformers.cli.serving.utils import _GenerationCancelled

from ktmoe.transformers.server.keeping import Keeping
from ktmoe.transformers.server.refusal import Refusal

#: Architecture -> what its config is told. Windows are shorter than prompts and answers.
#: The indexer of DeepSeek-V4 takes all: with two heads many of its scores are 0, and which of them it takes is left to chance.
MODELS = {
    "qwen3_moe": {},
    "deepseek_v3": {},
    "glm_moe_dsa": {"num_key_value_heads": 4},
    "gpt_oss": {"sliding_window": 8},
    "qwen3_next": {},
    "deepseek_v4": {
        "sliding_window": 8,
        "index_topk": 32,
        "compress_rates": {"compressed_sparse_attention": 4, "heavily_compressed_attention": 8},
    },
}
#: Those whose caches go back to any token.
CROPPED = ("qwen3_moe", "deepseek_v3", "glm_moe_dsa")
PROMPT, ANSWER, MORE = 40, 12, 7


@pytest.fixture(scope="module")
def models():
    """Architecture -> its model in float32, so that no sum's order decides on a token; made once."""
    made = {}

    def model(name: str):
        if name not in made:
            made[name] = nn.Module.float(engine_models.make(name, MODELS[name]))
        return made[name]

    return model


class Asked:
    """Conversations with a model. computed: how many tokens it was given for the last answer."""

    def __init__(self, model):
        self.model, self.keeping, self.computed = model, Keeping(model), 0

    def answer(self, prompt: torch.Tensor, **further) -> torch.Tensor:
        """prompt: int64 [n]. The whole text, which generate() must make from nothing, too."""
        config = GenerationConfig(max_new_tokens=ANSWER, do_sample=False)
        arguments = {"input_ids": prompt[None], "attention_mask": torch.ones_like(prompt[None]), "generation_config": config}
        with self._counted():
            found = self.keeping.generate(**arguments | further)
        assert torch.equal(found, self.model.generate(**arguments | further))
        return found[0]

    @contextmanager
    def _counted(self):
        def count(_module, arguments):
            self.computed += arguments[0].numel()

        self.computed = 0
        handle = self.model.get_input_embeddings().register_forward_pre_hook(count)
        try:
            yield
        finally:
            handle.remove()


@contextmanager
def raising(model, error: Exception, calls: int):
    """The module in the middle of the model's last layer raises at its call of this number."""
    left = [calls]

    def count(_module, _arguments):
        left[0] -= 1
        if left[0] == 0:
            raise error

    module = [module for name, module in model.named_modules() if name.endswith("post_attention_layernorm")][-1]
    handle = module.register_forward_pre_hook(count)
    try:
        yield
    finally:
        handle.remove()


def text(seed: int, length: int = PROMPT) -> torch.Tensor:
    return torch.randint(2, engine_models.VOCABULARY, (length,), generator=torch.Generator().manual_seed(seed))


@pytest.mark.parametrize("name", MODELS)
def test_turns(models, name):
    """Of a turn before, only its last token was not computed, which nothing followed."""
    asked = Asked(models(name))
    found = asked.answer(text(1))
    assert asked.computed == PROMPT + ANSWER - 1
    for turn in (2, 3):
        found = asked.answer(torch.cat([found, text(turn, MORE)]))
        assert asked.computed == 1 + MORE + ANSWER - 1


@pytest.mark.parametrize("name", MODELS)
def test_an_answer_that_the_template_changes(models, name):
    """Its first token stays; the windows have moved past the prompt's end."""
    asked = Asked(models(name))
    found = asked.answer(text(1))
    for turn in (2, 3):
        prompt = torch.cat([found[: -ANSWER + 1], text(turn, MORE)])
        found = asked.answer(prompt)
        assert asked.computed == MORE + (name not in CROPPED) + ANSWER - 1


@pytest.mark.parametrize("name", MODELS)
def test_a_prompt_whose_end_the_template_changes(models, name):
    """Where the mark is needed, it is before that end from the second turn on."""
    asked = Asked(models(name))
    prompt = text(1)
    asked.answer(prompt)
    for turn in (2, 3, 4):
        begin = prompt[:-2]
        prompt = torch.cat([begin, text(turn, MORE)])
        asked.answer(prompt)
        again = name not in CROPPED and turn == 2
        assert asked.computed == (len(prompt) if again else MORE) + ANSWER - 1


@pytest.mark.parametrize("name", MODELS)
def test_the_same_prompt_again(models, name):
    """The last token of a prompt is computed each time."""
    asked = Asked(models(name))
    for turn in (1, 2, 3):
        asked.answer(text(1))
        anew = turn == 1 or (turn == 2 and name not in CROPPED)
        assert asked.computed == (PROMPT if anew else 1) + ANSWER - 1


@pytest.mark.parametrize("name", ["qwen3_moe", "gpt_oss"])
def test_another_conversation_in_between(models, name, monkeypatch):
    """The cache of the first is gone before there is one for the second."""
    asked, alive = Asked(models(name)), []
    made = weakref.WeakSet()

    def make(**arguments):
        gc.collect()
        alive.append(len(made))
        cache = DynamicCache(**arguments)
        made.add(cache)
        return cache

    monkeypatch.setattr("ktmoe.transformers.server.keeping.DynamicCache", make)
    first = asked.answer(text(1))
    asked.answer(text(2))
    asked.answer(torch.cat([first, text(3, MORE)]))
    assert (asked.computed, alive) == (len(first) + MORE + ANSWER - 1, [0, 0, 0])


def test_what_is_kept_of_a_window(models):
    """Its keys and values at the prompt's end and at the answer's, in two layers; none is a view of the whole prompt's."""
    asked = Asked(models("gpt_oss"))
    asked.answer(text(1))
    gc.collect()
    window = MODELS["gpt_oss"]["sliding_window"]
    kept = [found for found in gc.get_objects() if type(found) is torch.Tensor and found.ndim == 4]
    kept = [found for found in kept if found.shape[-2] == window - 1]
    assert len(kept) == 2 * 2 * 2
    assert max(found.untyped_storage().nbytes() / found.nbytes for found in kept) <= window / (window - 1)


@pytest.mark.parametrize("name", MODELS)
@pytest.mark.parametrize("calls", [1, 5])
def test_an_answer_that_is_stopped_within_a_step(models, name, calls):
    """In the prompt: what was there before is left of it. In the answer: the prompt at least."""
    asked = Asked(models(name))
    first = asked.answer(text(1))
    prompt = torch.cat([first, text(2, MORE)])
    with raising(asked.model, Refusal(499, "the client has gone"), calls), pytest.raises(Refusal):
        asked.answer(prompt)
    longer = torch.cat([prompt, text(3, MORE)])
    asked.answer(longer)
    before = {"qwen3_moe": len(first) - 1, "deepseek_v3": len(first) - 1, "glm_moe_dsa": 0}.get(name, PROMPT)
    left = before if calls == 1 else 0 if name == "glm_moe_dsa" else len(prompt)
    assert asked.computed == len(longer) - left + ANSWER - 1


class Stopped:
    """A streamer that ends the answer after so many tokens."""

    def __init__(self, tokens: int):
        self.left = tokens

    def put(self, _tokens) -> None:
        self.left -= 1
        if self.left < 0:
            raise _GenerationCancelled


@pytest.mark.parametrize("name", MODELS)
def test_an_answer_that_is_cancelled_between_steps(models, name):
    """All that it had is kept."""
    asked = Asked(models(name))
    whole = asked.answer(text(1))
    asked.keeping = Keeping(asked.model)
    with pytest.raises(_GenerationCancelled):
        asked.answer(text(1), streamer=Stopped(5))
    asked.answer(torch.cat([whole[: PROMPT + 4], text(2, MORE)]))
    assert asked.computed == MORE + ANSWER - 1


def test_an_error_of_the_model(models):
    """Nobody knows what it left behind."""
    asked = Asked(models("qwen3_moe"))
    found = asked.answer(text(1))
    with raising(asked.model, RuntimeError("no room"), 3), pytest.raises(RuntimeError, match="no room"):
        asked.answer(found)
    asked.answer(found)
    assert asked.computed == len(found) + ANSWER - 1


@pytest.mark.parametrize(
    "options",
    [{"num_beams": 2}, {"cache_implementation": "static"}, {"use_cache": False}, {"prompt_lookup_num_tokens": 3}],
    ids=str,
)
def test_other_ways_to_generate(models, options):
    """They are left as they are; the conversation before is dropped."""
    asked = Asked(models("qwen3_moe"))
    found = asked.answer(text(1))
    asked.answer(found, generation_config=GenerationConfig(max_new_tokens=ANSWER, do_sample=False, **options))
    assert asked.computed >= len(found)
    asked.answer(found)
    assert asked.computed == len(found) + ANSWER - 1


def test_padding(models):
    asked = Asked(models("qwen3_moe"))
    found = asked.answer(text(1))
    mask = torch.ones_like(found[None])
    mask[0, :3] = 0
    asked.answer(found, attention_mask=mask)
    assert asked.computed == len(found) + ANSWER - 1
