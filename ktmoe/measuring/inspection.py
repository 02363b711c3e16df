"""What a checkpoint holds, who reads it, and what it takes here: by headers and configuration alone, no weight is read."""

from __future__ import annotations

from dataclasses import dataclass, field

from ktmoe import backends, loaders
from ktmoe._native import core
from ktmoe.backends.base import Found
from ktmoe.backends.choice import Choice, choose_backend
from ktmoe.errors import CheckpointError, FormatError, KtmoeError, UnavailableError
from ktmoe.experts import PROJECTIONS, ExpertWeights
from ktmoe.loaders import model_config, naming
from ktmoe.loaders.base import Finding, Loader, explain, find_layers, find_loader
from ktmoe.loaders.checkpoint import Checkpoint
from ktmoe.loaders.one_layer import OneLayer
from ktmoe.machine import memory
from ktmoe.machine.numa import placement_of
from ktmoe.measuring.limits import Limits, measured
from ktmoe.measuring.token_bytes import Name, TokenBytes, passes, token_bytes
from ktmoe.messages import printable, show
from ktmoe.model import memory_needed

#: Where a checkpoint says how many experts a token has.
TOP_K_KEYS = ("num_experts_per_tok", "experts_per_token", "moe_topk", "moe_k")
#: The layers that a loader reads, by name: the name of the loader, and the experts that it gives.
Served = dict[Name, tuple[str, ExpertWeights]]


@dataclass
class LayerGroup:
    """Layers that are alike, and how they would be computed here.

    loader: the name of the one that reads them. experts: the first layer's. choice: None where no backend can compute them;
    why_not says why. packed_nbytes: of one layer.
    """

    layers: list[Name]
    loader: str
    experts: ExpertWeights
    choice: Choice | None = None
    why_not: str = ""
    packed_nbytes: int = 0

    @property
    def isa(self) -> str | None:
        """The instruction set of the kernels, if the backend has a table of them."""
        table = self._table()
        return table.name if table else None

    def limits(self) -> Limits:
        """What the machine allows these layers, measured now. Raises UnavailableError where isa is None."""
        choice, table = self.choice, self._table()
        if choice is None or table is None:
            raise UnavailableError(self.why_no_isa)
        return measured(self.experts, choice.name, table)

    @property
    def why_no_isa(self) -> str:
        """Why isa is None, where it is."""
        return f"backend {self.choice.name} has no kernel table to measure limits with" if self.choice else self.why_not

    def _table(self) -> core.KernelTable | None:
        if self.choice is None:
            return None
        found = backends.get(self.choice.name).lookup(self.experts, self.choice.activations)
        return found.table if isinstance(found, Found) else None


@dataclass
class Refused:
    """Layers that are not served. reason: what the loader says of the first."""

    layers: list[Name]
    reason: str


@dataclass
class Inspection:
    """A checkpoint as inspect() found it.

    findings: what each loader says, the surest one first. loader: the name of the surest; None if none reads the checkpoint,
    and why_no_loader says why. top_k: experts of a token; None where the checkpoint does not say, and why_no_top_k says why.
    num_layers: by its configuration; None where that does not say. token: what a token reads; None where the names of routed
    experts are not known. needed, staged: bytes that loading all groups takes, and those of it to read
    into. available: bytes; None where the system does not say.
    """

    path: str
    tensors: int
    findings: list[Finding]
    loader: str | None = None
    why_no_loader: str = ""
    groups: list[LayerGroup] = field(default_factory=list)
    refused: list[Refused] = field(default_factory=list)
    top_k: int | None = None
    why_no_top_k: str = ""
    num_layers: int | None = None
    token: TokenBytes | None = None
    needed: int = 0
    staged: int = 0
    available: int | None = None

    def counts(self, layer: Name) -> bool:
        """Whether a token passes through a layer."""
        return passes(layer, self.num_layers)

    @property
    def token_nbytes(self) -> float | None:
        """What a token reads of the whole model, in bytes; None where nothing says how many experts it has."""
        if self.token is None:
            return None
        if self.token.dense_alone:
            return self.token.dense
        if self.top_k is None:
            return None
        return self.token.dense + self.token.of_experts(self.top_k)

    @property
    def fits(self) -> bool | None:
        """Whether the layers fit into memory; None where nothing says how much there is, or where a layer has no backend."""
        if self.available is None or not all(group.choice for group in self.groups):
            return None
        return self.needed <= self.available


def inspect(path: str, loader: str = "auto", backend: str = "auto", top_k: int | None = None) -> Inspection:
    """Look at all headers. loader, backend: names, or "auto". top_k: experts of a token, by default what the checkpoint says.

    Raises CheckpointError for files that are no checkpoint, UnknownNameError for a loader or backend that does not exist.
    A layer that cannot be read is no error: it is among the refused.
    """
    with Checkpoint(path) as checkpoint:
        found = Inspection(printable(str(path)), len(checkpoint), explain(checkpoint))
        try:
            found.loader = _name(find_loader(checkpoint, loader))
            layers = find_layers(checkpoint, loader)
        except (CheckpointError, FormatError, UnavailableError) as error:
            found.why_no_loader, layers = str(error), []
        served, refused = _read(checkpoint, loader, layers)
        num_layers = model_config.value(checkpoint, "num_hidden_layers")
        found.num_layers = num_layers if type(num_layers) is int else None
        if served.keys() <= set(naming.layers(checkpoint)):  # else a plugin's loader has experts under names of its own
            found.token = token_bytes(checkpoint, found.num_layers)
    found.groups, found.refused = _grouped(served), _alike(refused)
    for group in found.groups:
        _choose(group, backend)
    _set_top_k(found, checkpoint, top_k)
    if served:
        packed = [group.packed_nbytes for group in found.groups for _ in group.layers]
        found.needed, found.staged = memory_needed(packed, [experts for _, experts in served.values()])
    found.available = memory.available_bytes()
    return found


def _name(reader: Loader) -> str:
    return next(name for name in loaders.names() if loaders.get(name) is reader)


def _read(checkpoint: Checkpoint, loader: str, layers: list[Name]) -> tuple[Served, dict[Name, str]]:
    """Layers whose headers are right, and what is said of the others, those that no loader reads among them."""
    served, refused = {}, {}
    for layer in layers:
        try:
            reader = find_loader(checkpoint, loader, layer)
            served[layer] = _name(reader), reader.load(checkpoint, layer)
        except KtmoeError as error:
            refused[layer] = str(error)
    for layer in naming.layers(checkpoint):
        if layer not in served and layer not in refused:
            refused[layer] = _why_not(checkpoint, layer)
    return served, refused


def _why_not(checkpoint: Checkpoint, layer: Name) -> str:
    findings = explain(OneLayer(checkpoint, layer))
    if findings[0].score > 0:  # another one was asked for by name
        return f"loader {findings[0].loader} reads it"
    return "; ".join(f"{finding.loader}: {finding.reason}" for finding in findings if finding.error) or "no loader reads it"


def _alike(refused: dict[Name, str]) -> list[Refused]:
    found: dict[str, Refused] = {}
    for layer, reason in refused.items():
        reason_of_all = reason  # messages name the layer's tensors: without its number they are often the same
        numbers = (f"layers.{layer}.", f"blk.{layer}.") if isinstance(layer, int) else (f"{layer}.",)
        for number in numbers:
            reason_of_all = reason_of_all.replace(number, "{L}.")
        found.setdefault(reason_of_all, Refused([], reason)).layers.append(layer)
    return list(found.values())


def _grouped(served: Served) -> list[LayerGroup]:
    groups: list[tuple[tuple[object, ...], LayerGroup]] = []
    for layer, (loader, experts) in served.items():
        kind = _kind(loader, experts)
        for of_group, group in groups:
            if of_group == kind:
                group.layers.append(layer)
                break
        else:
            groups.append((kind, LayerGroup([layer], loader, experts)))
    return [group for _, group in groups]


def _kind(loader: str, experts: ExpertWeights) -> tuple[object, ...]:
    """What layers have alike that are in one group."""
    formats = [experts.formats[projection] for projection in PROJECTIONS]
    sizes = experts.num_experts, experts.hidden, experts.intermediate
    return loader, *sizes, experts.activation, experts.router_weight, formats


def _choose(group: LayerGroup, backend: str) -> None:
    try:
        group.choice = choose_backend(backend, group.experts)
    except UnavailableError as error:
        group.why_not = str(error)
    else:
        chosen = backends.get(group.choice.name)
        group.packed_nbytes = chosen.packed_nbytes(group.experts, placement_of(group.experts))


def _set_top_k(found: Inspection, checkpoint: Checkpoint, top_k: int | None) -> None:
    routed = found.token.routed.values() if found.token else ()
    counts = [group.experts.num_experts for group in found.groups] or [layer.num_experts for layer in routed]
    if found.token and found.token.dense_alone:
        return
    if not counts:
        found.why_no_top_k = "no header of routed experts can be read"
        return
    try:
        found.top_k = top_k_of(checkpoint, min(counts), top_k)
    except CheckpointError as error:
        found.why_no_top_k = str(error)


def top_k_of(checkpoint: Checkpoint, num_experts: int, asked: int | None = None) -> int:
    """Experts of a token, at most all: as many as asked, or as the checkpoint says.

    Raises CheckpointError if that does not say, or something impossible.
    """
    if asked is not None:
        return min(asked, num_experts)
    for key in TOP_K_KEYS:
        stated = model_config.value(checkpoint, key)
        if type(stated) is int and 1 <= stated <= num_experts:
            return stated
        if stated is not None:
            place, expected = model_config.place(checkpoint, key), f"a whole number from 1 to {num_experts}"
            raise CheckpointError(f"{checkpoint.path}: {place}: expected {expected}, found {show(stated)}")
    place = model_config.place(checkpoint, TOP_K_KEYS[0])
    raise CheckpointError(f"{checkpoint.path}: expected {place}, which says how many experts a token has, found none")
