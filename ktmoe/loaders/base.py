"""Loader: turns the tensors of one naming into ExpertWeights. It knows no backend and no instruction set."""

from __future__ import annotations

import os
from abc import ABC, abstractmethod
from collections.abc import Iterable
from dataclasses import dataclass
from typing import cast

from ktmoe.errors import CheckpointError, FormatError, KtmoeError, MissingTensorError, UnavailableError
from ktmoe.experts import ExpertWeights
from ktmoe.loaders import naming, registry, unknown
from ktmoe.loaders.checkpoint import Checkpoint
from ktmoe.loaders.one_layer import OneLayer
from ktmoe.loaders.scheme import Scheme

#: What Loader.detect gives for a checkpoint that has its names, and weights that it refuses.
NAMED = 0.1


class Loader(ABC):
    """One naming of a checkpoint's tensors.

    scheme: how each matrix is stored, for matrices that are no expert's; None where a loader does not say it.
    """

    scheme: Scheme | None = None

    @abstractmethod
    def detect(self, checkpoint: Checkpoint) -> float:
        """How surely this loader reads that checkpoint, 0 (not at all) to 1.

        By tensor names, dtypes, shapes and config; no tensor is read. NAMED where no other loader's names fit but the weights
        are not what this one reads: unless another one claims the checkpoint, load() then says what is wrong with it.
        May raise FormatError or CheckpointError: these are its names and its weights' dtype, but it does not read them, and the
        message says why. May raise MissingTensorError where what would decide has not been downloaded.
        """

    @abstractmethod
    def layers(self, checkpoint: Checkpoint) -> list[int | str]:
        """The layers that have routed experts, in the model's order: ints, and names such as "mtp.0"."""

    @abstractmethod
    def load(self, checkpoint: Checkpoint, layer: int | str) -> ExpertWeights:
        """One layer's experts, read lazily. Raises MissingTensorError for a layer or tensor that does not exist."""


@dataclass(frozen=True)
class Finding:
    """What one loader says of a checkpoint.

    loader: its name. score: what its detect() gives, 0 where it raises. error: what it raises.
    reason: why it does not read the checkpoint, in a sentence; empty where it does.
    """

    loader: str
    score: float
    reason: str
    error: KtmoeError | None = None


def explain(checkpoint: Checkpoint | OneLayer) -> list[Finding]:
    """What each loader says of a checkpoint, the surest one first. Reads no tensor.

    Raises CheckpointError for more layers than any loader reads.
    """
    seen = cast("Checkpoint", checkpoint)  # loaders ask no more of one here than OneLayer has
    naming.layers(seen)  # which raises: else each loader would say so
    findings = [_finding(name, registry.get(name), seen) for name in registry.names()]
    return sorted(findings, key=lambda finding: (-finding.score, finding.error is None))


def _finding(name: str, loader: Loader, checkpoint: Checkpoint) -> Finding:
    try:
        score = loader.detect(checkpoint)
    except (CheckpointError, FormatError) as error:  # MissingTensorError, too
        return Finding(name, 0.0, str(error), error)
    if score > 0:
        return Finding(name, score, "")
    layers = naming.listed(loader.layers(checkpoint))
    return Finding(name, 0.0, f"its names in {layers}, but other weights" if layers else "no tensor has its names")


def find_loader(checkpoint: Checkpoint, name: str = "auto", layer: int | str | None = None) -> Loader:
    """The loader of that name, or the one that is surest of this checkpoint, or of that layer of it: layers may differ.

    If none is, raises FormatError or CheckpointError with the reasons of those that know the names, MissingTensorError if a
    file is missing that would decide, else UnavailableError, which says what was found.
    """
    if name != "auto":
        return registry.get(name)
    alone = _surest(explain(OneLayer(checkpoint, layer))) if layer is not None else None
    if alone:
        return alone
    findings = explain(checkpoint)
    if surest := _surest(findings):
        return surest
    raise _refusal(checkpoint, findings)


def find_layers(checkpoint: Checkpoint, name: str = "auto") -> list[int | str]:
    """The layers that the loader of that name has; or all that some loader reads, in the model's order.

    Raises what find_loader() raises.
    """
    found = find_loader(checkpoint, name).layers(checkpoint)
    if name != "auto":
        return found
    known = naming.layers(checkpoint)
    more = {layer for layer in known if layer not in found and _surest(explain(OneLayer(checkpoint, layer)))}
    return [layer for layer in known if layer in more or layer in found] if more else found


def load_layers(
    checkpoint: Checkpoint, name: str = "auto", layers: Iterable[int | str] | None = None
) -> dict[int | str, tuple[Loader, ExpertWeights]]:
    """Each layer's loader, and what it gives. name: a loader's, or "auto". layers: by default what find_layers() gives.

    Raises what these raise. By default, where some layers are read and one is not, its error also says how to take the others.
    """
    wanted = find_layers(checkpoint, name) if layers is None else layers
    found: dict[int | str, tuple[Loader, ExpertWeights]] = {}
    refused: KtmoeError | None = None
    for layer in wanted:
        try:
            loader = find_loader(checkpoint, name, layer)
            found[layer] = loader, loader.load(checkpoint, layer)
        except (CheckpointError, FormatError, UnavailableError) as error:
            if layers is not None:
                raise
            refused = refused or error
    if refused is not None and found:
        others = naming.listed(list(found)).removeprefix("layers ").replace(", ", ",")
        how = f"the other layers can be read: pass layers=, or --layers {others} to a command"
        raise type(refused)(f"{refused}; {how}") from refused
    if refused is not None:
        raise refused
    return found


def _surest(findings: list[Finding]) -> Loader | None:
    return registry.get(findings[0].loader) if findings and findings[0].score > 0 else None


def _refusal(checkpoint: Checkpoint, findings: list[Finding]) -> KtmoeError:
    wrong = [finding for finding in findings if finding.error and not isinstance(finding.error, MissingTensorError)]
    if wrong:
        reasons = {finding.reason: finding.loader for finding in reversed(wrong)}  # one of those that say the same
        said = "; ".join(f"{loader}: {reason}" for reason, loader in reversed(reasons.items()))
        kinds = {type(finding.error) for finding in wrong if finding.error}
        kind = kinds.pop() if len(kinds) == 1 else FormatError
        return kind(f"{checkpoint.path}: no loader reads these experts: {said}{unknown.method(checkpoint)}")
    absent = next((finding.error for finding in findings if finding.error), None)
    tried = ", ".join(finding.loader for finding in sorted(findings, key=lambda finding: finding.loader))
    return absent or UnavailableError(
        f"{checkpoint.path}: no loader recognises this checkpoint; tried {tried}. Found {unknown.found(checkpoint)}. "
        "Pass loader=... to choose one, or register one for its naming."
    )


def load_experts(path: str | os.PathLike[str], layer: int | str, *, loader: str = "auto") -> ExpertWeights:
    """One layer's experts from a checkpoint folder (or one .safetensors or .gguf file); a matrix is read when it is asked for.

    layer: its number, or a name such as "mtp.0". loader: a name, or "auto" to go by the tensors.
    Raises CheckpointError, MissingTensorError, FormatError; UnavailableError if no loader recognises the checkpoint.

    Examples:
        >>> experts = ktmoe.load_experts("DeepSeek-V4-Flash", 3)
        >>> experts.name, experts.formats["down"] == ktmoe.MXFP4
        ('layers.3.ffn.experts', True)
    """
    checkpoint = Checkpoint(path)
    return find_loader(checkpoint, loader, layer).load(checkpoint, layer)
