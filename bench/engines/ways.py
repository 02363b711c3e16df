"""Ways to generate text with the same model: what computes the experts, and from which weights."""

from __future__ import annotations

from dataclasses import dataclass, field

from bench.engines.shapes import Engine

#: torch's idle threads spin for milliseconds after each of its operations, on the CPUs of ktmoe's. With this they sleep.
PASSIVE = {"OMP_WAIT_POLICY": "passive"}


@dataclass(frozen=True)
class Process:
    """One process and the ways that it measures, one after the other, on one copy of the weights.

    owner: "ktmoe" or "transformers". weights: "MXFP4" or "BF16". implementations: names of transformers, each of which is
    a way. environment: of the process. note: told apart by it.
    """

    owner: str
    weights: str
    implementations: tuple[str, ...] = ("ktmoe",)
    environment: dict[str, str] = field(default_factory=dict)
    note: str = ""

    @property
    def name(self) -> str:
        return f"{self.owner} {self.weights}" + (f", {self.note}" if self.note else "")

    @property
    def ways(self) -> dict[str, str]:
        """{name of a way: transformers' name of the implementation}."""
        if self.owner == "ktmoe":
            return {self.name: "ktmoe"}
        return {f"{self.owner} {name}, {self.weights}": name for name in self.implementations}

    def nbytes(self, engine: Engine, layers: int) -> int:
        """Memory that it takes at most, about."""
        packing = engine.layer_bytes(self.weights) if (self.owner, self.weights) == ("ktmoe", "BF16") else 0
        return engine.process_bytes(self.weights, layers) + packing


OURS = Process("ktmoe", "MXFP4", environment=PASSIVE)
THEIRS = Process("transformers", "BF16", ("eager", "grouped_mm"))
SPINNING = Process("ktmoe", "MXFP4", note="torch's threads spin")
#: What takes part beside transformers' own experts where the memory is enough for a layer of it, too.
OTHERS = (Process("ktmoe", "BF16", environment=PASSIVE),)
#: How each comparison is called, and who must take part.
COMPARISONS = {"beside": (OURS, THEIRS), "alone": (OURS,), "threads": (OURS, SPINNING)}


def layers_that_fit(engine: Engine, processes: tuple[Process, ...], nbytes: int) -> int:
    """How many layers all of these processes can have at once; 0 if not even one."""
    layers = 0
    while layers < engine.experts.layers and sum(p.nbytes(engine, layers + 1) for p in processes) <= nbytes:
        layers += 1
    return layers


def who_fits(engine: Engine, comparison: str, nbytes: int, layers: int | None = None) -> tuple[tuple[Process, ...], int]:
    """The processes that take part, and with how many layers. layers: so many, if they fit.

    Raises ValueError if those who must take part do not fit.
    """
    must = COMPARISONS[comparison]
    if (most := layers_that_fit(engine, must, nbytes)) < (layers or 1):
        needed = sum(process.nbytes(engine, layers or 1) for process in must)
        raise ValueError(
            f"{engine.name}, {layers or 1} layers: expected {needed / 1e9:.1f} GB of memory for {comparison}, "
            f"found {nbytes / 1e9:.1f} GB"
        )
    taking_part = must
    for other in OTHERS if comparison == "beside" else ():
        if (fitting := layers_that_fit(engine, (*taking_part, other), nbytes)) >= (layers or 1):
            taking_part, most = (*taking_part, other), fitting
    return taking_part, layers or most
