"""Matrices that are no routed expert's: projections of attention, output layers, dense MLPs and shared experts.

Each scheme that experts have is read here, too: a matrix's tensors say which one it is. In GGUF files, a name is such as
"blk.0.attn_q" or "output", and rows stand as llama.cpp has them, which permutes q and k for some architectures.
"""

from __future__ import annotations

import os
import re
from collections.abc import Callable, Mapping

from ktmoe.errors import CheckpointError, MissingTensorError
from ktmoe.experts import PROJECTIONS, ExpertWeights
from ktmoe.loaders import architectures, fused, model_config, naming, one_matrix
from ktmoe.loaders.checkpoint import Checkpoint
from ktmoe.loaders.gguf_model import ARCHITECTURE
from ktmoe.loaders.one_matrix import StoredMatrix
from ktmoe.loaders.pairs import GateUpReader
from ktmoe.matrix import Matrix
from ktmoe.matrix_cuts import take_rows
from ktmoe.messages import show
from ktmoe.weights.activation import GatedActivation

#: What GGUF calls an MLP's matrices: those of "blk.3.ffn", and those of a shared expert, "blk.3.ffn_shexp".
_BLOCK = re.compile(r"(blk\.[0-9]{1,6}\.ffn)(|_shexp)")


def find_matrix(checkpoint: Checkpoint, name: str, *, scheme: str = "auto") -> StoredMatrix:
    """What load_matrix() would read: name, format, shape, nbytes, has_bias, and read(). By the headers; of compressed-tensors,
    weight_shape is read, too.

    name, scheme: load_matrix()'s. Raises what load_matrix() raises for headers, InputError for a name that is no str.
    """
    return fused.find(checkpoint, name, scheme)


def load_matrix(path: str | os.PathLike[str] | Checkpoint, name: str, *, scheme: str = "auto") -> Matrix:
    """Read one matrix of a checkpoint in its own bytes, with its bias if it has one.

    path: a folder, a .safetensors or .gguf file, or an open Checkpoint. name: what the names of its tensors begin with, such as
    "model.layers.0.self_attn.q_proj" or "blk.0.attn_q". Rows of a fused qkv_proj or gate_up_proj can be asked for by their own
    names, and the other way round. scheme: the name of a loader whose scheme it is, or "auto" to go by the tensors.
    If the output layer is the input embedding, too, "lm_head" has no tensors: ask for "model.embed_tokens", or "token_embd".
    Raises MissingTensorError, FormatError, CheckpointError; UnavailableError for tensors that no scheme knows; InputError for a
    name that is no str.

    Examples:
        >>> matrix = ktmoe.load_matrix("Qwen3-30B-A3B", "model.layers.0.self_attn.q_proj")
        >>> matrix.name, matrix.format.description
        ('model.layers.0.self_attn.q_proj', 'BF16')
    """
    if isinstance(path, Checkpoint):
        return find_matrix(path, name, scheme=scheme).read()
    with Checkpoint(path) as checkpoint:
        return find_matrix(checkpoint, name, scheme=scheme).read()


def load_mlp(
    path: str | os.PathLike[str] | Checkpoint, base: str, *, scheme: str = "auto", activation: GatedActivation | None = None
) -> ExpertWeights:
    """A dense SwiGLU MLP, or a shared expert, as the experts of a layer that has one; a matrix is read when it is asked for.

    path, scheme: load_matrix()'s. base: what the names of its matrices begin with, such as "model.layers.0.mlp" or
    "model.layers.3.mlp.shared_experts": {base}.{gate,up,down}_proj, or {base}.{w1,w3,w2}, or {base}.{gate_up,down}_proj, with
    gate's rows before up's. In GGUF files, "blk.0.ffn", or "blk.3.ffn_shexp" for a shared expert.
    activation: by default what config.json says of such MLPs by hidden_act, with the clamp of models that are known to have one
    there; SILU for GGUF files whose architecture is known to have nothing else. It must be given where these do not say it.
    Raises what load_matrix() raises for headers, CheckpointError for matrices that do not fit, FormatError for an activation
    that is not supported or not known.

    Examples:
        >>> mlp = ktmoe.load_mlp("Qwen3-30B-A3B", "model.layers.0.mlp.experts.0", activation=ktmoe.SILU)
        >>> mlp.num_experts
        1
    """
    one_matrix.check_name("base", base)
    checkpoint = path if isinstance(path, Checkpoint) else Checkpoint(path)
    names = _names(checkpoint, base)
    found = {projection: find_matrix(checkpoint, name, scheme=scheme) for projection, name in names.items()}
    intermediate, hidden = found["gate"].shape
    for projection, expected in (("up", (intermediate, hidden)), ("down", (hidden, intermediate))):
        if found[projection].shape != expected:
            raise CheckpointError(
                f"{names[projection]}: expected [n, k] = {list(expected)}, as {names['gate']} is {[intermediate, hidden]}, "
                f"found {list(found[projection].shape)}"
            )
    formats = {projection: matrix.format for projection, matrix in found.items()}
    if activation is None:
        activation = _activation(checkpoint)

    return ExpertWeights(1, hidden, intermediate, _reader(found), formats, activation, base)


def _reader(found: Mapping[str, StoredMatrix]) -> Callable[[int, str], Matrix]:
    """(0, projection) -> Matrix. Gate and up of one stored matrix are read once, if they are asked for in turn."""
    whole = found["gate"].whole
    pairs = GateUpReader(lambda _expert: _both(whole, found)) if whole else None

    def read(expert: int, projection: str) -> Matrix:
        return pairs.take(expert, projection) if pairs and projection != "down" else found[projection].read()

    return read


def _both(whole: StoredMatrix, found: Mapping[str, StoredMatrix]) -> dict[str, Matrix]:
    """Gate and up, which are rows of one stored matrix."""
    matrix = whole.read()
    return {p: take_rows(matrix, *found[p].rows, found[p].name) for p in ("gate", "up")}


def _names(checkpoint: Checkpoint, base: str) -> Mapping[str, str]:
    """The names of an MLP's matrices, by projection. Raises MissingTensorError, CheckpointError."""
    if match := _BLOCK.fullmatch(base):
        return {projection: f"{match[1]}_{projection}{match[2]}" for projection in PROJECTIONS}
    spelled = [
        {projection: f"{base}.{stem}" for projection, stem in stems.items()}
        for stems in (naming.PROJ_STEMS, naming.NUMBERED_STEMS)
    ]
    there = [names for names in spelled if one_matrix.endings(checkpoint, names["down"])]
    if len(there) > 1:
        raise CheckpointError(f"{checkpoint.path}: expected {spelled[0]['down']} or {spelled[1]['down']}, found both")
    if not there:
        names = " or ".join(names["down"] for names in spelled)
        raise MissingTensorError(f"{checkpoint.path}: MLP {show(base)}: expected tensors of {names}, found none")
    return there[0]


def _activation(checkpoint: Checkpoint) -> GatedActivation:
    """What the model says of its dense MLPs. Raises FormatError, CheckpointError."""
    if ARCHITECTURE not in checkpoint.config:
        return model_config.dense_activation(checkpoint)
    return architectures.dense_activation(checkpoint)
