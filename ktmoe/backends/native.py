"""NativeBackend: what the backends built on kernel tables share. A backend of this kind is an ordered list of ISAs."""

from __future__ import annotations

import errno
import os
from collections import deque
from collections.abc import Mapping
from concurrent.futures import ThreadPoolExecutor
from contextlib import closing
from types import MappingProxyType

from ktmoe._native import core
from ktmoe._native import isa as instruction_sets
from ktmoe._native.isa import required_features
from ktmoe.backends.base import Backend, Plan, Progress
from ktmoe.errors import UnavailableError, memory_for, thread_for
from ktmoe.experts import PROJECTIONS, ExpertWeights
from ktmoe.machine import memory, numa, threads
from ktmoe.machine.numa import UNBOUND, Placement

#: Why the operating system refused an ISA what it has to be asked for: the process was told, and does not ask again.
_refused: dict[str, str] = {}

#: Experts that are read ahead while one is packed: what bounds the staging memory.
READ_AHEAD = 3


def missing_features(isa: str) -> list[str]:
    """CPU features that an ISA needs and this CPU lacks."""
    present = core.cpu_features()
    return [feature for feature in required_features(isa) if not present.get(feature)]


def refusal(isa: str) -> str | None:
    """Ask the operating system for what an ISA needs of it; why it refused, or None."""
    row = instruction_sets.ISAS.get(isa)
    error = core.permit_tiles() if row and row.tiles else 0
    if not error:
        return None
    why = "a thread's alternate signal stack is too small for them" if error == errno.ENOSPC else os.strerror(error)
    return f"the operating system refused AMX's tiles: {why} (needed by {isa})"


def load_table(isa: str) -> core.KernelTable:
    """An ISA's kernel table. Raises UnavailableError if the compiler that built this package did not know it."""
    return core.kernel_table(isa)


class NativeBackend(Backend):
    """isas: the ISAs it may use, best first; the first that is compiled, that the CPU has and that knows the format is used.

    activations: the modes that it offers, its own choice first, where a table has kernels for them.
    also: {mode: ISAs that serve it instead, best first}. What the backend is otherwise, its rank and whether it is available,
    goes by isas alone.
    A backend outside ktmoe has ISAs of its own names: it sets rank, and overrides missing() and load(), which know isa.py's.
    """

    isas: tuple[str, ...] = ()
    also: Mapping[str, tuple[str, ...]] = MappingProxyType({})

    @property
    def rank(self) -> int:
        """That of the best ISA that it can use here; of the best at all if there is none."""
        names = [table.name for table in self.usable()[0]] or [*self.isas]
        known = [name for name in names[:1] if name in instruction_sets.ISAS]
        return instruction_sets.rank(known[0], core.cpu_features()) if known else 0

    def missing(self, isa: str) -> list[str]:
        """CPU features that one of its ISAs needs and this CPU lacks."""
        return missing_features(isa)

    def load(self, isa: str) -> core.KernelTable:
        """The kernel table of one of its ISAs. Raises UnavailableError if this build does not have it."""
        return load_table(isa)

    def usable(self, activations: str | None = None) -> tuple[list[core.KernelTable], list[str]]:
        """The kernel tables that can run here, best first, and why the other ISAs cannot. activations: for that mode."""
        tables, reasons = [], []
        for isa in self.also.get(activations, self.isas):
            missing = self.missing(isa)
            if isa in _refused:
                reasons.append(_refused[isa])
                continue
            if missing:
                reasons.append(f"this CPU lacks {' '.join(missing)} (needed by {isa})")
                continue
            try:
                tables.append(self.load(isa))
            except UnavailableError as error:
                reasons.append(str(error))
        return tables, reasons

    def unavailable(self) -> str | None:
        tables, reasons = self.usable()
        return None if tables else "; ".join(reasons)

    def admit(self, activations: str = "auto") -> str | None:
        """Asks for all ISAs that may serve the mode; one that is refused is not asked for again, and the next has its turn."""
        for table in self.usable(activations)[0]:
            if reason := refusal(table.name):
                _refused[table.name] = reason
        return self.unavailable()

    def unsupported(self, experts: ExpertWeights) -> str | None:
        if self.modes(experts):
            return None
        formats = sorted({weight_format.description for weight_format in experts.formats.values()})
        return f"it has no kernels for {', '.join(formats)}"

    def details(self) -> dict:
        tables = self.usable(self.activations[0])[0] or self.usable()[0]
        return {"isa": tables[0].name, "note": f", kernels of {tables[0].name}"} if tables else {"isa": None, "note": ""}

    def modes(self, experts: ExpertWeights) -> list[str]:
        return [mode for mode in self.activations if any(_serves(table, experts, mode) for table in self.usable(mode)[0])]

    def lacks(self, activations: str) -> str | None:
        tables, reasons = self.usable(activations)
        return None if tables or activations not in self.also else "; ".join(reasons)

    def table(self, experts: ExpertWeights, activations: str = "auto") -> core.KernelTable:
        """The kernel table that serves these weights here. Raises UnavailableError if none does."""
        modes = self.modes(experts) if activations == "auto" else [activations]
        for mode in modes[:1]:
            for table in self.usable(mode)[0]:
                if _serves(table, experts, mode):
                    return table
        raise UnavailableError(self.unavailable() or self.unsupported(experts) or f"it has no activation mode {activations!r}")

    def pack(self, experts: ExpertWeights, plan: Plan, progress: Progress | None = None) -> core.PackedLayer:
        if reason := self.admit(plan.activations):  # whoever calls this may not have chosen
            raise UnavailableError(reason)
        threads.configure()
        threads.register_with_threadpoolctl()
        memory.require(self.packed_nbytes(experts, plan.placement), f"{experts.name}: packing {experts.num_experts} experts")
        table = self.table(experts, plan.activations)
        packed = core.PackedLayer(table, experts, plan, _spans(experts, plan.placement), threads.threads_of(plan.placement))
        expert_bytes = experts.nbytes // experts.num_experts
        try:
            with closing(_read_ahead(experts)) as read:
                for expert, matrices in enumerate(read):
                    packed.pack(expert, matrices)
                    if progress:
                        progress((expert + 1) * expert_bytes, experts.nbytes)
        except BaseException:
            packed.close()  # its traceback would keep it
            raise
        return packed

    def packed_nbytes(self, experts: ExpertWeights, placement: Placement = UNBOUND) -> int:
        return experts.num_experts * core.expert_nbytes(experts, _spans(experts, placement))


def _spans(experts: ExpertWeights, placement: Placement) -> list[tuple[int, int]]:
    """What each shard has of the intermediate dimension."""
    return numa.split(experts.intermediate, experts.shard_unit, placement.shards)


def _read_ahead(experts: ExpertWeights):
    """Yields {projection: Matrix} by expert, reading the next ones while the caller packs."""

    def read(expert):
        with memory_for(f"{experts.name}: reading expert {expert}"):
            return {projection: experts.matrix(expert, projection) for projection in PROJECTIONS}

    with ThreadPoolExecutor(READ_AHEAD, "ktmoe-read", numa.unpin) as pool:
        pending = deque()
        try:
            for expert in range(experts.num_experts):
                with thread_for(f"{experts.name}: starting a thread to read expert {expert}"):
                    pending.append(pool.submit(read, expert))
                if len(pending) > READ_AHEAD:
                    yield pending.popleft().result()
            while pending:
                yield pending.popleft().result()
        finally:
            pending.clear()  # an exception's traceback would keep what was read
            pool.shutdown(cancel_futures=True)


def _serves(table: core.KernelTable, experts: ExpertWeights, activations: str) -> bool:
    return all(table.serves(weight_format, activations) for weight_format in experts.formats.values())
