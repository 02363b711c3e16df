"""Packing a model's dense matrices: from the checkpoint's own bytes where a scheme reads them, else from torch's parameters."""

from __future__ import annotations

import os
import re
from collections.abc import Sequence
from contextlib import ExitStack

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
from ktmoe.loaders.dense import find_matrix
from ktmoe.loaders.one_matrix import StoredMatrix
from ktmoe.machine import memory
from ktmoe.machine.numa import placement_of
from ktmoe.matrix import Matrix
from ktmoe.matrix_rows import check_rows
from ktmoe.transformers.dense_modules import (
    DenseModule,
    dense_module,
    find_dense,
    output_of_embedding,
    put_embedding,
    put_packed,
    share_inputs,
    take_away,
)
from ktmoe.transformers.dense_names import is_plain, stored_names
from ktmoe.transformers.modules import bfloat16
from ktmoe.transformers.options import Options, Reporting
from ktmoe.weights.formats import BF16

#: Matrices that are made at a time, so that one is read while another is packed.
_AT_ONCE = 2


class DenseFromCheckpoint:
    """Dense matrices that ktmoe reads from a checkpoint in the background, while transformers loads the rest.

    found: those of the model that may be packed. dtype: the model's. cached: whether Options.cache is of this checkpoint.
    Those that are not in `names` are left to transformers: matrices that it changes while it reads them, that share their
    parameter with the embedding, that no scheme reads, or whose model has another dtype than bfloat16.
    needs_quantizer: whether what is left has matrices that only the checkpoint's own quantization method reads. refused: why
    no scheme of ktmoe reads the first of them.
    Raises MissingTensorError for a matrix that lacks a tensor where others of its checkpoint are whole: transformers would read
    its codes as if they were numbers.
    """

    def __init__(
        self,
        path: str | os.PathLike,
        model: PreTrainedModel,
        found: Sequence[DenseModule],
        options: Options,
        dtype: torch.dtype,
        cached: bool,
    ):
        self._options = options
        self._by_name: dict[str, tuple[DenseModule, StoredMatrix]] = {}
        self._arenas: dict[str, Arenas] = {}
        self.needs_quantizer, self.refused, whole = False, None, False
        with ExitStack() as resources:
            checkpoint = resources.enter_context(Checkpoint(path))
            stored = stored_names(model, checkpoint)
            cache = Cache(options.cache, checkpoint) if cached and options.dense == "packed" else None
            tied = {*model.all_tied_weights_keys, *model.all_tied_weights_keys.values()}
            by_parameter = {each.parameter: each for each in found}
            for parameter, base in stored.items():
                plain, dense = is_plain(checkpoint, base), by_parameter.get(parameter)
                if dense is None or parameter in tied or (plain and dtype != torch.bfloat16):
                    self.needs_quantizer |= not plain
                    continue
                try:
                    matrix = _checked(find_matrix(checkpoint, base), dense)
                except KtmoeError as error:
                    self.needs_quantizer |= not plain
                    self.refused = self.refused or (None if plain else error)
                    continue
                self._by_name[dense.name] = dense, matrix
                whole |= not plain
                if cache is not None and base in cache.matrices and not dense.groups:
                    weights = self._weights(matrix)
                    self._arenas[dense.name] = cache.matrix(base, weights, placement_of(weights, options.numa_nodes))
            if whole and isinstance(self.refused, MissingTensorError):
                raise self.refused
            names = {each for name, (_, matrix) in self._by_name.items() for each in (name, matrix.name)}
            self._ignored = [rf"^{re.escape(name)}\." for name in names]
            self._resources = resources.pop_all()

    @property
    def names(self) -> list[str]:
        """The modules' names."""
        return list(self._by_name)

    @property
    def nbytes(self) -> int:
        """Bytes of these matrices in the checkpoint."""
        return sum(matrix.nbytes for _, matrix in self._by_name.values())

    def start(self, model: PreTrainedModel, progress: Progress | None) -> None:
        """Take the modules out of the model, so that transformers does not read their tensors, and begin to read them."""
        take_away(model, self.names)
        known = model._keys_to_ignore_on_load_unexpected or ()
        model._keys_to_ignore_on_load_unexpected = {*known, *self._ignored}
        sizes = {name: matrix.nbytes for name, (_, matrix) in self._by_name.items()}
        self._loading = BackgroundTasks("matrix", sizes, self._make, _AT_ONCE, progress, self._resources)

    def finish(self, model: PreTrainedModel) -> None:
        """Wait until all are packed, and put them into the model. Raises what reading and packing raise."""
        self._loading.wait()
        for name in self._by_name:
            put_packed(model, name, self._loading.get(name))
        share_inputs(model)

    def close(self) -> None:
        """Close what was opened, if start() was not called."""
        self._resources.close()

    def _weights(self, stored: StoredMatrix) -> LinearWeights:
        return LinearWeights.of_headers(stored.name, stored.format, stored.shape, stored.read)

    def _make(self, name: str, progress: Progress) -> Linear | LinearGroup:
        dense, stored = self._by_name[name]
        return pack_matrix(dense, self._weights(stored), self._options, progress, self._arenas.get(name))


def packable_nbytes(model: torch.nn.Module, options: Options) -> int:
    """Bytes of the matrices that pack_parameters() packs."""
    return sum(_packable(model, options).values())


def pack_parameters(model: PreTrainedModel, options: Options, report: Reporting) -> None:
    """Pack the dense matrices that are bfloat16 parameters in this memory, one after the other, and free each.

    An output layer that is the input embedding, too, is held once: the embedding then reads the packed rows.
    report: of Options.reporting(). Raises what Linear does; all matrices before are packed then.
    """
    tied = output_of_embedding(model)
    for name, nbytes in _packable(model, options).items():
        progress = report(nbytes)
        packed = _pack_module(dense_module(name, model.get_submodule(name)), options, progress)
        put_packed(model, name, packed)
        if tied and name == tied[0]:
            put_embedding(model, tied[1], packed)
    share_inputs(model)
    memory.give_back()


def _packable(model: torch.nn.Module, options: Options) -> dict[str, int]:
    """Bytes of each matrix, by its module's name."""
    if options.dense == "torch":
        return {}
    weights = {each.name: each.module.weight for each in find_dense(model)}
    return {name: w.nbytes for name, w in weights.items() if w.dtype == torch.bfloat16 and w.device.type == "cpu"}


def _pack_module(dense: DenseModule, options: Options, progress: Progress | None) -> Linear | LinearGroup:
    weight, bias = dense.module.weight.detach(), dense.module.bias
    bias = None if bias is None else bias.detach().float().numpy()
    matrix = Matrix(dense.name, BF16, dense.shape, bfloat16(weight.contiguous()), bias=bias)
    return pack_matrix(dense, LinearWeights(matrix), options, progress, None)


def pack_matrix(
    dense: DenseModule, weights: LinearWeights, options: Options, progress: Progress | None, arenas: Arenas | None
) -> Linear | LinearGroup:
    """One matrix, packed as it is or rounded, as the options say. Raises what Linear does."""
    weights = options.rounded(weights)
    common = {"tuned_for": options.tuned_for, "numa_nodes": options.numa_nodes}
    backend = options.dense_backend
    if dense.groups:
        return LinearGroup.of_rows(weights.matrix(0, "weight"), dense.groups, backend, progress=progress, **common)
    return Linear(weights, backend, progress=progress, arenas=arenas, **common)


def _checked(stored: StoredMatrix, dense: DenseModule) -> StoredMatrix:
    """Raises CheckpointError for a matrix that is not what the module has, FormatError where groups cut what shares a scale."""
    if stored.shape != dense.shape or stored.has_bias != (dense.module.bias is not None):
        without = {True: "with", False: "without"}
        raise CheckpointError(
            f"{stored.name}: expected [n, k] = {list(dense.shape)} {without[dense.module.bias is not None]} a bias, "
            f"found {list(stored.shape)} {without[stored.has_bias]} one"
        )
    if dense.groups:
        check_rows(stored.name, stored.format, stored.shape[0], 0, stored.shape[0] // dense.groups)
    return stored
