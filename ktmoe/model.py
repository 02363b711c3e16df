"""MoEModel: the routed experts of all layers of a checkpoint, loaded in the background."""

from __future__ import annotations

import os
import weakref
from collections.abc import Iterable, Iterator, Sequence
from contextlib import ExitStack, nullcontext
from typing import Any, NoReturn, SupportsIndex

import numpy as np

from ktmoe import backends, progress_bar
from ktmoe._native import core
from ktmoe.arrays import as_numpy
from ktmoe.backends.base import Arenas
from ktmoe.backends.choice import choose_backend
from ktmoe.background.tasks import BackgroundTasks, Progress
from ktmoe.cache.opened import open_cache
from ktmoe.distributed.layer import DistributedLayer, Distribution
from ktmoe.distributed.together import together
from ktmoe.errors import InputError, MissingTensorError, NotCopyableError, OutOfMemoryError
from ktmoe.experts import ExpertWeights
from ktmoe.layer import MoELayer
from ktmoe.loaders import naming
from ktmoe.loaders.base import load_layers
from ktmoe.loaders.checkpoint import Checkpoint
from ktmoe.machine import memory
from ktmoe.machine.numa import placement_of
from ktmoe.messages import show

#: Layers that are loaded at a time, so that some are read while another is packed.
AT_ONCE = 3
#: The most experts that each of these layers has read and not yet packed.
STAGED_EXPERTS = 4


class MoEModel:
    """The layers of one checkpoint by name: model[3], model["mtp.0"]. from_checkpoint() makes it.

    layers: their names, in the order in which they are loaded; len() and iteration are of these. path: the checkpoint's.

    Threads of its own load the layers. They end when all is loaded, on cancel() and close(), when the model is garbage, and
    before the interpreter exits. The checkpoint's files are closed once all is loaded. A forked child has the layers that were
    loaded by then; the others raise ClosedError in it, and what was half loaded takes memory until it ends.

    Examples:
        >>> with ktmoe.MoEModel.from_checkpoint("DeepSeek-V4-Flash") as model:
        ...     print(list(model))
        ...     y = model[3].forward(x, ids, weights)
        [0, 1, 2, 3]
    """

    def __init__(self, path: str | os.PathLike[str], loading: BackgroundTasks, layers: list[int | str]):
        self.path = path
        self.layers = layers
        self._loading = loading
        weakref.finalize(self, loading.end).atexit = False

    @classmethod
    def from_checkpoint(
        cls,
        path: str | os.PathLike[str],
        layers: Iterable[int | str] | None = None,
        backend: str = "auto",
        activations: str = "auto",
        *,
        loader: str = "auto",
        rounding: str = "exact",
        tuned_for: str = "decode",
        router_weight: str | None = None,
        numa_nodes: Sequence[int] | None = None,
        physical_to_logical: np.ndarray | Sequence[int] | Sequence[Sequence[int]] | None = None,
        progress: Progress | bool | None = None,
        wait: bool = True,
        cache: str | os.PathLike[str] | None = None,
        distribution: Distribution | None = None,
    ) -> MoEModel:
        """All layers of a checkpoint folder (or one .safetensors or .gguf file), or those named by `layers`.

        All headers are checked here, and whether all layers fit into memory, before any weight is read.
        physical_to_logical: integers [layers, slots], a row for each layer that is loaded, or [slots] for all of them: slot i
        of a layer is its expert physical_to_logical[i].
        progress: called with (done_bytes, total_bytes) from threads, one at a time; an exception from it cancels. True: a bar
        on stderr where that is a terminal, which needs rich. wait: return when all is loaded, and raise if that fails; nothing
        is kept then.
        cache: a folder that `ktmoe pack` has made of this checkpoint: all layers are mapped from there, and need not fit into
        memory (docs/packed-caches.md).
        distribution: how layers are divided among processes, each of which packs its part alone; they are DistributedLayers
        then. All processes call this, and where one of them raises, all do, unless wait is False. It excludes cache.
        The other arguments are MoELayer.from_checkpoint's.
        Raises what that raises, OutOfMemoryError if the layers do not fit, and what progress raises.

        Examples:
            >>> model = ktmoe.MoEModel.from_checkpoint("DeepSeek-V4-Flash", layers=[0, 3], wait=False)
            >>> model.wait(), len(model)
            (True, 2)
        """
        if distribution is not None and cache is not None:
            raise InputError("cache must be None with a distribution: a packed cache has whole layers")
        at_the_end = (
            together(distribution.communicator, "loading", distribution.what) if distribution and wait else nullcontext()
        )
        with ExitStack() as given_up, at_the_end, ExitStack() as resources:
            checkpoint = resources.enter_context(Checkpoint(path))
            opened = None if cache is None else open_cache(cache, checkpoint, physical_to_logical)
            everything = opened.all_layers if opened else None
            names: Any = _names(layers) if layers is not None else everything
            if opened:
                experts = opened.experts(checkpoint, names, loader)
            else:
                experts = {name: read for name, (_, read) in load_layers(checkpoint, loader, names).items()}
            names = list(experts)
            if not names:
                raise InputError(f"{path}: layers: expected at least one, found none")
            if physical_to_logical is not None:
                maps = _maps(physical_to_logical, len(names))
                experts = {name: experts[name].take(ids) for name, ids in zip(names, maps, strict=True)}
            chosen = {name: choose_backend(backend, experts[name], activations).name for name in names}
            own = {name: [weights] for name, weights in experts.items()}
            if distribution:
                distribution.check_layers(names)
                own = {name: distribution.own_part(weights, name) for name, weights in experts.items()}
            sizes = {name: sum(weights.nbytes for weights in of) for name, of in own.items()}
            placements = {name: placement_of(weights, numa_nodes) for name, weights in experts.items()}
            arenas: dict[int | str, Arenas] = {}
            if opened:
                arenas = {name: opened.layer(name, experts[name], placements[name]) for name in names}
            else:
                packed = [_packed_nbytes(chosen[name], own[name], numa_nodes) for name in names]
                _require_memory(path, packed, experts.values())
            options: dict[str, Any] = {
                "rounding": rounding,
                "tuned_for": tuned_for,
                "router_weight": router_weight,
                "numa_nodes": numa_nodes,
            }

            def make(name: int | str, progress: Progress) -> MoELayer | DistributedLayer:
                if distribution:
                    which = experts[name], distribution, chosen[name], activations
                    return DistributedLayer(*which, layer=name, **options, progress=progress)
                return MoELayer(experts[name], chosen[name], activations, **options, progress=progress, arenas=arenas.get(name))

            if progress is True:
                progress = resources.enter_context(progress_bar.bytes_done("loading"))
            loading = BackgroundTasks(f"{path}: layer", sizes, make, AT_ONCE, progress or None, resources.pop_all())
            model = cls(path, loading, names)
            given_up.push(lambda error, *_: model.close() if error else None)
            if wait:
                model.wait()
        return model

    def __getitem__(self, layer: int | str) -> MoELayer | DistributedLayer:
        """A layer, once it is loaded. Raises its error if it could not be; MissingTensorError if there is none of that name."""
        if layer not in self:
            raise MissingTensorError(f"{self.path}: layer {show(layer)}: expected one of {naming.listed(self.layers)}")
        return self._loading.get(naming.layer_key(layer))

    def __contains__(self, layer: Any) -> bool:
        try:
            return naming.layer_key(layer) in self.layers
        except TypeError:  # nothing that names a layer
            return False

    def __iter__(self) -> Iterator[int | str]:
        return iter(self.layers)

    def __len__(self) -> int:
        return len(self.layers)

    def wait(self, timeout: float | None = None) -> bool:
        """Wait until all layers are loaded; False if `timeout` seconds were not enough.

        Raises the error of a layer as soon as one fails; the others go on, and model[name] gives them.

        Examples:
            >>> model = ktmoe.MoEModel.from_checkpoint("DeepSeek-V4-Flash", wait=False)
            >>> while not model.wait(timeout=0.1):
            ...     print("%d of %d bytes" % model.loaded)
        """
        return self._loading.wait(timeout)

    @property
    def loaded(self) -> tuple[int, int]:
        """(bytes of the checkpoint that are packed, bytes of all layers)."""
        return self._loading.done()

    @property
    def nbytes(self) -> int:
        """Bytes of the packed weights of the layers that are loaded."""
        return sum(layer.nbytes for layer in self._loading.made())

    def cancel(self) -> None:
        """Stop loading and give everything back, as close() does; nothing happens if all layers are loaded or have failed.

        Examples:
            >>> model = ktmoe.MoEModel.from_checkpoint("DeepSeek-V4-Flash", wait=False)
            >>> model.cancel()
        """
        self._loading.cancel()

    def close(self) -> None:
        """Stop loading; give back all layers, files, scratch memory and idle threads. A second call does nothing.

        Forward calls that are running are waited for.

        Examples:
            >>> model = ktmoe.MoEModel.from_checkpoint("DeepSeek-V4-Flash")
            >>> model.close()
            >>> model.nbytes
            0
        """
        self._loading.stop()
        core.release()

    def __enter__(self) -> MoEModel:
        return self

    def __exit__(self, *error: object) -> None:
        self.close()

    def __reduce_ex__(self, protocol: SupportsIndex) -> NoReturn:
        raise NotCopyableError(
            f"{self.path}: a MoEModel cannot be copied or pickled, since its packed weights are memory of this process. "
            "Share it between threads as it is, fork after it was loaded, or load another one with MoEModel.from_checkpoint"
        )

    def __repr__(self) -> str:
        done, total = self.loaded
        return f"MoEModel({str(self.path)!r}, {naming.listed(self.layers)}, {done / 1e9:.2f} of {total / 1e9:.2f} GB loaded)"


def _names(layers: Iterable[int | str]) -> list[int | str]:
    if isinstance(layers, str) or not isinstance(layers, Iterable):
        raise InputError(f"layers: expected an iterable of numbers and names, found {show(layers)}")
    names = [naming.layer_key(layer) for layer in layers]
    for name in names:
        if names.count(name) > 1:
            raise InputError(f"layers: expected each once, found {show(name)} {names.count(name)} times")
    return names


def _maps(physical_to_logical: Any, layers: int) -> np.ndarray:
    """A row of ids for each layer."""
    given = physical_to_logical
    maps = np.asarray(given) if isinstance(given, (list, tuple)) else as_numpy(given, "physical_to_logical")
    if maps.dtype.kind not in "iu" or not (maps.ndim == 1 or (maps.ndim == 2 and len(maps) == layers)):
        expected = f"integers [slots] or [{layers} layers, slots]"
        raise InputError(f"physical_to_logical: expected {expected}, found {maps.dtype} {list(maps.shape)}")
    return np.broadcast_to(maps, (layers, maps.shape[-1]))


def _packed_nbytes(backend: str, parts: Iterable[ExpertWeights], numa_nodes: Sequence[int] | None) -> int:
    """Bytes of a layer's experts, or of the parts of them that this process has."""
    return sum(backends.get(backend).packed_nbytes(part, placement_of(part, numa_nodes)) for part in parts)


def memory_needed(packed: Sequence[int], experts: Iterable[ExpertWeights]) -> tuple[int, int]:
    """(bytes that loading these layers takes, bytes of it to read into). packed: Backend.packed_nbytes of each layer."""
    largest = max(weights.nbytes // weights.num_experts for weights in experts)
    staged = min(AT_ONCE, len(packed)) * STAGED_EXPERTS * largest
    return sum(packed) + staged, staged


def _require_memory(path: str | os.PathLike[str], packed: list[int], experts: Iterable[ExpertWeights]) -> None:
    """Raise OutOfMemoryError, which says how many layers would fit, if packed layers and what is read ahead do not."""
    available = memory.available_bytes()
    needed, staged = memory_needed(packed, experts)
    if available is None or needed <= available:
        return
    fitting, left = 0, available - staged
    while packed[fitting] <= left:
        left -= packed[fitting]
        fitting += 1
    raise OutOfMemoryError(
        f"{path}: {len(packed)} layers need {needed / 2**30:.2f} GiB of memory, {staged / 2**30:.2f} GiB of it to read into; "
        f"{max(available, 0) / 2**30:.2f} GiB is available, which is enough for {fitting} of them"
    )
