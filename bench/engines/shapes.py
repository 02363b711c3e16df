"""The models that are measured: a few layers of real ones, and how much memory they take.

Sources: the experts are those of models.toml; Qwen3's attention is its config.json's; all else is transformers' configuration
classes' own defaults. The published Qwen3 is in bfloat16 or FP8; here its experts are in MXFP4, as the others' are.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

from bench.models import Model, models

#: What a process takes besides weights: torch, transformers, and the tensors of the largest prompt.
PROCESS_BYTES = 1_000_000_000
#: What llama.cpp calls the architectures that the bench writes as GGUF files, by transformers' model_type.
ARCHITECTURES = {"gpt_oss": "gpt-oss", "qwen3_moe": "qwen3moe"}


@dataclass(frozen=True)
class Engine:
    """A model. kind: its model_type in transformers. vocabulary: of all layers. other_bytes: of a layer without its experts."""

    experts: Model
    kind: str
    vocabulary: int
    other_bytes: int

    @property
    def name(self) -> str:
        return self.experts.name

    @property
    def as_gguf(self) -> bool:
        """Whether gguf_model.py writes it."""
        return self.kind in ARCHITECTURES

    @property
    def published_dense(self) -> str:
        """What the published dense matrices are stored in."""
        return "FP8" if self.kind == "deepseek_v4" else "BF16"

    def vocabulary_of(self, layers: int) -> int:
        """The same share of the vocabulary as of the layers: else the output layer would take most of the time."""
        return max(64, self.vocabulary * layers // self.experts.layers // 64 * 64)

    def expert_bytes(self, weights: str) -> int:
        """Bytes of one expert, of no GGUF file. weights: "MXFP4" or "BF16"."""
        experts = self.experts
        return experts.expert_bytes if weights == "MXFP4" else 2 * 3 * experts.hidden * experts.intermediate

    def layer_bytes(self, weights: str) -> int:
        """Bytes of a layer's experts."""
        return self.experts.experts * self.expert_bytes(weights)

    def process_bytes(self, weights: str, layers: int) -> int:
        """What a process takes that has loaded so many layers, about."""
        vocabulary = 2 * 2 * self.vocabulary_of(layers) * self.experts.hidden
        return PROCESS_BYTES + vocabulary + layers * (self.layer_bytes(weights) + self.other_bytes)

    def cache_bytes(self, layers: int, context: int) -> int:
        """Bytes of the key-value cache that a token's step reads after so many tokens of a text, in 16 bits a number.

        V4-Flash's index, which chooses the compressed entries, is not counted.
        """
        window = min(context, 128)
        if self.kind == "qwen3_moe":
            return layers * context * 2 * 4 * 128 * 2
        if self.kind == "gpt_oss":  # layers in turns, the first with a window
            return (-(-layers // 2) * window + layers // 2 * context) * 2 * 8 * 64 * 2
        sparse, heavy = -(-layers // 2), layers // 2
        return (layers * window + sparse * min(context // 4, 512) + heavy * (context // 128)) * 512 * 2

    def config(self, layers: int) -> dict:
        """The arguments of transformers' configuration class, whose defaults are the rest. No token ends a text."""
        experts = self.experts
        common = {
            "model_type": self.kind,
            "num_hidden_layers": layers,
            "vocab_size": self.vocabulary_of(layers),
            "hidden_size": experts.hidden,
            "num_experts_per_tok": experts.top_k,
            "bos_token_id": None,
            "eos_token_id": None,
        }
        if self.kind == "gpt_oss":
            return common | {"intermediate_size": experts.intermediate, "num_local_experts": experts.experts}
        if self.kind == "qwen3_moe":
            sizes = {"moe_intermediate_size": experts.intermediate, "num_experts": experts.experts, "norm_topk_prob": True}
            heads = {"num_attention_heads": 32, "num_key_value_heads": 4, "head_dim": 128}
            return common | sizes | heads | {"rope_parameters": {"rope_type": "default", "rope_theta": 1e6}}
        kinds = ("compressed_sparse_attention", "heavily_compressed_attention")  # in turns, but for the first layers
        return common | {
            "moe_intermediate_size": experts.intermediate,
            "n_routed_experts": experts.experts,
            "layer_types": [kinds[layer % 2] for layer in range(layers)],
            "mlp_layer_types": ["moe"] * layers,  # the first three of the real model route by a table of tokens
        }


def engines() -> dict[str, Engine]:
    """The models whose text is measured, by name."""
    known = models()
    found = (
        Engine(known["gpt-oss-20b"], "gpt_oss", 201_088, 53_000_000),
        Engine(replace(known["Qwen3-30B-A3B"], weights="MXFP4"), "qwen3_moe", 151_936, 38_000_000),
        Engine(known["V4-Flash"], "deepseek_v4", 129_280, 310_000_000),
    )
    return {engine.name: engine for engine in found}
