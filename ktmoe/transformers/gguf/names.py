"""Which tensors of a GGUF file make up which parameter of transformers' model."""

from __future__ import annotations

import re
from collections.abc import Callable
from dataclasses import dataclass, field

import numpy as np

from ktmoe.errors import FormatError
from ktmoe.loaders.checkpoint import Checkpoint
from ktmoe.messages import show
from ktmoe.transformers.dense_modules import is_router
from ktmoe.transformers.dense_names import StoredParameter
from ktmoe.transformers.gguf import architectures
from ktmoe.transformers.gguf.architectures import TextArchitecture
from ktmoe.transformers.gguf.changes import Change, one_row
from ktmoe.transformers.gguf.metadata import GgufMetadata
from ktmoe.transformers.gguf.stored import keys_and_values, small_values, split_qkv, stored_matrix

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
#: What DeepSeek's converter makes of kv_b_proj, see keys_and_values().
_K_B, _V_B, _KV_B = "attn_k_b.weight", "attn_v_b.weight", "self_attn.kv_b_proj"
#: What may stand beside a matrix. The last one is for activations, and not used.
_OF_MATRICES = ("bias", "scale", "input_scale")
_TENSOR = re.compile(r"blk\.(0|[1-9][0-9]{0,5})\.(.+)")
_EXPERTS = re.compile(r"ffn_(?:gate|up|down|gate_up)_exps\..+|ffn_(?:gate|up|down)\.[0-9]+\.weight")


@dataclass(frozen=True)
class GgufParameters:
    """The parameters that a file's tensors make up, but for the routed experts'. No weight has been read.

    matrices: of modules that multiply by one, each with its bias; and the embedding. values: functions that give the others'
    numbers, float32.
    """

    matrices: dict[str, StoredParameter] = field(default_factory=dict)
    values: dict[str, Callable[[], np.ndarray]] = field(default_factory=dict)


def parameters(checkpoint: Checkpoint) -> GgufParameters:
    """Raises FormatError for another architecture, and for a tensor whose meaning is not known; CheckpointError."""
    placing = _Placing(architectures.find(checkpoint), GgufMetadata(checkpoint))
    for name in checkpoint.names():
        placing.place(name)
    return placing.placed()


class _Placing:
    """Finds out what each tensor is."""

    def __init__(self, row: TextArchitecture, of: GgufMetadata):
        self._row, self._of = row, of
        self._found = GgufParameters()
        self._stems: dict[str, list[str]] = {}  # what the names of a module's matrices begin with, by the module

    def place(self, name: str) -> None:
        match = _TENSOR.fullmatch(name)
        if match is None:
            return self._place("", "", name, _MODEL)
        # of layers that predict tokens beyond the next one, and of experts
        if int(match[1]) >= self._of.layers or _EXPERTS.fullmatch(match[2]):
            return None
        return self._place(f"model.layers.{match[1]}.", f"blk.{match[1]}.", match[2], _LAYER | self._row.names)

    def placed(self) -> GgufParameters:
        known = list(self._row.names)
        for module, bases in self._stems.items():
            # in the order of the architecture's names
            bases.sort(key=lambda base: known.index(stem) if (stem := base.rpartition(".")[2]) in known else -1)
            order = self._row.orders.get(bases[0].rpartition(".")[2])
            self._add(self._found.matrices, f"{module}.weight", stored_matrix(self._of, bases, order), bases[0])
        matrices, output = self._found.matrices, f"{OUTPUT}.weight"
        if output not in self._found.values and f"{EMBEDDING}.weight" in matrices:
            matrices.setdefault(output, matrices[f"{EMBEDDING}.weight"])
        return self._found

    def _place(self, to: str, block: str, rest: str, known: dict[str, str]) -> None:
        """to, block: what parameters of a layer, and its tensors, begin with. rest: the tensor's name behind that."""
        name, (stem, _, ending) = block + rest, rest.rpartition(".")
        module, checkpoint = known.get(stem), self._of.checkpoint
        if rest in known:
            self._add_values(to + known[rest], name, self._row.changes.get(known[rest]))
        elif rest == _K_B and block + _V_B in checkpoint:
            self._add(self._found.matrices, f"{to}{_KV_B}.weight", keys_and_values(self._of, block), name)
        elif rest == _V_B and block + _K_B in checkpoint:
            pass  # with the keys
        elif rest == f"{_QKV}.weight" and _QKV not in self._row.names:
            for part, matrix in split_qkv(self._of, block + _QKV, self._row.orders):
                self._add(self._found.matrices, f"{to}{known[part]}.weight", matrix, name)
        elif module is not None and ending == "weight":
            self._add_weight(to, module, name)
        elif module is not None and ending in _OF_MATRICES and self._is_matrix(module, block + stem):
            if module == EMBEDDING and ending == "bias":
                raise self._strange(name)  # else read with its matrix
        elif module is not None and ending == "bias" and f"{block}{stem}.weight" in checkpoint:
            self._add_values(f"{to}{module}.bias", name, None)
        elif rest != f"{_QKV}.bias" or f"{block}{_QKV}.weight" not in checkpoint:  # else read with the weights
            raise self._strange(name)

    def _add_weight(self, to: str, module: str, name: str) -> None:
        if self._is_matrix(module, name.removesuffix(".weight")):
            self._stems.setdefault(to + module, []).append(name.removesuffix(".weight"))
        else:
            change = one_row if module.endswith("_gate") else self._row.changes.get(f"{module}.weight")
            self._add_values(f"{to}{module}.weight", name, change)

    def _is_matrix(self, module: str, base: str) -> bool:
        """Whether a module multiplies by a tensor, or takes rows of it."""
        checkpoint, name = self._of.checkpoint, f"{base}.weight"
        shape = checkpoint.info(name).shape if name in checkpoint else ()
        return len(shape) == 2 and not is_router(module) and f"{module}.weight" not in self._row.changes

    def _add_values(self, parameter: str, name: str, change: Change | None) -> None:
        self._add(self._found.values, parameter, small_values(self._of.checkpoint, name, change), name)

    def _add(self, to: dict, parameter: str, found: object, name: str) -> None:
        if parameter in self._found.matrices or parameter in self._found.values:
            where = f"{self._of.checkpoint.path}: tensor {show(name)}"
            raise FormatError(f"{where}: expected one tensor for {parameter}, found another one, too")
        to[parameter] = found

    def _strange(self, name: str) -> FormatError:
        where = f"{self._of.checkpoint.path}: tensor {show(name)}"
        return FormatError(f"{where}: expected none beside those of {self._of.architecture!r} that are known, found one")
