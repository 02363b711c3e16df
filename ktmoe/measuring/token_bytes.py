"""Which tensors a token of text reads, and their bytes: by names and headers alone, as they are stored.

A token reads top_k of a layer's routed experts, and once the dense part, which is all else of the language model: matrices,
norms, shared experts, routers, the output layer. Of a table it reads a few rows, so tables are left out. An input embedding
that is the output layer, too, is read whole. Towers for images and sound, and layers for multi-token prediction, are not read.
"""

from __future__ import annotations

import re
from collections import Counter
from dataclasses import dataclass, field

from ktmoe.errors import CheckpointError
from ktmoe.loaders import model_config, naming
from ktmoe.loaders.checkpoint import Checkpoint
from ktmoe.loaders.tensor_file import TensorInfo

Name = int | str

#: What a token of text does not read, in words.
TABLES = "tables of which a token reads some rows"
MEDIA = "images and sound"
PREDICTION = "multi-token prediction"
_OUTPUT, _EMBEDDING, _DENSE = "output layer", "input embedding", "dense"

_MEDIA = re.compile(
    r"vision|visual|image|video|audio|speech|talker|(?:code|token)2wav|multi_?modal|projector|patch_(?:merger|embed)"
    r"|(?:^|\.)(?:aligner|sam_model|vit)\.|^(?:mm|v|a)\."
)
_PREDICTION = re.compile(r"(?:^|\.)(?:mtp|nextn)")
#: Tables by the token's id, by what was before it, or by its place: which experts a token of DeepSeek-V4 has, V4.1's n-grams,
#: embeddings for each layer, positions.
_TABLE = re.compile(
    r"tid2eid|engram[._]embe?d|embed_tokens_per_layer|per_layer_token_embd|(?:^|\.)(?:wpe|position_embd|embed_positions)\."
)
_LAYER = re.compile(r"(?:^|\.)(?:layers|blk)\.([0-9]{1,6})\.")
#: Modules outside of the layers.
_INPUTS = {"embed_tokens", "embed", "tok_embeddings", "token_embd", "wte", "word_embeddings", "embeddings", "embed_in"}
_OUTPUTS = {"lm_head", "head", "output", "output_layer", "embed_out"}
#: What the names of a language model within a larger one begin with.
_NESTED = re.compile(r".*\b(?:language_model|thinker)\.")
#: The number of an expert that has tensors of its own.
_EXPERT = re.compile(r"(?:layers|mtp|blk)\.[0-9]+\..*?\.([0-9]+)\.")


@dataclass(frozen=True)
class RoutedLayer:
    """The routed experts of a layer. nbytes: of all, with their scales and biases."""

    num_experts: int
    nbytes: int

    @property
    def expert_nbytes(self) -> float:
        return self.nbytes / self.num_experts


@dataclass
class TokenBytes:
    """What a token reads, in bytes.

    routed: the layers with routed experts that a token passes through. dense: the dense part, with the output layer.
    output: of the output layer; 0 where there is none. left_out: of TABLES, MEDIA and PREDICTION.

    What is not there is not counted. unread: tensors that a token reads and whose headers cannot be read. files: names of the
    files that should have them. incomplete: layers whose experts are among these. absent: layers without any tensor.
    """

    routed: dict[Name, RoutedLayer] = field(default_factory=dict)
    dense: int = 0
    output: int = 0
    left_out: dict[str, int] = field(default_factory=dict)
    unread: int = 0
    files: list[str] = field(default_factory=list)
    incomplete: list[Name] = field(default_factory=list)
    absent: list[int] = field(default_factory=list)

    @property
    def dense_alone(self) -> bool:
        """Whether a token reads no routed expert."""
        return not self.routed and not self.incomplete

    @property
    def complete(self) -> bool:
        return bool(self.output) and not self.unread and not self.absent

    def of_experts(self, top_k: int) -> float:
        """Bytes of the routed experts of a token, of which a layer has at most all."""
        return sum(min(top_k, layer.num_experts) * layer.expert_nbytes for layer in self.routed.values())


def passes(layer: Name, num_layers: int | None) -> bool:
    """Whether a token passes through a layer: not those of multi-token prediction, mtp.0 or past the model's own layers."""
    return isinstance(layer, int) and (num_layers is None or layer < num_layers)


def token_bytes(checkpoint: Checkpoint, num_layers: int | None) -> TokenBytes | None:
    """What a token reads of a checkpoint that is open. num_layers: as its configuration says; None where that does not.

    None where the configuration has routed experts and no tensor has a known name of theirs. Of a dense model, all is the dense
    part. Tensors without a header here, as in a partial download, are no error.
    """
    layers = naming.layers(checkpoint)
    if not layers and any(model_config.value(checkpoint, key) for key in naming.EXPERT_COUNTS):
        return None
    headers, found = _Headers(checkpoint), TokenBytes()
    kinds = _kinds(checkpoint, num_layers)
    tied = _tied(checkpoint, kinds)
    outputs = _of(kinds, _EMBEDDING if tied else _OUTPUT)
    left_out = {TABLES: _of(kinds, TABLES), MEDIA: _of(kinds, MEDIA), PREDICTION: _of(kinds, PREDICTION)}
    if not tied:
        left_out[TABLES] += _of(kinds, _EMBEDDING)
    for layer in layers:
        names = list(naming.tensors(checkpoint, layer))
        if not passes(layer, num_layers):
            left_out[PREDICTION] += names
            continue
        infos = headers.infos(names)
        if len(infos) < len(names):
            found.incomplete.append(layer)
        else:
            found.routed[layer] = RoutedLayer(_num_experts(infos), sum(info.nbytes for info in infos))
    dense = _of(kinds, _DENSE)
    found.output = sum(info.nbytes for info in headers.infos(outputs))
    found.dense = found.output + sum(info.nbytes for info in headers.infos(dense))
    found.unread, found.files = headers.unread.total(), sorted(headers.unread)
    found.left_out = {what: nbytes for what, names in left_out.items() if (nbytes := headers.nbytes(names))}
    seen = set(layers) | {int(match[1]) for name in dense if (match := _LAYER.search(name))}
    found.absent = [layer for layer in range(min(num_layers or 0, naming.LAYERS_LIMIT)) if layer not in seen]
    return found


class _Headers:
    """A checkpoint's headers. unread: by a file's name, how many tensors infos() was asked for and did not find there."""

    def __init__(self, checkpoint: Checkpoint):
        self._checkpoint = checkpoint
        self._bad: set[str] = set()
        self.unread: Counter[str] = Counter()

    def infos(self, names: list[str]) -> list[TensorInfo]:
        """Those that can be read. The others are noted."""
        found = []
        for name in names:
            if info := self._info(name):
                found.append(info)
            else:
                self.unread[self._checkpoint.file_of(name).name] += 1
        return found

    def nbytes(self, names: list[str]) -> int:
        """The bytes of those that can be read. The others are not noted."""
        return sum(info.nbytes for name in names if (info := self._info(name)))

    def _info(self, name: str) -> TensorInfo | None:
        file = self._checkpoint.file_of(name).name
        if file in self._bad:  # each try would read its header again
            return None
        try:
            return self._checkpoint.info(name)
        except CheckpointError:
            self._bad.add(file)
            return None


def _kinds(checkpoint: Checkpoint, num_layers: int | None) -> dict[str, str]:
    """What each tensor is that is no routed expert's, by its name."""
    layers = naming.layers(checkpoint)
    routed = {name for layer in layers for name in naming.tensors(checkpoint, layer)}
    own = (next(naming.tensors(checkpoint, layer)) for layer in layers if passes(layer, num_layers))
    nested = _NESTED.match(next(own, ""))
    return {name: _kind(name, num_layers, nested[0] if nested else "") for name in checkpoint.names() if name not in routed}


def _kind(name: str, num_layers: int | None, nested: str) -> str:
    """What a tensor is. nested: what the language model's names begin with, if it is within a larger one."""
    if _MEDIA.search(name):
        return MEDIA
    layer = _LAYER.search(name)
    if _PREDICTION.search(name) or (layer and not passes(int(layer[1]), num_layers)):
        return PREDICTION
    if _TABLE.search(name):
        return TABLES
    if not layer:
        module = name.rpartition(".")[0].rpartition(".")[2]
        if module in _OUTPUTS:
            return _OUTPUT
        if module in _INPUTS:
            return _EMBEDDING
    return _DENSE if name.startswith(nested) else MEDIA


def _of(kinds: dict[str, str], kind: str) -> list[str]:
    """The tensors of a kind."""
    return [name for name, found in kinds.items() if found == kind]


def _tied(checkpoint: Checkpoint, kinds: dict[str, str]) -> bool:
    """Whether the input embedding is the output layer, too: where there is no other, unless the configuration denies it."""
    return _OUTPUT not in kinds.values() and model_config.value(checkpoint, "tie_word_embeddings") is not False


def _num_experts(infos: list[TensorInfo]) -> int:
    """How many experts a layer has: as many as have tensors of their own, or the first dimension of what holds all."""
    if numbers := {match[1] for info in infos if (match := _EXPERT.search(info.name))}:
        return len(numbers)
    largest = max(infos, key=lambda info: info.nbytes)
    return max(1, *largest.shape[:1])
