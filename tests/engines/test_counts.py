"""ktmoe.transformers.count_experts(): which experts a text uses, beside what hooks of torch see."""

from concurrent.futures import ThreadPoolExecutor

import numpy as np
import pytest
import torch
from engine_models import EXPERTS, LAYERS, experts, logits, make, prompts
from serving import CHOOSING, packed, recorded, switched

import ktmoe.transformers as served
from ktmoe.errors import UnavailableError
from ktmoe.torch import add_lora


@pytest.fixture(scope="module")
def model(checkpoint):
    return served.load(checkpoint("qwen3_moe"), activations="bf16")


def seen(calls) -> np.ndarray:
    """The counts of the ids that recorded() gave."""
    return np.stack(
        [np.bincount(torch.cat([ids for ids, _ in of_layer]).flatten(), minlength=EXPERTS) for of_layer in calls.values()]
    )


@pytest.mark.smoke
@pytest.mark.parametrize("way", [*CHOOSING, "switched", "gpu_experts"])
def test_each_way(checkpoint, way):
    """Also in generate(), whose steps are calls of one token."""
    folder = checkpoint("qwen3_moe")
    if way == "gpu_experts":
        model = served.load(folder, gpu_experts=3)
    else:
        model = switched(folder) if way == "switched" else CHOOSING[way](folder)
    with recorded(model) as calls, served.count_experts(model) as counts:
        model.generate(prompts(), max_new_tokens=5, do_sample=False)
    assert (counts.shape, counts.dtype) == ((LAYERS, EXPERTS), np.int64)
    np.testing.assert_array_equal(counts, seen(calls))
    assert (counts.sum(1) == 2 * (24 + 4) * 3).all()


@pytest.mark.parametrize("name", ["glm4_moe", "deepseek_v4", "gpt-oss MXFP4"])
def test_routers_of_other_models(checkpoint, name):
    """Rows are of layers that have experts."""
    model = served.load(checkpoint(name))
    with recorded(model) as calls, served.count_experts(model) as counts:
        logits(model, prompts())
    assert len(counts) == len(list(experts(model))) == LAYERS - (name == "glm4_moe")
    np.testing.assert_array_equal(counts, seen(calls))


def test_contexts_within_each_other(model):
    """Each counts what is called while it is open."""
    logits(model, prompts())
    with served.count_experts(model) as outer:
        assert not outer.any()
        logits(model, prompts())
        once = outer.copy()
        with served.count_experts(model) as inner:
            logits(model, prompts())
        logits(model, prompts())
    logits(model, prompts())
    assert once.any()
    np.testing.assert_array_equal(inner, once)
    np.testing.assert_array_equal(outer, 3 * once)


def test_an_error_ends_counting(model):
    seen = []

    def fail() -> None:
        with served.count_experts(model) as counts:
            seen.append(counts)
            raise RuntimeError("from inside")

    with pytest.raises(RuntimeError, match="from inside"):
        fail()
    logits(model, prompts())
    assert not seen[0].any()


def test_threads(model):
    """Those that call, and those that begin and end to count meanwhile."""
    with served.count_experts(model) as once:
        logits(model, prompts())

    def call(i: int) -> None:
        with served.count_experts(model) as own:
            logits(model, prompts())
        assert (own >= once).all()

    with served.count_experts(model) as counts, ThreadPoolExecutor(4) as pool:
        list(pool.map(call, range(16)))
    np.testing.assert_array_equal(counts, 16 * once)


def test_ids_that_are_no_experts(model):
    (_, module), *_ = experts(model)
    ids = torch.tensor([[0, -1, EXPERTS], [2**40, 3, 3]])
    with served.count_experts(model) as counts:
        module(torch.zeros(2, module.ktmoe_layer.hidden).bfloat16(), ids, torch.ones(2, 3))
    assert counts[0].tolist() == [1, 0, 0, 2, 0, 0, 0, 0]
    assert not counts[1:].any()


def test_with_adapters(checkpoint, model):
    with served.count_experts(model) as expected:
        logits(model, prompts())
    other = served.load(checkpoint("qwen3_moe"), activations="bf16")
    add_lora(other)
    with served.count_experts(other) as counts:
        logits(other, prompts())
    np.testing.assert_array_equal(counts, expected)


def test_a_compiled_block(checkpoint):
    """It was compiled before anybody counted."""
    model = packed(checkpoint("qwen3_moe"))
    (name, module), *_ = experts(model)
    block = torch.compile(model.get_submodule(name.rpartition(".")[0]), backend="eager")
    x = torch.ones(1, 5, module.ktmoe_layer.hidden).bfloat16()
    with torch.inference_mode():
        block(x)
        with served.count_experts(model) as counts:
            block(x)
    assert counts.sum(1).tolist() == [5 * 3] + [0] * (LAYERS - 1)


def test_what_cannot_be_counted(checkpoint):
    for model, message in (
        (make("qwen3_moe").lm_head, "Linear: expected a model with routed experts, found none"),
        (make("qwen3_moe"), r"layers\.0\.mlp\.experts \(Qwen3MoeExperts\): expected experts that ktmoe computes, found others"),
    ):
        with pytest.raises(UnavailableError, match=message), served.count_experts(model):
            raise AssertionError("it is counted")
