"""Dense matrices that ktmoe reads from a checkpoint's own bytes, while transformers loads the rest of the model."""

from __future__ import annotations

import os
import re
from collections.abc import Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass

import numpy as np
import torch
from transformers import PreTrainedModel

from ktmoe.backends.base import Arenas, Progress
from ktmoe.background.tasks import BackgroundTasks
from ktmoe.cache.opened import Cache
from ktmoe.errors import CheckpointError, KtmoeError, MissingTensorError
from ktmoe.linear import Linear
from ktmoe.linear_group import LinearGroup
from ktmoe.linear_weights import LinearWeights
from ktmoe.loaders.checkpoint import Checkpoint
from ktmoe.loaders.gguf_model import is_gguf
from ktmoe.loaders.one_matrix import StoredMatrix
from ktmoe.machine.numa import placement_of
from ktmoe.matrix_cuts import check_rows
from ktmoe.torch.embedding import DenseEmbedding
from ktmoe.transformers.dense_modules import (
    DenseModule,
    put_packed,
    share_inputs,
    take_away,
    untie,
)
from ktmoe.transformers.dense_names import StoredParameter, stored_parameters
from ktmoe.transformers.dense_packing import pack_matrix
from ktmoe.transformers.gguf.names import EMBEDDING, OUTPUT, parameters
from ktmoe.transformers.options import Options

#: Matrices that are made at a time, so that one is read while another is packed.
_AT_ONCE = 2


@dataclass(frozen=True)
class _Planned:
    """What takes the place of a module: the rows of these stored matrices, in that order. dense: None for an embedding."""

    dense: DenseModule | None
    parts: tuple[StoredMatrix, ...]
    order: np.ndarray | None = None


class DenseFromCheckpoint:
    """Dense matrices that ktmoe reads from a checkpoint in the background, while transformers loads the rest.

    found: those of the model that may be packed. dtype: the model's. cached: whether Options.cache is of this checkpoint.
    Those that are not in `names` are left to transformers: matrices that it changes while it reads them, that share their
    parameter with the embedding, that no scheme reads, or whose model has another dtype than bfloat16. Of a GGUF file nothing
    is left to it, and the embedding is packed, too.
    needs_quantizer: whether what is left has matrices that only the checkpoint's own quantization method reads. refused: why
    no scheme of ktmoe reads the first of them.
    Raises MissingTensorError for a matrix that lacks a tensor where others of its checkpoint are whole: transformers would read
    its codes as if they were numbers. Raises why a matrix of a GGUF file cannot be packed.
    """

    def __init__(
        self,
        path: str | os.PathLike[str],
        model: PreTrainedModel,
        found: Sequence[DenseModule],
        options: Options,
        dtype: torch.dtype,
        cached: bool,
    ):
        self._options, self._dtype = options, dtype
        self._planned: dict[str, _Planned] = {}
        self._arenas: dict[tuple[str, int], Arenas] = {}
        self.needs_quantizer = False
        self.refused: KtmoeError | None = None
        with ExitStack() as resources:
            checkpoint = resources.enter_context(Checkpoint(path))
            wanted = options.cache if cached and options.dense == "packed" else None
            cache = None if wanted is None else Cache(wanted, checkpoint)
            by_parameter = {each.parameter: each for each in found}
            if is_gguf(checkpoint.config):
                stored = parameters(checkpoint).matrices
                self._plan_gguf(model, stored, by_parameter)
            else:
                stored = stored_parameters(model, checkpoint)
                self._plan(model, stored, by_parameter)
            self._bases = {name: stored[f"{name}.weight"].bases for name in self._planned}
            self._find_cached(cache)
            names = {each for name, planned in self._planned.items() for each in (name, *(part.name for part in planned.parts))}
            self._ignored = [rf"^{re.escape(name)}\." for name in names]
            self._resources = resources.pop_all()

    def _plan(
        self, model: PreTrainedModel, stored: Mapping[str, StoredParameter], by_parameter: Mapping[str, DenseModule]
    ) -> None:
        tied, whole = {*model.all_tied_weights_keys, *model.all_tied_weights_keys.values()}, False
        for parameter, of in stored.items():
            dense = by_parameter.get(parameter)
            if dense is None or parameter in tied or (of.plain and self._dtype != torch.bfloat16):
                self.needs_quantizer |= not of.plain
                continue
            try:
                self._planned[dense.name] = _checked(dense, of)
            except KtmoeError as error:
                self.needs_quantizer |= not of.plain
                self.refused = self.refused or (None if of.plain else error)
            else:
                whole |= not of.plain
        if whole and isinstance(self.refused, MissingTensorError):
            raise self.refused

    def _plan_gguf(
        self, model: PreTrainedModel, stored: Mapping[str, StoredParameter], by_parameter: Mapping[str, DenseModule]
    ) -> None:
        for parameter, dense in by_parameter.items():
            if parameter in stored:
                self._planned[dense.name] = _checked(dense, stored[parameter])
        embedding = f"{EMBEDDING}.weight"
        if by_parameter and embedding in stored:
            (table,) = stored[embedding].find()
            _check_shape(table, tuple(model.get_parameter(embedding).shape))
            self._planned[EMBEDDING] = _Planned(None, (table,))

    def _find_cached(self, cache: Cache | None) -> None:
        if cache is None:
            return
        for name, planned in self._planned.items():
            for index, (base, part) in enumerate(zip(self._bases[name], planned.parts, strict=False)):
                if base in cache.matrices and not (planned.dense and planned.dense.groups):
                    weights = _weights(part)
                    placement = placement_of(weights, self._options.numa_nodes)
                    self._arenas[name, index] = cache.matrix(base, weights, placement)

    @property
    def names(self) -> list[str]:
        """The modules' names."""
        return list(self._planned)

    @property
    def nbytes(self) -> int:
        """Bytes of these matrices in the checkpoint."""
        return sum(self._sizes.values())

    @property
    def _sizes(self) -> dict[tuple[str, int], int]:
        """Bytes of each matrix that is made, by module and place. An embedding that is the output layer, too, is made once."""
        return {
            (name, index): part.nbytes
            for name, planned in self._planned.items()
            if not self._is_output(name)
            for index, part in enumerate(planned.parts)
        }

    def _is_output(self, name: str) -> bool:
        """Whether a module is the embedding, and the output layer has its matrix."""
        return name == EMBEDDING and OUTPUT in self._planned and self._bases[name] == self._bases[OUTPUT]

    def start(self, model: PreTrainedModel, progress: Progress | None) -> None:
        """Take the modules out of the model, so that transformers does not read their tensors, and begin to read them."""
        take_away(model, self.names)
        if EMBEDDING in self._planned:
            untie(model, EMBEDDING)
        known = model._keys_to_ignore_on_load_unexpected or ()
        model._keys_to_ignore_on_load_unexpected = {*known, *self._ignored}
        self._loading = BackgroundTasks("matrix", self._sizes, self._make, _AT_ONCE, progress, self._resources)

    def finish(self, model: PreTrainedModel) -> None:
        """Wait until all are packed, and put them into the model. Raises what reading and packing raise."""
        self._loading.wait()
        for name, planned in self._planned.items():
            made = [self._loading.get((OUTPUT if self._is_output(name) else name, i)) for i in range(len(planned.parts))]
            if planned.dense is None:
                model.set_submodule(name, DenseEmbedding(made[0], self._dtype))
            else:
                put_packed(model, name, made[0] if planned.dense.groups else made, planned.order)
        share_inputs(model)

    def close(self) -> None:
        """Close what was opened, if start() was not called."""
        self._resources.close()

    def _make(self, key: tuple[str, int], progress: Progress) -> Linear | LinearGroup:
        name, index = key
        planned = self._planned[name]
        groups = planned.dense.groups if planned.dense else 0
        return pack_matrix(groups, _weights(planned.parts[index]), self._options, progress, self._arenas.get(key))


def _weights(stored: StoredMatrix) -> LinearWeights:
    return LinearWeights.of_headers(stored.name, stored.format, stored.shape, stored.read)


def _checked(dense: DenseModule, of: StoredParameter) -> _Planned:
    """Raises CheckpointError for a matrix that is not what the module has, FormatError where groups cut what shares a scale."""
    parts = tuple(of.find())
    shape = sum(part.shape[0] for part in parts), parts[0].shape[1]
    _check_shape(parts[0], dense.shape, shape)
    if any(part.has_bias != (dense.module.bias is not None) for part in parts):
        expected, found = ("a bias", "none") if dense.module.bias is not None else ("no bias", "one")
        raise CheckpointError(f"{parts[0].name}: expected {expected}, found {found}")
    if dense.groups:
        check_rows(parts[0].name, parts[0].format, shape[0], 0, shape[0] // dense.groups)
    return _Planned(dense, parts, of.order)


def _check_shape(stored: StoredMatrix, expected: tuple[int, int], found: tuple[int, int] | None = None) -> None:
    """Raise CheckpointError for a matrix of another shape. found: of all its parts together."""
    found = found or stored.shape
    if found != expected:
        raise CheckpointError(f"{stored.name}: expected [n, k] = {list(expected)}, found {list(found)}")
