"""Every class of experts in the installed transformers, alone in a model; and what its weights compute, in float64."""

from __future__ import annotations

import importlib
import inspect
import re
from pathlib import Path

import tiny_models
import torch
import transformers
from torch import nn
from transformers import PreTrainedConfig, PreTrainedModel

_CLASS = re.compile(r"^class (\w*Experts\w*)\(", re.MULTILINE)
_DECORATED = re.compile(r"^@use_experts_implementation.*?^class (\w+)", re.MULTILINE | re.DOTALL)
#: What configs are told that accept no smaller ones, by their folders.
_CHANGES = {
    "dots3_note": {"num_key_value_heads": 4},
    "ernie4_5_vl_moe": {"moe_intermediate_size": [tiny_models.INTERMEDIATE] * 2},
    "glm5_next": {"num_key_value_heads": 4, "qk_rope_head_dim": 0, "mlp_layer_types": ["dense", "sparse"]},
    "zaya": {"num_experts_per_tok": 1},
}
#: What a class is made with besides the config.
_MORE = {"Ernie4_5_VLMoeMoeExperts": {"intermediate_size": tiny_models.INTERMEDIATE}}


def _scan() -> tuple[dict[str, type[nn.Module]], list[str]]:
    """The classes by name, and which have the decorator."""
    found, decorated = {}, []
    for file in sorted((Path(transformers.__file__).parent / "models").glob("*/modeling_*.py")):
        source = file.read_text()
        with_decorator = _DECORATED.findall(source)
        if names := {*_CLASS.findall(source), *with_decorator}:
            module = importlib.import_module(f"transformers.models.{file.parent.name}.{file.stem}")
            found |= {name: getattr(module, name) for name in sorted(names)}
            decorated += with_decorator
    return found, decorated


#: The classes called Experts, and those with the decorator use_experts_implementation, whatever they are called.
CLASSES, DECORATED = _scan()


class Alone(PreTrainedModel):
    """A model that is a module of experts in one layer."""

    config_class = PreTrainedConfig

    def __init__(self, config: PreTrainedConfig, experts: nn.Module):
        super().__init__(config)
        self.layers = nn.ModuleList([nn.ModuleDict({"experts": experts})])

    @property
    def experts(self) -> nn.Module:
        return self.layers[0]["experts"]

    @classmethod
    def _can_set_experts_implementation(cls) -> bool:
        return True


def alone(name: str) -> Alone:
    """An instance of one of CLASSES with normal weights in bfloat16; of one without the decorator, without any."""
    kind = CLASSES[name]
    if name not in DECORATED:
        experts = kind.__new__(kind)
        nn.Module.__init__(experts)
        return Alone(PreTrainedConfig(), experts)
    config = _config(kind)
    config._experts_implementation = "eager"
    experts = kind(config, **_MORE.get(name, {}))
    generator = torch.Generator().manual_seed(4)
    for parameter in experts.parameters():
        parameter.data = torch.randn(parameter.shape, generator=generator).mul(parameter.shape[-1] ** -0.5).bfloat16()
    return Alone(config, experts).eval()


def _config(kind: type[nn.Module]) -> PreTrainedConfig:
    """The first small config of its file with which an instance can be made."""
    changes, refused = _CHANGES.get(kind.__module__.split(".")[-2], {}), []
    for found in vars(inspect.getmodule(kind)).values():
        if inspect.isclass(found) and issubclass(found, PreTrainedConfig) and found is not PreTrainedConfig:
            try:
                config = tiny_models.config(found, changes)
                kind(config, **_MORE.get(kind.__name__, {}))
            except Exception as error:  # whatever the config's or the model's own code raises
                refused.append(f"{found.__name__}: {error}")
            else:
                return config
    raise AssertionError(f"no config for {kind.__name__}: {'; '.join(refused)}")


def computed(experts: nn.Module, x: torch.Tensor, ids: torch.Tensor, weights: torch.Tensor) -> tuple[torch.Tensor, ...]:
    """y [tokens, hidden] of a module's parameters and its own _apply_gate() in float64, and how far ktmoe's float32 may be off.

    h is rounded to bfloat16: a part 2**-8 of it. What else is rounded are float32 sums of n products and the activation, whose
    derivatives are below 1.1 for SiLU: n + 64 roundings of 2**-24 of the sizes of their terms.
    """
    gate_up, down = experts.gate_up_proj.double(), experts.down_proj.double()
    if experts.is_transposed:
        gate_up, down = gate_up.transpose(1, 2), down.transpose(1, 2)
    biases = [torch.zeros(tensor.shape[:2], dtype=torch.float64) for tensor in (gate_up, down)]
    if experts.has_bias:
        biases = [experts.gate_up_proj_bias.double(), experts.down_proj_bias.double()]
    y, bound = torch.zeros_like(x, dtype=torch.float64), torch.zeros_like(x, dtype=torch.float64)
    roundings = sum(gate_up.shape[1:]) + 64
    for token, slot in torch.cartesian_prod(*map(torch.arange, ids.shape)).tolist():
        expert, r, a = ids[token, slot], weights[token, slot].double(), x[token].double()
        g = gate_up[expert] @ a + biases[0][expert]
        h = experts._apply_gate(g[None])[0]
        sizes = gate_up[expert].abs() @ a.abs() + biases[0][expert].abs()
        of_gate, of_up = sizes.chunk(2) if experts.is_concatenated else (sizes[::2], sizes[1::2])
        of_h = h.abs() + 1.1 * of_gate * (of_up + 1)
        y[token] += r * (down[expert] @ h + biases[1][expert])
        off = down[expert].abs() @ (2.0**-8 * h.abs() + 2 * roundings * 2.0**-24 * of_h)
        bound[token] += r.abs() * (off + roundings * 2.0**-24 * (down[expert].abs() @ h.abs() + biases[1][expert].abs()))
    return y, bound
