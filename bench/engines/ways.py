"""Ways to generate text with the same model: what computes it, and from which weights."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

from bench.engines import published_gguf
from bench.engines.shapes import PROCESS_BYTES, Engine

#: torch's idle threads spin for milliseconds after each of its operations, on the CPUs of ktmoe's. With this they sleep.
PASSIVE = {"OMP_WAIT_POLICY": "passive"}


@dataclass(frozen=True)
class Process:
    """One process and the ways that it measures, one after the other, on one copy of the weights.

    owner: "ktmoe", "transformers" or "llama.cpp". weights: of experts, "MXFP4" or "BF16"; "GGUF": all of a file's.
    implementations: names of transformers, each of which is a way. environment: of the process. note: told apart by it. dense:
    how matrices besides the experts' are held, as load() has it, or a GGUF file's format; None: what the owner does by itself.
    """

    owner: str
    weights: str
    implementations: tuple[str, ...] = ("ktmoe",)
    environment: dict[str, str] = field(default_factory=dict)
    note: str = ""
    dense: str | None = None

    @property
    def name(self) -> str:
        more = (self.note, f"dense {self.dense}" if self.dense else "")
        return ", ".join((f"{self.owner} {self.weights}", *filter(None, more)))

    @property
    def ways(self) -> dict[str, str]:
        """{name of a way: transformers' name of the implementation, or the owner}."""
        if self.owner != "transformers":
            return {self.name: self.owner}
        return {f"{self.owner} {name}, {self.weights}": name for name in self.implementations}

    def nbytes(self, engine: Engine, layers: int) -> int:
        """Memory that it takes at most, about."""
        if self.weights == "GGUF":
            return PROCESS_BYTES + published_gguf.nbytes(engine, layers)
        packing = engine.layer_bytes(self.weights) if (self.owner, self.weights) == ("ktmoe", "BF16") else 0
        return engine.process_bytes(self.weights, layers) + packing


OURS = Process("ktmoe", "MXFP4", environment=PASSIVE)
THEIRS = Process("transformers", "BF16", ("eager", "grouped_mm"))
SPINNING = Process("ktmoe", "MXFP4", note="torch's threads spin")
#: What takes part beside transformers' own experts where the memory is enough for a layer of it, too.
OTHERS = (Process("ktmoe", "BF16", environment=PASSIVE),)
#: The whole model: the dense matrices as ktmoe can hold them, and llama.cpp on the same numbers. The first is the judge.
PACKED, INT8, TORCH = (Process("ktmoe", "MXFP4", environment=PASSIVE, dense=dense) for dense in ("packed", "int8", "torch"))
LLAMA_BF16, LLAMA_Q8_0 = (Process("llama.cpp", "MXFP4", dense=dense) for dense in ("BF16", "Q8_0"))
WHOLE = (PACKED, LLAMA_BF16, INT8, LLAMA_Q8_0, TORCH)
#: One GGUF file by both. The first is the judge.
OURS_GGUF, LLAMA_GGUF = Process("ktmoe", "GGUF", environment=PASSIVE), Process("llama.cpp", "GGUF")
#: Whose time is compared with whose: llama.cpp's where it reads the same bytes.
SAME_BYTES = {PACKED.name: LLAMA_BF16.name, INT8.name: LLAMA_Q8_0.name, TORCH.name: LLAMA_BF16.name}
SAME_BYTES |= {OURS_GGUF.name: LLAMA_GGUF.name}
#: Comparisons of whole models, which whole.py makes: those of experts in MXFP4, and that of a GGUF file.
OF_MXFP4, OF_GGUF = ("whole", "contexts"), "gguf"
OF_WHOLE = (*OF_MXFP4, OF_GGUF)
#: The time to the first token, which cold.py measures, of one process after the other.
COLD = "cold"
#: Comparisons of the experts' implementations, which session.py makes.
OF_EXPERTS = ("beside", "alone", "threads")
#: How each comparison is called, and who must take part.
COMPARISONS = {
    **dict.fromkeys(OF_MXFP4, WHOLE),
    OF_GGUF: (OURS_GGUF, LLAMA_GGUF),
    COLD: (OURS_GGUF,),
    **dict(zip(OF_EXPERTS, ((OURS, THEIRS), (OURS,), (OURS, SPINNING)), strict=True)),
}


def must_take_part(engine: Engine, comparison: str, dense: Sequence[str] | None = None) -> tuple[Process, ...]:
    """llama.cpp only with models that the bench writes as GGUF. dense: of "whole" and "contexts", those alone; None: all."""
    named = [process for process in COMPARISONS[comparison] if dense is None or process.dense in (None, *dense)]
    return tuple(process for process in named if process.owner != "llama.cpp" or engine.as_gguf)


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
    must = must_take_part(engine, comparison)
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


def whole_fits(
    engine: Engine, comparison: str, nbytes: int, layers: int | None = None, dense: Sequence[str] | None = None
) -> tuple[tuple[Process, ...], int, bool]:
    """The same of the whole model, and whether the processes can have their turns in the same rounds. dense: as above.

    With more layers than fit beside each other, one process follows the other. Raises ValueError if one alone does not fit.
    """
    must = must_take_part(engine, comparison, dense)
    most = layers_that_fit(engine, must, nbytes)
    wanted = layers or max(most, 1)
    needed = max(process.nbytes(engine, wanted) for process in must)
    if needed > nbytes:
        raise ValueError(
            f"{engine.name}, {wanted} layers: expected {needed / 1e9:.1f} GB of memory for {comparison}, one process after the "
            f"other, found {nbytes / 1e9:.1f} GB"
        )
    return must, wanted, wanted <= most
