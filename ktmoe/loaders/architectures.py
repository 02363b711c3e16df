"""What the experts of a GGUF file compute: by general.architecture, since no other key says it.

The facts are those of llama.cpp: build_moe_ffn() of src/llama-graph.cpp, and its callers in src/models. An architecture that is
not in these tables is refused, since its experts may compute anything.
"""

from __future__ import annotations

from ktmoe.errors import CheckpointError, FormatError
from ktmoe.loaders.checkpoint import Checkpoint
from ktmoe.loaders.gguf_model import ARCHITECTURE
from ktmoe.loaders.model_config import SWIGLU_OAI
from ktmoe.messages import show
from ktmoe.weights.activation import SILU, GatedActivation

#: Their experts are silu(gate) * up.
# fmt: off
SILU_ARCHITECTURES = frozenset((
    "afmoe", "arctic", "bailingmoe", "bailingmoe2", "bailingmoe3", "dbrx", "deci", "deepseek", "deepseek2", "deepseek2-ocr",
    "deepseek32", "deepseek4", "dots1", "ernie4_5-moe", "exaone-moe", "glm-dsa", "glm4moe", "glm5next", "granitehybrid",
    "granitemoe", "grovemoe", "hunyuan-moe", "hy_v3", "hy_v4", "jamba", "kimi-linear", "lfm2moe", "llada-moe", "llama",
    "llama-embed", "llama4", "mimo2", "minicpm", "minimax-m2", "mistral3", "mistral4", "olmoe", "phimoe", "qwen2moe",
    "qwen35moe", "qwen3moe", "qwen3next", "qwen3vlmoe", "rnd1", "step35",
))
# fmt: on
#: gpt-oss's function; llama.cpp has its numbers in its source.
OAI_ARCHITECTURES = frozenset(("gpt-oss", "minimax-m3"))
#: Those with another function, and which.
OTHERS = {
    "gemma4": "GELU",
    "grok": "GELU",
    "kimi-k3": "SiTU",
    "nemotron_h_moe": "squared ReLU without a gate",
    "nomic-bert-moe": "GELU without a gate",
    "smallthinker": "ReLU",
}
#: Those that clamp the gate before SiLU, as GatedActivation does. Others clamp silu(gate).
_CLAMPED = ("deepseek4", "glm5next", "hy_v4")
#: A smaller limit is none, in llama.cpp, too.
_LEAST_LIMIT = 1e-6


def activation(checkpoint: Checkpoint, layer: int) -> GatedActivation:
    """Of a layer's experts. Raises FormatError, which names the architecture, for another function or one that is not known;
    CheckpointError for a limit that is none."""
    architecture = checkpoint.config.get(ARCHITECTURE)
    where = f"{checkpoint.path}: {ARCHITECTURE}"
    if not isinstance(architecture, str):
        raise CheckpointError(f"{where}: expected a name, found {show(architecture)}")
    if architecture in OAI_ARCHITECTURES:
        return SWIGLU_OAI
    if architecture in OTHERS:
        raise FormatError(
            f"{where}: expected experts with SiLU, found {architecture!r}, whose function is {OTHERS[architecture]}"
        )
    if architecture not in SILU_ARCHITECTURES:
        raise FormatError(f"{where}: expected one whose experts' function is known, found {show(architecture)}")
    limit = _limit(checkpoint, f"{architecture}.swiglu_clamp_exp", layer, architecture == "deepseek4")
    if limit <= _LEAST_LIMIT:
        return SILU
    if architecture not in _CLAMPED:
        raise FormatError(f"{where}: layer {layer} of {architecture!r} clamps silu(gate) to {limit:g}, which is not supported")
    return GatedActivation(limit=limit)


def router_weight(checkpoint: Checkpoint) -> str:
    """What the model multiplies a router weight onto."""
    return "expert_input" if checkpoint.config.get(ARCHITECTURE) == "llama4" else "down_output"


def _limit(checkpoint: Checkpoint, key: str, layer: int, needed: bool) -> float:
    """A layer's number of a key that has one for all layers, or a list; 0 if there is no such key."""
    found = checkpoint.config.get(key, None if needed else 0.0)
    if isinstance(found, list) and layer < len(found):
        found = found[layer]
    if type(found) is not float or not 0 <= found < float("inf"):
        raise CheckpointError(f"{checkpoint.path}: {key}: expected a number, 0 or more, for layer {layer}, found {show(found)}")
    return found
