"""What activation modes change, or rounded weights: the perplexity of a text with each beside the exact one, and the error of
each layer.

The runs come one after the other, each with a model of its own, so that the memory of one is enough. The exact run's logits
wait in a temporary file, in the model's own dtype: nothing is rounded or left out.
"""

from __future__ import annotations

import os
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from transformers import AutoConfig, PreTrainedConfig

from ktmoe import backends
from ktmoe.backends.base import Found, mode_by
from ktmoe.backends.choice import choose_backend
from ktmoe.errors import CheckpointError, InputError, UnavailableError
from ktmoe.layer import MoELayer
from ktmoe.loaders import model_shape
from ktmoe.reference.difference import Difference
from ktmoe.torch import DenseLinear
from ktmoe.transformers import load
from ktmoe.transformers.activation import recognise
from ktmoe.transformers.folder import model_folder
from ktmoe.transformers.layer_errors import LayerErrors, Sampler, formats_of, weights_of
from ktmoe.transformers.options import Options
from ktmoe.transformers.perplexity import Logits, Mean, Scores, Window, require_space, score, windows
from ktmoe.transformers.tokenizer import load_tokenizer
from ktmoe.weights.activation import SILU

#: The activation mode that rounds nothing.
EXACT = "bf16"
#: The two models of a comparison of weights.
ORIGINAL, ROUNDED = "original", "rounded"


@dataclass(frozen=True)
class RunMode:
    """How a model computes.

    activations: the experts' mode, by its shortest name. rounding: whether their weights are rounded ("folded") or "exact".
    dense: who computes the dense matrices, as ktmoe.transformers.load() has it. model: ORIGINAL or ROUNDED where two are
    compared, else empty.
    """

    activations: str
    rounding: str = "exact"
    dense: str = "packed"
    model: str = ""

    @property
    def label(self) -> str:
        further = [] if self.rounding == "exact" else [self.rounding]
        further += [] if self.dense == "packed" else [f"dense {self.dense}"]
        if self.model and self.activations == EXACT:
            return ", ".join([self.model, *further])
        return ", ".join([*filter(None, [self.model]), self.activations, *further])


@dataclass(frozen=True)
class Run:
    """The text under one mode.

    backends: of its layers. layers: what each differs from the exact run's by, in the order of Accuracy.layers; empty for the
    exact run itself. formats: the weights of these layers, in words. load_seconds: of loading. seconds: of the text.
    """

    mode: RunMode
    backends: list[str]
    scores: Scores
    layers: list[Difference]
    formats: list[str]
    load_seconds: float
    seconds: float


@dataclass(frozen=True)
class Accuracy:
    """tokens: of the text. runs: the exact one first. layers: empty if they were not asked for."""

    tokens: int
    context: int
    windows: list[Window]
    runs: list[Run]
    layers: list[LayerErrors]

    def lost(self, run: Run) -> Mean:
        """The mean log-likelihood of a token that a run has less than the exact one: ln(perplexity / exact perplexity)."""
        return run.scores.mean(run.scores.nll - self.runs[0].scores.nll)


def accuracy(
    path: str | os.PathLike[str],
    text: str,
    *,
    backend: str = "auto",
    activations: Sequence[str] | None = None,
    rounding: str = "exact",
    dense: str = "packed",
    experts: str | os.PathLike[str] | None = None,
    tokens: int | None = None,
    context: int = 512,
    layers: bool = True,
    against: str | os.PathLike[str] | None = None,
    step: Callable[..., Any],
) -> Accuracy:
    """Run a text through a checkpoint's model, exactly and with each activation mode. path: as load() has it.

    activations: the modes to compare with "bf16"; None: those of ktmoe.modes.MODES that the chosen backend has for all layers.
    rounding: "folded" adds a run with "bf16" whose weights may be rounded. dense: another name than "packed" adds a run with
    "bf16" whose dense matrices are computed so. experts: load()'s. tokens: the text's first so many; None: all.
    context: of the windows, see ktmoe.transformers.perplexity. layers: the errors of each layer, too.
    against: the original, of which path has the weights rounded. Then the exact run is the original's, with its tokenizer, and
    path's runs are compared with it: that with "bf16", and those with the modes that activations names.
    step: of ktmoe.progress_bar.steps.
    Raises CheckpointError without a model or a tokenizer, or if the two models differ in shape, InputError for a text that is
    too short or a context that is too long for the model, OutOfSpaceError if the exact run's logits do not fit onto the disk,
    UnavailableError for a mode that cannot run or does not exist, and what ktmoe.transformers.load() raises.
    """
    if against is not None and rounding != "exact":
        raise InputError(f"rounding must be 'exact' where weights are compared with those of an original, found {rounding!r}")
    with ExitStack() as resources:
        folder = resources.enter_context(model_folder(path, everything=dense == "torch"))
        original = None if against is None else resources.enter_context(model_folder(against))
        return _accuracy(folder, original, text, backend, activations, rounding, dense, experts, tokens, context, layers, step)


def _accuracy(
    folder: Path,
    original: Path | None,
    text: str,
    backend: str,
    activations: Sequence[str] | None,
    rounding: str,
    dense: str,
    experts: str | os.PathLike[str] | None,
    tokens: int | None,
    context: int,
    layers: bool,
    step: Callable[..., Any],
) -> Accuracy:
    config = AutoConfig.from_pretrained(original or folder).get_text_config()
    if original:
        _require_same_shape(folder, original, config)
    read = _tokens(original or folder, text, config)[:tokens]
    longest = getattr(config, "max_position_embeddings", None)
    if longest and context > longest:
        raise InputError(f"context must be at most {longest} tokens, which this model has positions for, found {context}")
    Options(dense=dense)  # raises, before anything is loaded
    work = _Work(folder, original, backend, experts, read, windows(len(read), context), step)
    with tempfile.TemporaryFile() as file:
        exact, modes, found = work.exact(Logits(file), config.vocab_size, activations, rounding, dense, layers)
        runs = [exact, *(work.run(mode, Logits(file), found) for mode in modes)]
    return Accuracy(len(read), context, work.windows, runs, found)


@dataclass(frozen=True)
class _Work:
    """The text's tokens and windows, and how to load the model. A method's model is garbage once it has returned."""

    folder: Path
    original: Path | None
    backend: str
    experts: str | os.PathLike[str] | None
    tokens: torch.Tensor
    windows: list[Window]
    step: Callable[..., Any]

    def exact(
        self, logits: Logits, vocabulary: int, activations: Sequence[str] | None, rounding: str, dense: str, layers: bool
    ) -> tuple[Run, list[RunMode], list[LayerErrors]]:
        """The exact run, the modes to compare with it, and its layers."""
        mode = RunMode(EXACT, model=ORIGINAL if self.original else "")
        with self._loaded(mode) as (model, packed, load_seconds):
            modes = self._modes(list(packed.values()), activations)
            if rounding != "exact":
                _require_rounding(self.folder, list(packed.values()), rounding)
                modes.append(RunMode(EXACT, rounding))
            if dense != "packed":
                modes.append(RunMode(EXACT, dense=dense, model=ROUNDED if self.original else ""))
            if modes:
                require_space(sum(window.scored for window in self.windows) * vocabulary * model.dtype.itemsize)
            sampler = Sampler({name: model.get_submodule(name) for name in packed} if layers else {}, len(self.windows))
            start = time.perf_counter()
            with self.step(f"{mode.label}: text") as draw:
                keep = logits if modes else None
                scores = score(model, self.tokens, self.windows, keep=keep, before=sampler.start, progress=draw)
            seconds, found = time.perf_counter() - start, []
            with self.step(f"{mode.label}: layers beside float64") as draw:
                for name, sample in sampler.samples().items():
                    found.append(LayerErrors(name, packed[name], recognise(model.get_submodule(name), name), sample))
                    draw(len(found), len(packed))
            run = Run(mode, _backends(packed), scores, [], [layer.formats for layer in found], load_seconds, seconds)
        return run, modes, found

    def run(self, mode: RunMode, exact: Logits, layers: list[LayerErrors]) -> Run:
        """exact: the exact run's logits. layers: its."""
        with self._loaded(mode) as (model, packed, load_seconds):
            if missing := [layer.name for layer in layers if layer.name not in packed]:
                raise CheckpointError(f"{self.folder}: expected routed experts in {missing[0]}, as in the original, found none")
            differences = [layer.difference(packed[layer.name]) for layer in layers]
            start = time.perf_counter()
            with self.step(f"{mode.label}: text") as draw:
                scores = score(model, self.tokens, self.windows, against=exact, progress=draw)
            seconds, formats = time.perf_counter() - start, [formats_of(packed[layer.name]) for layer in layers]
            return Run(mode, _backends(packed), scores, differences, formats, load_seconds, seconds)

    def _modes(self, packed: list[MoELayer], activations: Sequence[str] | None) -> list[RunMode]:
        """The modes to compare with the exact run of these layers."""
        if not self.original:
            return _modes(packed, self.backend, activations)
        names = dict.fromkeys([EXACT, *(mode_by(name)[0].name for name in activations or ())])
        return [RunMode(name, model=ROUNDED) for name in names]

    @contextmanager
    def _loaded(self, mode: RunMode) -> Iterator[tuple[torch.nn.Module, dict[str, MoELayer], float]]:
        """(the model, its packed layers by their modules' names, seconds). Layers and matrices are closed at the end."""
        start = time.perf_counter()
        with self.step(f"{mode.label}: load") as draw:
            options = {"activations": mode.activations, "rounding": mode.rounding, "dense": mode.dense}
            whole = self.original if mode.model == ORIGINAL else self.folder
            experts = None if mode.model == ORIGINAL else self.experts
            model = load(whole, backend=self.backend, experts=experts, **options, progress=draw).eval()
        layers = {name: module.ktmoe_layer for name, module in model.named_modules() if hasattr(module, "ktmoe_layer")}
        try:
            yield model, layers, time.perf_counter() - start
        finally:
            for layer in layers.values():
                layer.close()
            for module in model.modules():
                if isinstance(module, DenseLinear):
                    module.linear.close()


def _require_same_shape(folder: Path, original: Path, config: PreTrainedConfig) -> None:
    """Raise CheckpointError, which names what differs. config: of the original's language model."""
    ours = AutoConfig.from_pretrained(folder).get_text_config()
    different = model_shape.difference(*(lambda key, of=of: getattr(of, key, None) for of in (ours, config)))
    if different:
        raise CheckpointError(f"{folder}: {different}, as in {original}: both must be the same model")


def _tokens(folder: Path, text: str, config: PreTrainedConfig) -> torch.Tensor:
    """All tokens of the text, int64, with the special ones that the tokenizer itself adds."""
    tokenizer = load_tokenizer(folder)
    found = tokenizer(text, return_tensors="pt", verbose=False).input_ids[0]
    if len(found) and found.max() >= config.vocab_size:
        raise CheckpointError(
            f"{folder}: the model has {config.vocab_size} tokens, but its tokenizer made token {int(found.max())} of the text"
        )
    return found


def _modes(packed: list[MoELayer], backend: str, activations: Sequence[str] | None) -> list[RunMode]:
    """The modes to compare with the exact run of these layers, whose backends were chosen for it."""
    if activations is None:
        known = dict.fromkeys(mode for layer in packed for mode in backends.get(layer.backend).modes)
        names = [
            mode
            for mode in known
            if mode != EXACT
            and all(isinstance(backends.get(layer.backend).lookup(layer.spec, mode), Found) for layer in packed)
        ]
    else:
        names = [mode for mode in dict.fromkeys(mode_by(name)[0].name for name in activations) if mode != EXACT]
        for mode in names:
            for layer in packed:
                choose_backend(backend, layer.spec, mode)  # raises, before the text is read
    return [RunMode(name) for name in names]


def _require_rounding(folder: Path, packed: list[MoELayer], rounding: str) -> None:
    """Raise UnavailableError if no weight would be rounded, as the first expert of each layer shows."""
    for layer in packed:
        with MoELayer(weights_of(layer, SILU).take([0]), layer.backend, EXACT, rounding=rounding) as one:
            if one.rounding == rounding:
                return
    names = ", ".join(sorted({layer.backend for layer in packed}))
    raise UnavailableError(f"{folder}: rounding {rounding!r}: backend {names} rounds none of these weights")


def _backends(packed: dict[str, MoELayer]) -> list[str]:
    return sorted({layer.backend for layer in packed.values()})
