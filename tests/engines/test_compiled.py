"""torch.compile of models whose experts and dense matrices are packed: one graph, and the bits of eager calls."""

from __future__ import annotations

import dense_models
import engine_models
import pytest
import torch
from transformers import DynamicCache

import ktmoe.transformers
from ktmoe.torch import DenseGroupedLinear, DenseLinear
from ktmoe.torch.counting import counting


class Backend:
    """Of torch.compile: aot_eager, and what the graphs were."""

    def __init__(self):
        self.graphs = []

    def __call__(self, graph, inputs):
        self.graphs.append([node.target for node in graph.graph.nodes if node.op == "call_function"])
        return torch._dynamo.lookup_backend("aot_eager")(graph, inputs)

    def count(self, name: str) -> int:
        operator = getattr(torch.ops.ktmoe, name).default
        return sum(graph.count(operator) for graph in self.graphs)


@pytest.fixture
def backend():
    torch.compiler.reset()
    yield Backend()
    torch.compiler.reset()


def made(name, **sizes):
    return ktmoe.transformers.pack(engine_models.make(name, num_hidden_layers=2, **sizes))


@pytest.mark.parametrize("name", ["qwen3_moe", "gpt_oss"])
def test_one_graph_of_the_same_bits(backend, name):
    """Of a whole model. Counts of experts go on while it runs."""
    model, ids = made(name), engine_models.prompts()
    experts = {module: engine_models.EXPERTS for _, module in engine_models.experts(model)}
    with dense_models.packed(model), torch.no_grad():
        with counting(experts) as expected:
            logits = model(input_ids=ids, use_cache=False).logits
        compiled = torch.compile(model, fullgraph=True, backend=backend)
        with counting(experts) as found:
            assert torch.equal(compiled(input_ids=ids, use_cache=False).logits, logits)
        assert found.any()
        assert (found == expected).all()
        assert len(backend.graphs) == 1
        assert backend.count("moe_experts") == 2
        assert backend.count("attention") == 2
        assert backend.count("linear") == sum(isinstance(module, DenseLinear) for module in model.modules()) >= 2 * 4 + 1


@pytest.mark.parametrize("name", ["qwen3_moe", "gpt_oss"])
def test_a_cache_in_graphs(backend, name):
    """Steps after a prompt have the bits of eager ones, an eager one among them. A step's graph serves the next ones."""
    model, ids = made(name), engine_models.prompts()
    step = torch.full((len(ids), 1), 7)
    with dense_models.packed(model), torch.no_grad():
        compiled = torch.compile(model, dynamic=True, backend=backend)
        found = []
        for call in (model, compiled):
            cache = DynamicCache(config=model.config)
            logits = [model(input_ids=ids, past_key_values=cache).logits]
            logits += [call(input_ids=step, past_key_values=cache).logits for _ in range(6)]
            logits.append(model(input_ids=step, past_key_values=cache).logits)
            found.append(torch.cat(logits, 1))
        assert torch.equal(*found)
        assert 0 < len(backend.graphs) <= 4


def test_layers_share_what_was_compiled(backend):
    """Modules that differ in their matrices only are one graph, which is not bound to the matrix of the first one."""
    model = made("qwen3_moe")
    with dense_models.packed(model), torch.no_grad():
        first, second = (layer.self_attn.o_proj for layer in model.model.layers)
        x = torch.randn(3, first.in_features, generator=torch.Generator().manual_seed(1)).bfloat16()
        compiled = torch.compile(DenseLinear.forward, fullgraph=True, backend=backend)
        assert not torch.equal(first(x), second(x))
        for module in (first, second):
            for given in (x, x.half(), x.float()):
                assert torch.equal(compiled(module, given), module(given))
        assert len(backend.graphs) == 3


def test_groups(backend):
    model = engine_models.make("deepseek_v4")
    with dense_models.packed(model), torch.no_grad():
        module = model.model.layers[0].self_attn.o_a_proj
        assert isinstance(module, DenseGroupedLinear)
        x = torch.randn(2, 3, module.n_groups, module.in_features, generator=torch.Generator().manual_seed(1)).bfloat16()
        compiled = torch.compile(module, fullgraph=True, backend=backend)
        assert torch.equal(compiled(x), module(x))
        assert backend.count("grouped_linear") == 1


def test_gradients_are_outside_of_the_graphs(backend):
    model, ids = made("qwen3_moe"), engine_models.prompts()
    with dense_models.packed(model), torch.enable_grad():
        embeds = model.get_input_embeddings()(ids).detach().requires_grad_()
        found = []
        for called in (model, torch.compile(model, backend=backend)):
            loss = called(inputs_embeds=embeds, use_cache=False).logits.float().square().mean()
            found.append(torch.autograd.grad(loss, embeds)[0])
        eager, compiled = (grad.float() for grad in found)
        assert (compiled - eager).norm() < 2**-6 * eager.norm()  # torch adds up in another order there
        assert len(backend.graphs) > 1
