"""GGUF architectures that become models of transformers: a row each. An architecture without a row is refused.

configs.py and deepseek_configs.py say what config.json would say. Names that all rows share are in names.py.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field

from ktmoe.errors import FormatError
from ktmoe.loaders.checkpoint import Checkpoint
from ktmoe.loaders.gguf_model import ARCHITECTURE
from ktmoe.messages import show
from ktmoe.transformers.gguf import configs, deepseek_configs
from ktmoe.transformers.gguf.changes import BY_KEY_HEADS, INTERLEAVED, QWEN3_NEXT, Change, Order
from ktmoe.transformers.gguf.metadata import GgufMetadata


@dataclass(frozen=True)
class TextArchitecture:
    """config: of the metadata, what config.json would have; with model_type.

    names: modules of a layer by GGUF's stems, or parameters by GGUF's names, where they are not those of names.py. If several
    stems are one module, its rows are theirs in this order. orders: what the converter did to rows, by the first stem. changes:
    what it did to numbers, by parameters of a layer. See changes.py.
    """

    config: Callable[[GgufMetadata], dict]
    names: Mapping[str, str] = field(default_factory=dict)
    orders: Mapping[str, Order] = field(default_factory=dict)
    changes: Mapping[str, Change] = field(default_factory=dict)


def find(checkpoint: Checkpoint) -> TextArchitecture:
    """The row of a checkpoint's architecture. Raises FormatError, which names it, if there is none."""
    name = checkpoint.config.get(ARCHITECTURE)
    row = ARCHITECTURES.get(name) if isinstance(name, str) else None
    if row is None:
        known = ", ".join(sorted(ARCHITECTURES))
        raise FormatError(
            f"{checkpoint.path}: {ARCHITECTURE}: text needs one of {known}; found {show(name)}. Of other architectures, "
            "ktmoe.MoEModel.from_checkpoint() reads the experts"
        )
    return row


_SHARED_EXPERT = {f"ffn_{name}_shexp": f"mlp.shared_expert.{name}_proj" for name in ("gate", "up", "down")}
#: By general.architecture.
ARCHITECTURES = {
    "deepseek2": TextArchitecture(deepseek_configs.deepseek2),
    "dots1": TextArchitecture(deepseek_configs.dots1),
    "glm4moe": TextArchitecture(deepseek_configs.glm4moe),
    "gpt-oss": TextArchitecture(configs.gpt_oss, {"ffn_gate_inp": "mlp.router"}),
    "granitemoe": TextArchitecture(
        configs.granitemoe,
        {
            "ffn_gate_inp": "block_sparse_moe.router",
            "ffn_gate_shexp": "shared_mlp.input_linear",
            "ffn_up_shexp": "shared_mlp.input_linear",
            "ffn_down_shexp": "shared_mlp.output_linear",
        },
        orders=INTERLEAVED,
    ),
    "llama": TextArchitecture(configs.llama, orders=INTERLEAVED),
    "minimax-m2": TextArchitecture(configs.minimax_m2, {"exp_probs_b.bias": "mlp.e_score_correction_bias"}),
    "olmoe": TextArchitecture(configs.olmoe),
    "qwen2moe": TextArchitecture(configs.qwen2moe, _SHARED_EXPERT),
    "qwen3moe": TextArchitecture(configs.qwen3moe),
    "qwen3next": TextArchitecture(
        configs.qwen3next,
        _SHARED_EXPERT
        | {
            "attn_qkv": "linear_attn.in_proj_qkvz",
            "attn_gate": "linear_attn.in_proj_qkvz",
            "ssm_in": "linear_attn.in_proj_qkvz",
        },
        BY_KEY_HEADS,
        QWEN3_NEXT,
    ),
}
