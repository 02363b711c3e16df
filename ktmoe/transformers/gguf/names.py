"""Which tensors of a GGUF file make up which parameter of transformers' model."""

from __future__ import annotations

import re
from collections import defaultdict
from collections.abc import Callable, Iterator
from dataclasses import dataclass

import numpy as np

from ktmoe.dequantization import dequantize
from ktmoe.errors import CheckpointError, FormatError
from ktmoe.loaders.checkpoint import Checkpoint
from ktmoe.loaders.dense import find_matrix
from ktmoe.loaders.gguf import matrix_of_rows
from ktmoe.loaders.gguf_model import ARCHITECTURE
from ktmoe.loaders.one_matrix import StoredMatrix
from ktmoe.loaders.scheme import float32
from ktmoe.matrix import Matrix
from ktmoe.matrix_rows import check_rows, take_rows
from ktmoe.messages import show
from ktmoe.transformers.dense_modules import is_small
from ktmoe.transformers.dense_names import StoredParameter
from ktmoe.transformers.gguf import architectures
from ktmoe.transformers.gguf.architectures import TextArchitecture
from ktmoe.transformers.gguf.changes import one_row
from ktmoe.transformers.gguf.metadata import GgufMetadata
from ktmoe.weights.formats import BF16, F16, F32

EMBEDDING, OUTPUT = "model.embed_tokens", "lm_head"
_MODEL = {"token_embd": EMBEDDING, "output_norm": "model.norm", "output": OUTPUT}
_MLP = ("gate", "up", "down")
#: Modules of a layer by GGUF's stems, and parameters by GGUF's names where these are not a module's weight or bias.
_LAYER = {
    "attn_norm": "input_layernorm",
    "attn_q": "self_attn.q_proj",
    "attn_k": "self_attn.k_proj",
    "attn_v": "self_attn.v_proj",
    "attn_output": "self_attn.o_proj",
    "attn_q_norm": "self_attn.q_norm",
    "attn_k_norm": "self_attn.k_norm",
    "attn_sinks.weight": "self_attn.sinks",
    "attn_q_a": "self_attn.q_a_proj",
    "attn_q_a_norm": "self_attn.q_a_layernorm",
    "attn_q_b": "self_attn.q_b_proj",
    "attn_kv_a_mqa": "self_attn.kv_a_proj_with_mqa",
    "attn_kv_a_norm": "self_attn.kv_a_layernorm",
    "attn_kv_b": "self_attn.kv_b_proj",
    "ffn_norm": "post_attention_layernorm",
    "post_attention_norm": "post_attention_layernorm",
    "ffn_gate_inp": "mlp.gate",
    "ffn_gate_inp_shexp": "mlp.shared_expert_gate",
    "exp_probs_b.bias": "mlp.gate.e_score_correction_bias",
    **{f"ffn_{name}": f"mlp.{name}_proj" for name in _MLP},
    **{f"ffn_{name}_shexp": f"mlp.shared_experts.{name}_proj" for name in _MLP},
    "ssm_norm": "linear_attn.norm",
    "ssm_out": "linear_attn.out_proj",
    "ssm_conv1d": "linear_attn.conv1d",
    "ssm_ba": "linear_attn.in_proj_ba",
    "ssm_dt.bias": "linear_attn.dt_bias",
    "ssm_a": "linear_attn.A_log",
}
_QKV = "attn_qkv"
#: What DeepSeek's converter makes of kv_b_proj: keys [heads, latents, keys], transposed, and values [heads, values, latents].
_K_B, _V_B, _KV_B = "attn_k_b.weight", "attn_v_b.weight", "self_attn.kv_b_proj"
_TENSOR = re.compile(r"blk\.(0|[1-9][0-9]{0,5})\.(.+)")
_EXPERTS = re.compile(r"ffn_(?:gate|up|down|gate_up)_exps\..+|ffn_(?:gate|up|down)\.[0-9]+\.weight")


@dataclass(frozen=True)
class Parameters:
    """The parameters that a file's tensors make up, but for the routed experts'. No weight has been read.

    matrices: those that ktmoe can pack, each with its bias. values: functions that give the others' numbers, float32.
    """

    matrices: dict[str, StoredParameter]
    values: dict[str, Callable[[], np.ndarray]]


def parameters(checkpoint: Checkpoint) -> Parameters:
    """Raises FormatError for another architecture, and for a tensor whose meaning is not known; CheckpointError."""
    row, of = architectures.find(checkpoint), GgufMetadata(checkpoint)
    found = Parameters({}, {})
    stems: dict[str, list[str]] = defaultdict(list)  # of matrices, by module
    for name in checkpoint.names():
        if not _skipped(name, of.layers):
            _place(name, row, of, found, stems)
    for module, bases in stems.items():
        found.matrices[f"{module}.weight"] = _matrix(module, bases, row, of)
    if f"{OUTPUT}.weight" not in found.matrices and f"{EMBEDDING}.weight" in found.matrices:
        found.matrices[f"{OUTPUT}.weight"] = found.matrices[f"{EMBEDDING}.weight"]
    return found


def _skipped(name: str, layers: int) -> bool:
    """Whether a tensor is an expert's, or of layers that predict tokens beyond the next one."""
    match = _TENSOR.fullmatch(name)
    return bool(match) and (int(match[1]) >= layers or _EXPERTS.fullmatch(match[2]) is not None)


def _place(name: str, row: TextArchitecture, of: GgufMetadata, found: Parameters, stems: dict[str, list[str]]) -> None:
    """Find out what a tensor is."""
    match = _TENSOR.fullmatch(name)
    prefix, rest, known = (f"model.layers.{match[1]}.", match[2], _LAYER | row.names) if match else ("", name, _MODEL)
    if rest in known:
        parameter = known[rest]
        found.values[prefix + parameter] = _values(of.checkpoint, name, row.changes.get(parameter))
        return
    stem, _, ending = rest.rpartition(".")
    base = name.removesuffix(f".{ending}")
    if rest == _V_B:  # with keys
        return
    if rest == _K_B:
        found.matrices[f"{prefix}{_KV_B}.weight"] = _keys_and_values(of, base.removesuffix("attn_k_b"))
        return
    if stem == _QKV and _QKV not in row.names:
        if ending == "weight":
            found.matrices |= {f"{prefix}{module}.weight": each for module, each in _split(of, row, base)}
        return
    module = known.get(stem)
    if module is None or ending not in ("weight", "bias", "scale"):
        where = f"{of.checkpoint.path}: tensor {show(name)}"
        raise FormatError(f"{where}: expected none beside those of {of.architecture!r} that are known, found one")
    parameter = f"{module}.{ending}"
    if ending == "weight" and not _is_matrix(of.checkpoint, name, module, parameter in row.changes):
        change = one_row if module.endswith("_gate") else row.changes.get(parameter)
        found.values[prefix + parameter] = _values(of.checkpoint, name, change)
    elif ending == "weight":
        stems[prefix + module].append(base)
    elif ending == "bias" and not _is_matrix(of.checkpoint, f"{base}.weight", module, False):
        found.values[prefix + parameter] = _values(of.checkpoint, name, None)


def _is_matrix(checkpoint: Checkpoint, name: str, module: str, changed: bool) -> bool:
    """Whether ktmoe packs a weight."""
    shape = checkpoint.info(name).shape if name in checkpoint else ()
    return len(shape) == 2 and not changed and not is_small(module, shape[0])


def _values(checkpoint: Checkpoint, name: str, change: Callable[[np.ndarray], np.ndarray] | None) -> Callable[[], np.ndarray]:
    def read() -> np.ndarray:
        info = checkpoint.info(name)
        if info.dtype in ("F32", "F16", "BF16"):
            values = float32(checkpoint.read(name), info).reshape(info.shape)
        else:
            values = dequantize(matrix_of_rows(checkpoint, name)).astype(np.float32).reshape(info.shape)
        return values if change is None else change(values)

    return read


def _matrix(module: str, bases: list[str], row: TextArchitecture, of: GgufMetadata) -> StoredParameter:
    """A matrix of these tensors' rows, in the order of the architecture's names."""
    within = module.split(".", 3)[-1] if module.startswith("model.layers.") else module
    known = list(row.names)
    bases = sorted(bases, key=lambda base: known.index(stem) if (stem := base.rpartition(".")[2]) in known else -1)
    order = row.orders.get(within)

    def find() -> list[StoredMatrix]:
        return [find_matrix(of.checkpoint, base) for base in bases]

    rows = sum(of.checkpoint.info(f"{base}.weight").shape[0] for base in bases)
    return StoredParameter(tuple(bases), False, find, None if order is None else order(of, rows))


def _split(of: GgufMetadata, row: TextArchitecture, base: str) -> Iterator[tuple[str, StoredParameter]]:
    """q, k and v of one tensor, whose rows come in this order."""
    heads = of.count("attention.head_count")
    shared = of.count("attention.head_count_kv", heads)
    key = of.count("attention.key_length", of.count("embedding_length") // max(1, heads))
    value = of.count("attention.value_length", key)
    counts, (n, k) = (heads * key, shared * key, shared * value), of.checkpoint.info(f"{base}.weight").shape
    if sum(counts) != n:
        raise CheckpointError(f"{base}: expected {' + '.join(map(str, counts))} rows of q, k and v, found {n}")
    first = 0
    for module, count in zip(("self_attn.q_proj", "self_attn.k_proj", "self_attn.v_proj"), counts, strict=True):

        def find(first: int = first, last: int = first + count) -> list[StoredMatrix]:
            whole = find_matrix(of.checkpoint, base)
            check_rows(whole.name, whole.format, n, first, last)
            name = f"{base}[{first}:{last}]"
            read = lambda: take_rows(whole.read(), first, last, name)  # noqa: E731
            return [StoredMatrix(name, whole.format, (last - first, k), whole.has_bias, read, whole, (first, last))]

        order = row.orders.get(module)
        yield module, StoredParameter((), False, find, None if order is None else order(of, count))
        first += count


def _keys_and_values(of: GgufMetadata, prefix: str) -> StoredParameter:
    """DeepSeek's kv_b_proj: of each head, rows of keys and then rows of values.

    Keys were transposed before they were quantised. So what shares a scale in the file lies across this matrix's rows: it is
    float32, the numbers that the file stands for, unless the file has 16 bits.
    """
    keys, values = prefix + _K_B, prefix + _V_B
    infos = [of.checkpoint.info(name) for name in (keys, values)]
    (heads, latents, key), (heads_too, value, latents_too) = (
        info.shape if len(info.shape) == 3 else (0, 0, 0) for info in infos
    )
    if (heads, latents) != (heads_too, latents_too) or not heads:
        expected = "[heads, latents, keys] and [heads, values, latents]"
        raise CheckpointError(f"{keys}: expected {expected}, found {list(infos[0].shape)} and {list(infos[1].shape)}")
    types = {info.dtype for info in infos}
    weight_format = {("F16",): F16, ("BF16",): BF16}.get(tuple(types), F32)
    name, shape = f"{prefix}attn_kv_b", (heads * (key + value), latents)

    def read() -> Matrix:
        transposed = dequantize(matrix_of_rows(of.checkpoint, keys)).reshape(heads, latents, key).swapaxes(1, 2)
        straight = dequantize(matrix_of_rows(of.checkpoint, values)).reshape(heads, value, latents)
        joined = np.concatenate([transposed, straight], axis=1).reshape(shape)
        return Matrix(name, weight_format, shape, joined.astype(weight_format.arrays(*shape)["codes"][0]))

    return StoredParameter((), False, lambda: [StoredMatrix(name, weight_format, shape, False, read)], None)


__all__ = ["ARCHITECTURE", "EMBEDDING", "OUTPUT", "Parameters", "parameters"]
