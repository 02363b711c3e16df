"""DeepSeek-V4 (V4-Flash, V4-Pro): native names, MXFP4 experts.

An expert's tensors are {base}.{E}.{w1,w3,w2}.{weight,scale} with w1 = gate, w3 = up, w2 = down, where base is
layers.{L}.ffn.experts or mtp.{M}.ffn.experts, by itself or behind model. and language_model. prefixes:

    weight  I8 or U8 [N, K/2], two E2M1 codes a byte, low nibble = even k; or F4 [N, K], the same bytes
    scale   F8_E8M0 or U8 [N, K/32], bytes that mean 2**(b - 127)

Their meaning is that of the model's own inference code; config.json contributes swiglu_limit and n_routed_experts.
"""

from __future__ import annotations

import operator
import re
import weakref

from ktmoe.activation import SILU, GatedActivation
from ktmoe.errors import CheckpointError, FormatError, MissingTensorError
from ktmoe.experts import ExpertWeights, Matrix
from ktmoe.formats import MXFP4
from ktmoe.loaders import registry
from ktmoe.loaders.base import Loader
from ktmoe.loaders.checkpoint import Checkpoint
from ktmoe.loaders.safetensors_file import TensorInfo

_STEMS = {"gate": "w1", "up": "w3", "down": "w2"}
_SUFFIXES = tuple(f"{stem}.{kind}" for stem in _STEMS.values() for kind in ("weight", "scale"))
_FLOAT32_MAX = (2 - 2**-23) * 2**127
_WEIGHT_DTYPES = ("I8", "U8", "F4")
_SCALE_DTYPES = ("F8_E8M0", "U8")

_NUMBER = "(0|[1-9][0-9]{0,5})"  # no leading zero: one layer or expert has one name
_NAME = re.compile(
    rf"((?:language_model\.|model\.)*(layers|mtp)\.{_NUMBER}\.ffn\.experts)\.{_NUMBER}\.(w[123]\.(?:weight|scale))"
)

#: layer -> base -> expert -> the suffixes that exist; a sound checkpoint has one base a layer.
_Layers = dict[int | str, dict[str, dict[int, set[str]]]]


class DeepSeekV4(Loader):
    """Reads DeepSeek-V4's routed experts; layers are ints, and "mtp.0" and so on for the multi-token-prediction layers.

    num_experts is what the tensor names say, and n_routed_experts of config.json must agree with it where it is given.
    swiglu_limit of config.json, at the top or in text_config: absent, null and 0 mean no clamp, as in the model's own code.
    """

    def __init__(self):
        self._layers: weakref.WeakKeyDictionary[Checkpoint, _Layers] = weakref.WeakKeyDictionary()

    def detect(self, checkpoint: Checkpoint) -> float:
        """0.9 if the first layer that can be read has MXFP4 experts of these names, else 0 (FP8 experts, for one).

        Raises MissingTensorError if the names fit but none of their files is there.
        """
        absent = None
        for bases in self._find(checkpoint).values():
            base, experts = next(iter(bases.items()))
            expert, suffixes = next(iter(experts.items()))
            if len(suffixes) < len(_SUFFIXES):
                continue
            try:
                for stem in _STEMS.values():
                    _shape(checkpoint, f"{base}.{expert}.{stem}")
            except MissingTensorError as error:  # a partial download: another layer may be there
                absent = absent or error
            except FormatError:
                return 0.0
            else:
                return 0.9
        if absent is not None:
            raise absent
        return 0.0

    def layers(self, checkpoint: Checkpoint) -> list[int | str]:
        return list(self._find(checkpoint))

    def load(self, checkpoint: Checkpoint, layer: int | str) -> ExpertWeights:
        """One layer's experts, which keep the checkpoint open and read a matrix when it is asked for.

        layer: int, or its digits, or a name such as "mtp.0". All headers are checked here, before any weight is read.
        A matrix that was read is released from the page cache: its next owner is the packed copy.
        Raises MissingTensorError for a layer, an expert or a tensor that does not exist; FormatError for experts that are not
        MXFP4; CheckpointError for experts of different shapes, and for a config.json that contradicts the tensors.
        """
        base, num_experts = self._choose(checkpoint, layer)
        first = f"{base}.0"
        shapes = _shapes(checkpoint, first)
        expected = {suffix: checkpoint.info(f"{first}.{suffix}") for suffix in _SUFFIXES}
        for expert in range(1, num_experts):
            for suffix, like in expected.items():
                found = checkpoint.info(f"{base}.{expert}.{suffix}")
                if (found.dtype, found.shape) != (like.dtype, like.shape):
                    raise CheckpointError(f"{found.name}: expected {_describe(like)} as in expert 0, found {_describe(found)}")
        hidden, intermediate = shapes["down"]

        def read(expert: int, projection: str) -> Matrix:
            name, (n, k) = f"{base}.{expert}.{_STEMS[projection]}", shapes[projection]
            codes = checkpoint.read(f"{name}.weight", release=True).reshape(MXFP4.codes_shape(n, k))
            scales = checkpoint.read(f"{name}.scale", release=True).reshape(MXFP4.scale.shape(n, k))
            return Matrix(name, MXFP4, (n, k), codes, scales)

        return ExpertWeights(num_experts, hidden, intermediate, read, MXFP4, _activation(checkpoint), name=base)

    def _find(self, checkpoint: Checkpoint) -> _Layers:
        """All expert tensors by layer, ints first; found once per checkpoint, as a model asks for one layer after another."""
        layers = self._layers.get(checkpoint)
        if layers is None:
            found: _Layers = {}
            for name in checkpoint.names():
                if match := _NAME.fullmatch(name):
                    base, kind, number, expert, suffix = match.groups()
                    layer = int(number) if kind == "layers" else f"mtp.{number}"
                    found.setdefault(layer, {}).setdefault(base, {}).setdefault(int(expert), set()).add(suffix)
            order = sorted(found, key=lambda layer: (0, layer) if isinstance(layer, int) else (1, int(layer[4:])))
            layers = self._layers[checkpoint] = {layer: found[layer] for layer in order}
        return layers

    def _choose(self, checkpoint: Checkpoint, layer: int | str) -> tuple[str, int]:
        """A layer's base name and number of experts, whose names have been checked to be complete."""
        layers = self._find(checkpoint)
        if isinstance(layer, str):
            key = int(layer) if layer.isdecimal() and layer.isascii() and len(layer) < 10 else layer
        else:
            key = operator.index(layer)
        if key not in layers:
            found = f"found {_list(list(layers))}"
            raise MissingTensorError(
                f"{checkpoint.path}: layer {layer!r:.200}: expected a layer that has routed experts, {found}"
            )
        bases = layers[key]
        if len(bases) > 1:
            raise CheckpointError(f"{checkpoint.path}: layer {layer!r}: expected one name, found {' and '.join(sorted(bases))}")
        ((base, experts),) = bases.items()
        for expert in range(max(experts) + 1):
            for suffix in _SUFFIXES:
                if suffix not in experts.get(expert, ()):
                    name = f"{base}.{expert}.{suffix}"
                    raise MissingTensorError(
                        f"{checkpoint.path}: {name}: expected with experts 0-{max(experts)}, found no such tensor"
                    )
        stated = _config(checkpoint, "n_routed_experts")
        if stated is not None and (type(stated) is not int or stated != len(experts)):
            found = f"found {len(experts)} experts"
            raise CheckpointError(f"{checkpoint.path}: {base}: expected {stated!r} by n_routed_experts of config.json, {found}")
        return base, len(experts)


def _shapes(checkpoint: Checkpoint, expert: str) -> dict[str, tuple[int, int]]:
    """(n, k) of an expert's matrices by projection, from its headers. Raises FormatError if they are not MXFP4."""
    shapes = {projection: _shape(checkpoint, f"{expert}.{stem}") for projection, stem in _STEMS.items()}
    intermediate, hidden = shapes["gate"]
    for projection, shape in (("up", (intermediate, hidden)), ("down", (hidden, intermediate))):
        if shapes[projection] != shape:
            raise CheckpointError(
                f"{expert}.{_STEMS[projection]}.weight: expected [n, k] = {list(shape)}, as {expert}.w1.weight is "
                f"{[intermediate, hidden]}, found {list(shapes[projection])}"
            )
    return shapes


def _shape(checkpoint: Checkpoint, name: str) -> tuple[int, int]:
    weight, scale = checkpoint.info(f"{name}.weight"), checkpoint.info(f"{name}.scale")
    for info, dtypes in ((weight, _WEIGHT_DTYPES), (scale, _SCALE_DTYPES)):
        if info.dtype not in dtypes:
            raise FormatError(f"{info.name}: dtype: expected {' or '.join(dtypes)}, found {_describe(info)}")
    if len(weight.shape) != 2 or 0 in weight.shape:
        raise FormatError(f"{weight.name}: shape: expected two dimensions above 0, found {list(weight.shape)}")
    n, columns = weight.shape
    k = columns if weight.dtype == "F4" else 2 * columns
    if k % 2:
        raise FormatError(f"{weight.name}: shape: expected an even number of F4 columns, found {list(weight.shape)}")
    expected = MXFP4.scale.shape(n, k)
    if scale.shape != expected:
        raise FormatError(
            f"{scale.name}: shape: expected {list(expected)} (one scale per 32 along k = {k}), found {list(scale.shape)}"
        )
    return n, k


def _config(checkpoint: Checkpoint, key: str) -> object:
    nested = checkpoint.config.get("text_config")
    return checkpoint.config.get(key, nested.get(key) if isinstance(nested, dict) else None)


def _activation(checkpoint: Checkpoint) -> GatedActivation:
    limit = _config(checkpoint, "swiglu_limit")
    if limit is None:
        return SILU
    if type(limit) not in (int, float) or not 0 <= limit <= _FLOAT32_MAX:
        expected = "a float32 number, 0 or more"
        raise CheckpointError(f"{checkpoint.path}: swiglu_limit of config.json: expected {expected}, found {limit!r:.200}")
    return GatedActivation(limit=float(limit)) if limit else SILU


def _describe(info: TensorInfo) -> str:
    return f"{info.dtype} {list(info.shape)}"


def _list(layers: list[int | str]) -> str:
    """'layers 0-42, mtp.0'."""
    runs: list[list[int]] = []
    for layer in layers:
        if isinstance(layer, int):
            if runs and runs[-1][1] == layer - 1:
                runs[-1][1] = layer
            else:
                runs.append([layer, layer])
    words = [str(first) if first == last else f"{first}-{last}" for first, last in runs]
    names = [layer for layer in layers if isinstance(layer, str)]
    return (
        ", ".join((["layers " + ", ".join(words)] if words else []) + names) or "no layer with tensors of DeepSeek-V4's names"
    )


registry.register("deepseek_v4", DeepSeekV4())
