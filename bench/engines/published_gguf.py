"""GGUF files with the tensors that published ones have, in the same types, of random records. Needs no torch.

gpt-oss as ggml-org has it: experts in MXFP4, other matrices in Q8_0. Qwen3-MoE in Q4_K_M, by llama.cpp's rule for which tensors
get Q6_K. Routers, norms, biases and sinks are float32, and bfloat16 holds their numbers. The tokenizer knows single bytes and
one pair of them; the rest of the vocabulary is made up, and no token ends a text.
"""

from __future__ import annotations

from pathlib import Path

import numpy as np

from bench.engines import byte_tokenizer
from bench.engines.shapes import ARCHITECTURES, Engine
from ktmoe.synthetic.gguf import ALIGNMENT, GgufTensor, gets_more, header, weights
from ktmoe.synthetic.tensors import Shaper, numbers
from ktmoe.weights.ggml import GGML

#: What such a file is called, by the model's kind.
TYPES = {"gpt_oss": "MXFP4", "qwen3_moe": "Q4_K_M"}
#: Heads, heads of keys and values, and numbers of a head.
_HEADS = {"gpt_oss": (64, 8, 64), "qwen3_moe": (32, 4, 128)}
_PRE_TOKENIZERS = {"gpt_oss": "gpt-4o", "qwen3_moe": "qwen2"}


def write(engine: Engine, layers: int, file: Path) -> None:
    """A model with so many layers."""
    made = tensors(engine, layers)
    with file.open("wb") as out:
        out.write(header(_metadata(engine, layers), made))
        for tensor in made:
            out.write(tensor.read(0, tensor.nbytes, 0))
            out.write(bytes(-tensor.nbytes % ALIGNMENT))


def tensors(engine: Engine, layers: int) -> list[GgufTensor]:
    """In the order of the file."""
    experts, (heads, kv_heads, head) = engine.experts, _HEADS[engine.kind]
    hidden, width, count, vocabulary = experts.hidden, experts.intermediate, experts.experts, engine.vocabulary_of(layers)
    gpt_oss = engine.kind == "gpt_oss"
    dense, better = ("Q8_0", "Q8_0") if gpt_oss else ("Q4_K", "Q6_K")
    found = [
        _matrix("token_embd", dense, (vocabulary, hidden), deviates_as=1),
        _matrix("output", better, (vocabulary, hidden)),
        _norm("output_norm", hidden),
    ]
    for layer in range(layers):
        more = better if gets_more(layer, layers) else dense
        attention = {"q": (dense, heads * head, hidden), "k": (dense, kv_heads * head, hidden)}
        attention |= {"v": (more, kv_heads * head, hidden), "output": (dense, hidden, heads * head)}
        of_experts = {"gate": ("MXFP4", width, hidden), "up": ("MXFP4", width, hidden), "down": ("MXFP4", hidden, width)}
        if not gpt_oss:
            of_experts = {"gate": (dense, width, hidden), "up": (dense, width, hidden), "down": (more, hidden, width)}
        of_layer = [_norm("attn_norm", hidden), _norm("post_attention_norm" if gpt_oss else "ffn_norm", hidden)]
        of_layer += [_matrix(f"attn_{name}", kind, shape) for name, (kind, *shape) in attention.items()]
        of_layer += [_matrix(f"ffn_{name}_exps", kind, (count, *shape)) for name, (kind, *shape) in of_experts.items()]
        of_layer.append(_small("ffn_gate_inp.weight", (count, hidden), 0, (3 / hidden) ** 0.5))
        if gpt_oss:
            of_layer += [_small(f"attn_{name}.bias", (n,), 0, 0.1) for name, (_, n, _) in attention.items()]
            of_layer += [_small(f"ffn_{name}_exps.bias", (count, n), 0, 0.1) for name, (_, n, _) in of_experts.items()]
            of_layer += [_small("ffn_gate_inp.bias", (count,), 0, 0.1), _small("attn_sinks.weight", (heads,), 0, 1)]
        else:
            of_layer += [_norm("attn_q_norm", head), _norm("attn_k_norm", head)]
        found += [GgufTensor(f"blk.{layer}.{one.name}", one.dtype, one.shape, one.shaper, one.slabs) for one in of_layer]
    return found


def parts(made: list[GgufTensor]) -> dict[str, int]:
    """{"experts": bytes, "dense": bytes of all else but the embedding, "embedding": bytes}."""
    found = {"experts": 0, "dense": 0, "embedding": 0}
    for tensor in made:
        part = "experts" if "_exps." in tensor.name else "embedding" if tensor.name.startswith("token_embd") else "dense"
        found[part] += tensor.nbytes
    return found


def nbytes(engine: Engine, layers: int) -> int:
    """Bytes of all tensors."""
    return sum(tensor.nbytes for tensor in tensors(engine, layers))


def expert_bytes(engine: Engine, layers: int) -> list[int]:
    """Bytes of an expert of each layer."""
    found = [0] * layers
    for tensor in tensors(engine, layers):
        if "_exps." in tensor.name:
            found[int(tensor.name.split(".")[1])] += tensor.nbytes // engine.experts.experts
    return found


def _matrix(stem: str, kind: str, shape: tuple[int, ...] | list[int], deviates_as: int | None = None) -> GgufTensor:
    """Weights with a standard deviation of 1 / sqrt(columns), or of so many."""
    slabs = shape[0] if len(shape) > 2 else 1
    return GgufTensor(f"{stem}.weight", kind, tuple(shape), weights(GGML[kind], deviates_as or shape[-1]), slabs)


def _norm(stem: str, count: int) -> GgufTensor:
    return _small(f"{stem}.weight", (count,), 1, 0.1)


def _small(name: str, shape: tuple[int, ...], middle: float, most: float) -> GgufTensor:
    return GgufTensor(name, "F32", shape, _bfloat16(numbers(np.float32, middle - most, middle + most)))


def _bfloat16(shaper: Shaper) -> Shaper:
    """Float32 numbers that bfloat16 holds, too."""

    def shape(out: np.ndarray) -> None:
        shaper(out)
        out.view(np.uint32)[:] &= 0xFFFF0000

    return shape


def _metadata(engine: Engine, layers: int) -> dict[str, object]:
    experts, (heads, kv_heads, head) = engine.experts, _HEADS[engine.kind]
    fields: dict[str, object] = {
        "block_count": layers,
        "context_length": 131072 if engine.kind == "gpt_oss" else 40960,
        "embedding_length": experts.hidden,
        "feed_forward_length": experts.intermediate,
        "expert_feed_forward_length": experts.intermediate,
        "expert_count": experts.experts,
        "expert_used_count": experts.top_k,
        "attention.head_count": heads,
        "attention.head_count_kv": kv_heads,
        "attention.key_length": head,
        "attention.value_length": head,
        "attention.layer_norm_rms_epsilon": 1e-5 if engine.kind == "gpt_oss" else 1e-6,
        "rope.freq_base": 150_000.0 if engine.kind == "gpt_oss" else 1e6,
    }
    if engine.kind == "gpt_oss":
        fields |= {
            "attention.sliding_window": 128,
            "rope.scaling.type": "yarn",
            "rope.scaling.factor": 32.0,
            "rope.scaling.original_context_length": 4096,
        }
    name = ARCHITECTURES[engine.kind]
    return {
        "general.architecture": name,
        "general.alignment": ALIGNMENT,
        **{f"{name}.{key}": value for key, value in fields.items()},
        "tokenizer.ggml.model": "gpt2",
        "tokenizer.ggml.pre": _PRE_TOKENIZERS[engine.kind],
        "tokenizer.ggml.tokens": byte_tokenizer.tokens(engine.vocabulary_of(layers)),
        "tokenizer.ggml.merges": [" ".join(byte_tokenizer.MERGE)],
    }
