"""Random weights of the models of gguf_models.py, and texts whose experts no rounding changes.

Norms and biases are no identities, and logits have spread, so that an error shows. Eight dimensions of the residual stream say
which experts a token likes best, in an order: all routers read them, and no layer writes much into them.
"""

from __future__ import annotations

import functools
import re

import gguf_tokenizers
from gguf_models import EXPERTS, MODELS, TOKENS, VOCABULARY


def make(name: str):
    """The model, in bfloat16, as checkpoints are published."""
    import torch
    import transformers

    model_type, config, _, _ = MODELS[name]
    kind = transformers.models.auto.configuration_auto.CONFIG_MAPPING[model_type]
    model = transformers.AutoModelForCausalLM.from_config(kind(**config), dtype=torch.bfloat16).eval()
    model.set_experts_implementation("eager")
    generator = torch.Generator().manual_seed(sum(name.encode()))
    size = 2.0
    if any("correction_bias" in key for key in model.state_dict()):
        size = 0.6  # a sigmoid makes large numbers alike
    elif config.get("n_group"):
        size = 0.3  # with large ones, an expert outweighs the others of its group
    depth = model.config.num_hidden_layers / 3
    with torch.no_grad():
        for key, value in [*model.named_parameters(), *model.named_buffers()]:
            if re.search(ROUTER, key):
                value.copy_(_router(value.shape, size, generator))
            elif not re.search(r"inv_freq|A_log", key):
                value.copy_(_values(key, value.shape, generator, model_type) / (depth if re.search(WRITES, key) else 1))
    return model


#: A router's class.
ROUTERS = "Top[kK]Router$"
#: A router's matrix.
ROUTER = r"(mlp\.gate|router|router\.layer)\.weight$"


#: What is added to what a router reads, in parts of it. llama.cpp's rounding of what Q4_K multiplies adds 0.03.
NOISE = 0.05
#: A matrix or bias whose result is added to the residual stream.
WRITES = r"(o_proj|out_proj|down_proj|output_linear)(\.weight|\.bias|_bias)?$"


def _router(shape, size: float, generator):
    """Each expert reads one of the first dimensions, and a little of all."""
    import torch

    values = 0.1 * size * shape[-1] ** -0.5 * torch.randn(shape, generator=generator)
    for expert, dimension in enumerate(torch.randperm(EXPERTS, generator=generator)[: len(values)]):
        values[expert, dimension] += size
    return values


def _values(key: str, shape, generator, model_type: str):
    """Of a parameter or a buffer of that name, in float32."""
    import torch

    values = torch.randn(shape, generator=generator)
    qwen3_next = model_type == "qwen3_next"
    if key.endswith("correction_bias"):
        # one expert is chosen for its bias alone, and one never
        first, last = torch.randperm(len(values), generator=generator)[:2]
        values *= 0.01
        values[first] += 1
        values[last] -= 1
    elif key.endswith("norm.weight"):
        values = 0.2 * values.clamp(-3, 3) + (0 if qwen3_next and "linear_attn" not in key else 1)
    elif key.endswith("embed_tokens.weight"):
        grades = torch.arange(EXPERTS, dtype=torch.float32) - 3
        for row in values:
            row[:EXPERTS] = 0.9 * grades[torch.randperm(EXPERTS, generator=generator)]
    elif len(shape) == 1 or key.endswith("_bias"):
        values *= 0.3
    else:
        values *= shape[-1] ** -0.5
        values *= 3 if key.endswith("lm_head.weight") else 2 if "gate_up_proj" in key else 1
    if re.search(WRITES, key):
        if (model_type == "gpt_oss" and key.endswith("experts.down_proj")) or len(shape) == 1 or key.endswith("_bias"):
            values[..., :EXPERTS] *= 0.05
        else:
            values[..., :EXPERTS, :] *= 0.05
    return values


def text(model):
    """Token ids, int64 [TOKENS], for which each router chooses the same experts if what it reads is a little another,
    but for three tokens at most.

    model: in float32. Raises ValueError if none is found.
    """
    import torch

    generator = torch.Generator().manual_seed(7)
    ids = torch.randperm(gguf_tokenizers.TRAINED, generator=generator)
    usual = ids[_steady(model, ids)]
    ids = usual[torch.randint(len(usual), (TOKENS,), generator=generator)]
    for allowed in (0, 0, 0, 0, 0, 1, 2, 3):
        bad = ~_steady(model, ids)
        if bad.sum() <= allowed:
            return ids.numpy()
        ids[bad] = usual[torch.randint(len(usual), (int(bad.sum()),), generator=generator)]
    raise ValueError(f"{type(model).__name__}: {bad.sum()} tokens are not steady")


def _steady(model, ids):
    """For each token of a text, whether noise changes no router's choice: bool [tokens]."""
    import torch

    read = []
    routers = [module for module in model.modules() if re.search(ROUTERS, type(module).__name__)]
    hooks = [router.register_forward_pre_hook(lambda module, given: read.append((module, given))) for router in routers]
    with torch.no_grad():
        model(ids[None])
        for hook in hooks:
            hook.remove()
        noise = NOISE * torch.randn((12, *read[0][1][0].shape[-2:]), generator=torch.Generator().manual_seed(8))
        good = torch.ones(len(ids), dtype=torch.bool)
        for router, (hidden, *rest) in read:
            noisy = hidden + hidden.square().mean().sqrt() * noise.view(-1, len(ids), hidden.shape[-1])
            chosen = _chosen(router, noisy.flatten(0, 1), *rest).view(len(noisy), len(ids), -1)
            good &= (chosen == _chosen(router, hidden, *rest)).all(-1).all(0)
    return good


def _chosen(router, *given):
    """Experts of each token, sorted: int64 [tokens, experts]."""
    *_, chosen = router(*given)
    return chosen.reshape(-1, chosen.shape[-1]).sort(-1).values


def score_groups(model, score) -> None:
    """DeepSeek-V2's routers choose groups of experts by another score. score: see GROUP_SCORES."""
    import torch

    def route(router, hidden):
        scores = (hidden.reshape(-1, hidden.shape[-1]).float() @ router.weight.float().T).softmax(-1)
        groups = scores.unflatten(-1, (router.num_group, -1))
        chosen = score(groups).topk(router.topk_group, -1).indices
        kept = torch.zeros(groups.shape[:-1], dtype=torch.bool).scatter_(1, chosen, True)
        weights, experts = (groups * kept[..., None]).flatten(-2).topk(router.top_k, -1)
        return scores, weights * router.routed_scaling_factor, experts

    for module in model.modules():
        if re.search(ROUTERS, type(module).__name__):
            module.forward = functools.partial(route, module)


def beside(name: str, tensors: dict) -> dict:
    """What a published checkpoint has and transformers leaves out: a layer that predicts the token after next."""
    import torch

    generator = torch.Generator().manual_seed(1)

    def normal(*shape):
        return torch.randn(shape, generator=generator).to(torch.bfloat16)

    def layer(last: int, into: str):
        return {
            key.replace(f"model.layers.{last}.", into): value.clone()
            for key, value in tensors.items()
            if f"layers.{last}." in key
        }

    if name in ("glm4_moe", "deepseek_v3"):
        into = "model.layers.3."
        more = {f"{into}{key}.weight": normal(256) for key in ("enorm", "hnorm", "shared_head.norm")}
        more |= {f"{into}{key}.weight": normal(VOCABULARY, 256) for key in ("embed_tokens", "shared_head.head")}
        return layer(2, into) | more | {f"{into}eh_proj.weight": normal(256, 512)}
    if name == "qwen3_next":
        more = {f"mtp.{key}.weight": normal(256) for key in ("norm", "pre_fc_norm_embedding", "pre_fc_norm_hidden")}
        return layer(3, "mtp.layers.0.") | more | {"mtp.fc.weight": normal(256, 512)}
    return {}
