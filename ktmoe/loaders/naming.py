"""What namings share: finding a layer's experts among the tensor names, and what must hold of names and headers.

A base is what the names of a layer's expert tensors have in common, such as "model.layers.3.mlp.experts".
"""

from __future__ import annotations

import operator
import re
import sys
import weakref
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field

import numpy as np

from ktmoe.errors import CheckpointError, FormatError, MissingTensorError
from ktmoe.experts import PROJECTIONS
from ktmoe.loaders import checks, model_config
from ktmoe.loaders.checkpoint import Checkpoint
from ktmoe.messages import show

#: Stems of an expert's matrices, by projection: as transformers calls them; by number, as Mixtral and DeepSeek do.
PROJ_STEMS = {"gate": "gate_proj", "up": "up_proj", "down": "down_proj"}
NUMBERED_STEMS = {"gate": "w1", "up": "w3", "down": "w2"}
#: Stems of tensors of which one holds gate and up of all experts, and one holds down.
FUSED_STEMS = {"gate": "gate_up_proj", "up": "gate_up_proj", "down": "down_proj"}

#: The most layers with routed experts in a checkpoint; llama.cpp takes 512. Each loader looks at each, so this bounds the work.
LAYERS_LIMIT = 1024

#: Keys of config.json that say how many routed experts a layer has.
EXPERT_COUNTS = ("num_experts", "n_routed_experts", "num_local_experts", "moe_num_experts")
_NUMBER = "(0|[1-9][0-9]{0,5})"  # no leading zero: one layer or expert has one name
# the modules without a word "experts" are Granite's and Step-3's
_NAME = re.compile(
    rf"((?:thinker\.|language_model\.|model\.)*((?:mtp\.)?layers|mtp)\.{_NUMBER}\."
    r"(?:(?:[a-z_]+\.)?experts|block_sparse_moe(?=\.(?:in|out)put_linear\.)|moe(?=\.(?:gate|up|down)_proj\.)))"
    rf"\.(?:{_NUMBER}\.)?([a-z].*)"
)
#: The names of GGUF's tensors that hold all experts or, in old files, one.
_BLOCK_NAME = re.compile(
    rf"(blk\.{_NUMBER})\.(ffn_(?:(?:gate|up|down|gate_up)_exps|(?:gate|up|down)\.{_NUMBER})\.(?:weight|bias|scale|input_scale))"
)

#: expert, or None for tensors that hold all experts -> the suffixes that exist.
_Tensors = dict[int | None, set[str]]
#: checkpoint, or what share() was given -> layer -> base -> tensors.
_found: weakref.WeakKeyDictionary[object, dict[int | str, dict[str, _Tensors]]] = weakref.WeakKeyDictionary()


@dataclass(frozen=True)
class Spelling:
    """How tensors are called: {base}.{E}.{stem}{ending}, or {base}.{stem}{ending} where one tensor holds all experts.

    stems: by projection. endings: of the tensors that every matrix has. optional: of those that all matrices have or none.
    unused: of those that a matrix may have and nothing depends on.
    foreign: endings of tensors that change what the others mean, and what to say about them; any other is refused unexplained.
    module: what the base ends in; anything if empty. stacked: one tensor holds all experts.
    interleaved: of stacked gate and up in one, rows alternate; else gate's come first.
    arrays: which ending each array of a Matrix has, by the array's name; what a Scheme reads.
    """

    stems: Mapping[str, str]
    endings: tuple[str, ...]
    optional: tuple[str, ...] = ()
    unused: tuple[str, ...] = ()
    foreign: Mapping[str, str] = field(default_factory=dict)
    module: str = ""
    stacked: bool = False
    interleaved: bool = False
    arrays: Mapping[str, str] = field(default_factory=dict)

    def suffixes(self, endings: tuple[str, ...]) -> dict[str, None]:
        """stem + ending for all stems, an ordered set."""
        return dict.fromkeys(stem + ending for stem in self.stems.values() for ending in endings)


@dataclass(frozen=True)
class Place:
    """Where a layer's experts are; the names have been checked to be complete.

    endings: the spelling's, and the optional ones that are there. num_experts: by the names; 0 where stacked.
    """

    checkpoint: Checkpoint
    base: str
    spelling: Spelling
    endings: tuple[str, ...]
    num_experts: int

    def name(self, projection: str, expert: int) -> str:
        """The name of a matrix: {base}.{E}.{stem} or {base}.{stem}."""
        return _prefix(self.base, None if self.spelling.stacked else expert) + self.spelling.stems[projection]

    def shapes(self, shape: Callable[[str], tuple[int, int]]) -> dict[str, tuple[int, int]]:
        """(n, k) by projection. shape: gives them for a matrix's name, from its headers, which it checks.

        Raises CheckpointError if gate, up and down do not fit, or if another expert's headers are not those of expert 0.
        """
        names = {projection: self.name(projection, 0) for projection in PROJECTIONS}
        shapes = {projection: shape(name) for projection, name in names.items()}
        intermediate, hidden = shapes["gate"]
        for projection, expected in (("up", (intermediate, hidden)), ("down", (hidden, intermediate))):
            if shapes[projection] != expected:
                gate, name = names["gate"] + self.endings[0], names[projection] + self.endings[0]
                raise CheckpointError(
                    f"{name}: expected [n, k] = {list(expected)}, as {gate} is {[intermediate, hidden]}, "
                    f"found {list(shapes[projection])}"
                )
        for suffix in self.spelling.suffixes(self.endings):
            like = self.checkpoint.info(f"{self.base}.0.{suffix}")
            for expert in range(1, self.num_experts):
                found = self.checkpoint.info(f"{self.base}.{expert}.{suffix}")
                if (found.dtype, found.shape) != (like.dtype, like.shape):
                    raise CheckpointError(
                        f"{found.name}: expected {checks.describe(like)} as in expert 0, found {checks.describe(found)}"
                    )
        return shapes

    def check_count(self, num_experts: int) -> None:
        """Raise CheckpointError if config.json has another number of experts."""
        _check_count(self.checkpoint, self.base, num_experts)


class Names:
    """The experts of one naming. owner: whose names these are, for messages ("DeepSeek-V4")."""

    def __init__(self, owner: str, *spellings: Spelling):
        self._owner = owner
        self._spellings = spellings

    def layers(self, checkpoint: Checkpoint) -> list[int | str]:
        """The layers that have tensors of these names: ints in ascending order, then "mtp.0" and so on."""
        return [layer for layer, bases in _find(checkpoint).items() if self._spelled(bases)]

    def detect(self, checkpoint: Checkpoint, score: Callable[[Spelling, str], float], refused: float | None = 0.0) -> float:
        """score(spelling, prefix) of the first layer that can be read; 0 if there is none.

        prefix: what comes before the stems of an expert, "{base}.{E}." or "{base}.".
        refused: what a FormatError of score() counts as; None to let it pass.
        Raises MissingTensorError if there are such names, but none of their files.
        """
        absent = None
        for bases in _find(checkpoint).values():
            for base, spelling, tensors in self._spelled(bases)[:1]:
                expert, suffixes = next(iter(tensors.items()))
                if not spelling.suffixes(spelling.endings).keys() <= suffixes:
                    continue
                try:
                    return score(spelling, _prefix(base, expert))
                except MissingTensorError as error:  # a partial download: another layer may be there
                    absent = absent or error
                except FormatError:
                    if refused is None:
                        raise
                    return refused
        if absent is not None:
            raise absent
        return 0.0

    def locate(self, checkpoint: Checkpoint, layer: int | str) -> Place:
        """Where a layer's experts are. layer: int, or its digits, or a name such as "mtp.0".

        Raises MissingTensorError for a layer, an expert or a tensor that does not exist; FormatError for a tensor beside
        them that would change what they mean; CheckpointError for a layer that has two names, and if config.json has another
        number of experts.
        """
        key = layer_key(layer)
        candidates = self._spelled(_find(checkpoint).get(key, {}))
        if not candidates:
            found = listed(self.layers(checkpoint)) or f"no layer with tensors of {self._owner}'s names"
            raise MissingTensorError(
                f"{checkpoint.path}: layer {show(layer)}: expected a layer that has routed experts, found {found}"
            )
        if len(candidates) > 1:
            found = " and ".join(sorted(f"{base} ({spelling.stems['gate']})" for base, spelling, _ in candidates))
            raise CheckpointError(f"{checkpoint.path}: layer {show(layer)}: expected one name, found {found}")
        ((base, spelling, tensors),) = candidates
        endings = spelling.endings + tuple(
            ending
            for ending in spelling.optional
            if any(not spelling.suffixes((ending,)).keys().isdisjoint(suffixes) for suffixes in tensors.values())
        )
        _check_complete(checkpoint, base, spelling, endings, tensors)
        count = 0 if spelling.stacked else len(tensors)
        if count:
            _check_count(checkpoint, base, count)
        return Place(checkpoint, base, spelling, endings, count)

    def _spelled(self, bases: dict[str, _Tensors]) -> list[tuple[str, Spelling, _Tensors]]:
        """Every base and spelling of which a layer has a tensor; a sound checkpoint has one of each.

        Of spellings with the same stems, only the one with the most tensors counts: they may share endings.
        """
        found = []
        for base, tensors in bases.items():
            most: dict[tuple[str, bool], tuple[int, Spelling, _Tensors]] = {}
            for spelling in self._spellings:
                if base.endswith(spelling.module):
                    mine = {expert: suffixes for expert, suffixes in tensors.items() if (expert is None) == spelling.stacked}
                    count = len(spelling.suffixes(spelling.endings).keys() & set().union(*mine.values()))
                    key = spelling.stems["gate"], spelling.stacked
                    if count > most.get(key, (0,))[0]:
                        most[key] = count, spelling, mine
            found += [(base, spelling, mine) for _, spelling, mine in most.values()]
        return found


def layers(checkpoint: Checkpoint) -> list[int | str]:
    """The layers that have tensors of routed experts, whoever reads them: ints in ascending order, then "mtp.0" and so on.

    Raises CheckpointError for more than LAYERS_LIMIT.
    """
    return list(_find(checkpoint))


def tensors(checkpoint: Checkpoint, layer: int | str) -> Iterator[str]:
    """The names of a layer's tensors of routed experts; none if there is no such layer."""
    for base, experts in _find(checkpoint).get(layer_key(layer), {}).items():
        for expert, suffixes in experts.items():
            yield from (_prefix(base, expert) + suffix for suffix in suffixes)


def blocks(checkpoint: Checkpoint) -> list[int]:
    """The layers that have tensors of GGUF's names of routed experts."""
    return [layer for layer in _find(checkpoint) if isinstance(layer, int) and block(checkpoint, layer)]


def block(checkpoint: Checkpoint, layer: int | str) -> set[str]:
    """What GGUF's names of a layer's routed experts have behind "blk.{L}."; empty if there is no such layer."""
    return _find(checkpoint).get(layer, {}).get(f"blk.{layer}", {}).get(None, set())


def share(checkpoint: Checkpoint, layer: int | str, own: object) -> None:
    """Let what was found of a layer hold for `own`, which has that layer's tensors alone: no name is looked at again."""
    key = layer_key(layer)
    found = _find(checkpoint)
    _found[own] = {key: found[key]} if key in found else {}


def read_slice(checkpoint: Checkpoint, name: str, index: int, count: int) -> np.ndarray:
    """The index-th of `count` equal slices of a tensor's bytes, uint8; its pages are released."""
    size = checkpoint.info(name).nbytes // count
    return checkpoint.read(name, byte_range=(index * size, (index + 1) * size), release=True)


def _find(checkpoint: Checkpoint) -> dict[int | str, dict[str, _Tensors]]:
    """All expert tensors by layer, ints first; found once per checkpoint, for all namings and all layers."""
    found = _found.get(checkpoint)
    if found is None:
        layers: dict[int | str, dict[str, _Tensors]] = {}
        for name in checkpoint.names():
            if match := _BLOCK_NAME.fullmatch(name):
                base, number, suffix = match.groups()[:3]
                layers.setdefault(int(number), {}).setdefault(base, {}).setdefault(None, set()).add(sys.intern(suffix))
            elif match := _NAME.fullmatch(name):
                base, word, number, expert, suffix = match.groups()
                layer = int(number) if word == "layers" else f"mtp.{number}"
                tensors = layers.setdefault(layer, {}).setdefault(base, {})
                tensors.setdefault(None if expert is None else int(expert), set()).add(sys.intern(suffix))
            if len(layers) > LAYERS_LIMIT:
                raise CheckpointError(
                    f"{checkpoint.path}: expected at most {LAYERS_LIMIT} layers with routed experts, found more"
                )
        order = sorted(layers, key=lambda layer: (0, layer) if isinstance(layer, int) else (1, int(layer[4:])))
        found = _found[checkpoint] = {layer: layers[layer] for layer in order}
    return found


def _check_complete(checkpoint: Checkpoint, base: str, spelling: Spelling, endings: tuple[str, ...], tensors: _Tensors) -> None:
    wanted = spelling.suffixes(endings)
    unused = spelling.suffixes(spelling.unused)
    last = max((expert for expert in tensors if expert is not None), default=0)
    beside = "the others of this layer" if spelling.stacked else f"experts 0-{last}"
    experts: Sequence[int | None] = [None] if spelling.stacked else range(last + 1)
    for expert in experts:
        suffixes = tensors.get(expert, set())
        for suffix in wanted:
            if suffix not in suffixes:
                name = _prefix(base, expert) + suffix
                raise MissingTensorError(f"{checkpoint.path}: {name}: expected with {beside}, found no such tensor")
        for suffix in sorted(suffixes - wanted.keys() - unused.keys()):
            why = next((why for ending, why in spelling.foreign.items() if suffix.endswith(ending)), "its meaning is not known")
            known = ", ".join(dict.fromkeys(e.lstrip("._") or "the weights" for e in spelling.endings + spelling.optional))
            raise FormatError(f"{_prefix(base, expert)}{suffix}: expected none beside {known}, found one: {why}")


def _check_count(checkpoint: Checkpoint, base: str, count: int) -> None:
    for key in EXPERT_COUNTS:
        stated = model_config.value(checkpoint, key)
        if stated is not None and (type(stated) is not int or stated != count):
            found = f"found {count} experts"
            raise CheckpointError(f"{checkpoint.path}: {base}: expected {show(stated)} by {key} of config.json, {found}")


def _prefix(base: str, expert: int | None) -> str:
    return f"{base}." if expert is None else f"{base}.{expert}."


def layer_key(layer: int | str) -> int | str:
    """A layer as Loader.layers() calls it: 3 for 3, "3" and numpy's 3; other strings as they are."""
    if isinstance(layer, str):
        return int(layer) if layer.isdecimal() and layer.isascii() and len(layer) < 10 else layer
    return operator.index(layer)


def listed(layers: Sequence[int | str]) -> str:
    """Layers as text: 'layers 0-42, mtp.0'; empty if there are none."""
    runs: list[list[int]] = []
    for layer in layers:
        if isinstance(layer, int):
            if runs and runs[-1][1] == layer - 1:
                runs[-1][1] = layer
            else:
                runs.append([layer, layer])
    words = [str(first) if first == last else f"{first}-{last}" for first, last in runs]
    names = [layer for layer in layers if isinstance(layer, str)]
    return ", ".join((["layers " + ", ".join(words)] if words else []) + names)
