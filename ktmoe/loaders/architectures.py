"""What the experts of a GGUF file compute, and which tensors they have: by general.architecture, since no other key says it.

The facts are those of the llama.cpp that llama-cpp-python 0.3.36 ships: build_moe_ffn() of src/llama-graph.cpp, its callers and
the tensors that they create in src/models. An architecture without a row is refused, since its experts may compute anything.
"""

from __future__ import annotations

from dataclasses import dataclass

from ktmoe.errors import CheckpointError, FormatError
from ktmoe.loaders.checkpoint import Checkpoint
from ktmoe.loaders.gguf_model import ARCHITECTURE
from ktmoe.loaders.model_config import SWIGLU_OAI
from ktmoe.messages import show
from ktmoe.weights.activation import SILU, GatedActivation


@dataclass(frozen=True)
class Architecture:
    """A row of the table.

    function: of the experts, without a limit; in words where ktmoe does not compute it. biases: each projection has them; else
    none has. clamped: a layer's limit clamps the gate before SiLU, as GatedActivation does; else it would clamp silu(gate).
    limited: the file must say a layer's limit. router_weight: what a router weight multiplies.
    """

    function: GatedActivation | str = SILU
    biases: bool = False
    clamped: bool = False
    limited: bool = False
    router_weight: str = "down_output"


# fmt: off
_PLAIN = (
    "afmoe", "arctic", "bailingmoe", "bailingmoe2", "bailingmoe3", "cohere2moe", "dbrx", "deepseek", "deepseek2",
    "deepseek2-ocr", "deepseek32", "dots1", "dots3note", "ernie4_5-moe", "exaone-moe", "glm-dsa", "glm4moe", "granite",
    "granite_swa", "granitehybrid", "granitemoe", "grovemoe", "hunyuan-moe", "hy_v3", "jamba", "kimi-linear", "laguna", "lfm2",
    "lfm2moe", "llada-moe", "llama", "llama-embed", "mellum", "mimo2", "minicpm", "minimax-01", "minimax-m2", "mistral3",
    "mistral4", "olmoe", "phimoe", "qwen2moe", "qwen35moe", "qwen3moe", "qwen3next", "qwen3vlmoe", "qwen4exp", "rnd1", "step35",
)
#: Architectures without routed experts whose graph gives gate, up and down to build_ffn() with SiLU.
_DENSE = frozenset((
    "arwkv7", "baichuan", "chameleon", "cogvlm", "cohere2", "command-r", "deci", "dream", "eagle3", "ernie4_5",
    "eurobert", "exaone", "exaone4", "falcon-h1", "hrm_text", "hunyuan_vl", "internlm2", "jais", "llada", "maincoder",
    "minicpm3", "muse-glimmer", "nanbeige", "olmo", "olmo2", "openelm", "orion", "pangu-embedded", "plamo", "qwen",
    "qwen2", "qwen2vl", "qwen3", "qwen35", "qwen3vl", "refact", "rwkv6qwen2", "seed_oss", "smollm3", "stablelm", "talkie",
    "xverse",
))
# fmt: on
#: By name. llama.cpp has the numbers of gpt-oss's function in its source. Unsloth's files say "glm5next" for "glm5-next".
ARCHITECTURES = dict.fromkeys(_PLAIN, Architecture()) | {
    "deepseek4": Architecture(clamped=True, limited=True),
    "dflash": Architecture(clamped=True, limited=True),
    "gemma4": Architecture("GELU"),
    "glm5-next": Architecture(clamped=True),
    "glm5next": Architecture(clamped=True),
    "gpt-oss": Architecture(SWIGLU_OAI, biases=True),
    "grok": Architecture("GELU"),
    "hy_v4": Architecture(clamped=True),
    "kimi-k3": Architecture("SiTU"),
    "llama4": Architecture(router_weight="expert_input"),
    "maple": Architecture(clamped=True, limited=True),
    "minimax-m3": Architecture(SWIGLU_OAI),
    "nemotron_h": Architecture("squared ReLU without a gate"),
    "nemotron_h_moe": Architecture("squared ReLU without a gate"),
    "nomic-bert-moe": Architecture("GELU without a gate"),
    "smallthinker": Architecture("ReLU"),
}
#: The least limit that is one; smaller ones are none in llama.cpp, too.
_LEAST_LIMIT = 1e-6


def _row(checkpoint: Checkpoint) -> Architecture | None:
    """The row of a checkpoint's architecture, if there is one. Raises CheckpointError for no name."""
    name = checkpoint.config.get(ARCHITECTURE)
    if not isinstance(name, str):
        raise CheckpointError(f"{checkpoint.path}: {ARCHITECTURE}: expected a name, found {show(name)}")
    return ARCHITECTURES.get(name)


def of(checkpoint: Checkpoint) -> Architecture:
    """The row of a checkpoint's architecture. Raises FormatError, which names it, for one with another function or no row."""
    found = _row(checkpoint)
    name, where = checkpoint.config[ARCHITECTURE], f"{checkpoint.path}: {ARCHITECTURE}"
    if found is None:
        raise FormatError(f"{where}: expected one whose experts' function is known, found {show(name)}")
    if isinstance(found.function, str):
        raise FormatError(f"{where}: expected experts with SiLU, found {name!r}, whose function is {found.function}")
    return found


def activation(checkpoint: Checkpoint, layer: int) -> GatedActivation:
    """The activation of a layer's experts.

    Raises what of() raises, FormatError for a clamp of silu(gate), CheckpointError for a limit that is none.
    """
    row, name = of(checkpoint), checkpoint.config[ARCHITECTURE]
    if isinstance(row.function, GatedActivation) and row.function != SILU:
        return row.function
    limit = _limit(checkpoint, f"{name}.swiglu_clamp_exp", layer, row.limited)
    if limit <= _LEAST_LIMIT:
        return SILU
    if not row.clamped:
        where = f"{checkpoint.path}: {ARCHITECTURE}: layer {layer} of {name!r}"
        raise FormatError(f"{where} clamps silu(gate) to {limit:g}, which is not supported")
    return GatedActivation(limit=limit)


def dense_activation(checkpoint: Checkpoint) -> GatedActivation:
    """The activation of dense MLPs and shared experts: SILU.

    Raises CheckpointError for no architecture; FormatError for one that clamps, or whose experts have another function, or
    without a row: what its dense MLPs have is not known.
    """
    name = checkpoint.config.get(ARCHITECTURE)
    row = Architecture() if isinstance(name, str) and name in _DENSE else _row(checkpoint)
    limits = [checkpoint.config.get(f"{name}.swiglu_clamp_{what}") for what in ("exp", "shexp")]
    if (
        row is None
        or row.function != SILU
        or row.clamped
        or any(any(limit) if isinstance(limit, list) else limit for limit in limits)
    ):
        where = f"{checkpoint.path}: {ARCHITECTURE}"
        raise FormatError(f"{where}: expected one whose MLPs have plain SiLU, found {show(name)}: pass activation=...")
    return SILU


def _limit(checkpoint: Checkpoint, key: str, layer: int, needed: bool) -> float:
    """A layer's number of a key that has one for all layers, or a list; 0 if there is no such key."""
    found = checkpoint.config.get(key, None if needed else 0.0)
    if isinstance(found, list) and layer < len(found):
        found = found[layer]
    if type(found) is not float or not 0 <= found < float("inf"):
        raise CheckpointError(f"{checkpoint.path}: {key}: expected a number, 0 or more, for layer {layer}, found {show(found)}")
    return found
