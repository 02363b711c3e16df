"""DenseLinear and DenseGroupedLinear in the places of a model's own matrices: transformers and peft take them for theirs."""

from __future__ import annotations

import copy

import peft
import pytest
import torch
from dense_models import matrix, packed
from engine_models import logits, make, prompts
from transformers.models.deepseek_v4.modeling_deepseek_v4 import DeepseekV4GroupedLinear

from ktmoe import Linear, LinearGroup
from ktmoe.torch import DenseGroupedLinear, DenseLinear, share_input
from ktmoe.torch import shared_input as of_shared
from ktmoe.transformers.dense_modules import share_inputs

N, K, GROUPS = 48, 64, 4


def random(*shape, seed=1):
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed)).bfloat16()


def test_the_grouped_matrix_of_deepseek_v4():
    """transformers' own module is called in the same way, and gives nearly the same."""
    theirs = DeepseekV4GroupedLinear(K, GROUPS * N, GROUPS).bfloat16()
    with LinearGroup.of_rows(matrix(theirs, "o_a_proj"), GROUPS) as group:
        mine = DenseGroupedLinear(group)
        assert (mine.in_features, mine.out_features, mine.n_groups) == (
            theirs.in_features,
            theirs.out_features,
            theirs.n_groups,
        )
        for ahead in ((3,), (2, 3)):
            x = random(*ahead, GROUPS, K)
            torch.testing.assert_close(mine(x), theirs(x), rtol=2**-7, atol=2**-9)


@torch.no_grad()
def test_inputs_that_deepseek_v4_shares(monkeypatch):
    """Its layers call these modules with the very same tensor: one product each, of the same bits."""
    model = make("deepseek_v4", {"index_n_heads": 16, "q_lora_rank": 24})
    calls, products = [], of_shared.products

    def noted(linears, *args):
        calls.append(sorted(linear.name.removeprefix("model.layers.") for linear in linears))
        return products(linears, *args)

    monkeypatch.setattr(of_shared, "products", noted)
    with packed(model):
        expected = logits(model, prompts())
        share_inputs(model)
        output = model(prompts(), use_cache=True)
        torch.testing.assert_close(output.logits, expected, atol=0, rtol=0)
        of_prompt, calls[:] = [*calls], []
        model(prompts()[:, :1], past_key_values=output.past_key_values)
    of_attention = [names for names in calls if ".self_attn." in names[0]]
    assert calls == of_prompt
    assert [(names[0][0], len(names)) for names in of_attention] == [("0", 7), ("0", 2), ("1", 4), ("2", 7), ("2", 2)]


class Attention(torch.nn.Module):
    """What matters of one here: three matrices that take the same tensor, and one behind them."""

    def __init__(self):
        super().__init__()
        for name, n, k in (("q_proj", 48, K), ("k_proj", 32, K), ("v_proj", 48, K), ("o_proj", K, 48)):
            self.add_module(name, torch.nn.Linear(k, n, bias=name == "q_proj").bfloat16())
        self.norm = torch.nn.RMSNorm(K).bfloat16()

    def forward(self, x):
        x = self.norm(x)
        return self.o_proj(self.q_proj(x) * torch.sigmoid(self.k_proj(x).mean()) + self.v_proj(x))


@pytest.fixture
def both():
    """Two of equal numbers; the matrices of the second one are packed, and share their input."""
    torch.manual_seed(0)
    theirs = Attention()
    mine = copy.deepcopy(theirs)
    linears = {name: Linear(matrix(module, name)) for name, module in theirs.named_children() if name != "norm"}
    for name, linear in linears.items():
        mine.set_submodule(name, DenseLinear(linear))
    share_input([mine.q_proj, mine.k_proj, mine.v_proj])
    yield theirs, mine
    for linear in linears.values():
        linear.close()


def test_lora_by_peft(both):
    """It wraps the modules as torch's own: equal adapters, outputs and gradients that are near, in both passes."""
    config = peft.LoraConfig(r=3, target_modules=["q_proj", "o_proj"], init_lora_weights=False)
    outputs, gradients = [], []
    for model in both:
        torch.manual_seed(1)
        model = peft.get_peft_model(model, config)
        x = random(5, K)
        with torch.no_grad():
            outputs.append(model(x))
        y = model(x.requires_grad_())
        assert torch.equal(y, outputs[-1])
        y.float().square().sum().backward()
        gradients.append([x.grad, *(parameter.grad for parameter in model.parameters() if parameter.requires_grad)])
    torch.testing.assert_close(outputs[1], outputs[0], rtol=2**-6, atol=2**-6)
    assert len(gradients[0]) == 5
    for one, other in zip(*gradients, strict=True):
        assert one.dtype == other.dtype
        assert (one.float() - other.float()).norm() <= 2**-6 * one.float().norm()


def test_nothing_is_merged_into_a_packed_matrix(both):
    model = peft.get_peft_model(both[1], peft.LoraConfig(r=3, target_modules=["q_proj"], init_lora_weights=False))
    with pytest.raises(AttributeError, match=r"q_proj: its weight is packed and is no tensor; ktmoe\.Linear\.export"):
        model.merge_and_unload()
    assert isinstance(model.unload().q_proj, DenseLinear)
