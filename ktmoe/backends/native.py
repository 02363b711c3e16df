"""NativeBackend: what the backends built on kernel tables share. A backend of this kind is data: {mode: instruction sets}."""

from __future__ import annotations

import errno
import os
from collections import deque
from collections.abc import Callable, Generator, Iterable, Mapping
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import closing, suppress
from typing import TypeVar, cast

from ktmoe._native import core
from ktmoe._native import isa as instruction_sets
from ktmoe._native.isa import required_features
from ktmoe.backends.base import Arenas, Backend, Found, Missing, Packed, PackedMatrix, Plan, Progress, mode_by, select
from ktmoe.errors import InputError, UnavailableError, memory_for, thread_for
from ktmoe.experts import ExpertWeights
from ktmoe.linear_weights import LinearWeights
from ktmoe.machine import memory, numa, threads
from ktmoe.machine.numa import UNBOUND, Placement
from ktmoe.matrix import Matrix
from ktmoe.messages import show
from ktmoe.modes import MODES, mode_of
from ktmoe.weight_spec import WeightSpec
from ktmoe.weights.formats import WeightFormat

P = TypeVar("P", bound=core.PackedLayer | core.PackedLinear)

#: Why the operating system refused an ISA what it has to be asked for. It is not asked again.
_refused: dict[str, str] = {}

#: The form that says where a backend can run, and how fast it is beside others: the exact one, which every backend has.
_EXACT = "bf16"

Packed.register(core.PackedLayer)  # it has all of the methods, and cannot inherit, since Cython made it
PackedMatrix.register(core.PackedLinear)

#: Experts that are read ahead while one is packed: what bounds the staging memory.
READ_AHEAD = 3


def missing_features(isa: str) -> list[str]:
    """CPU features that a row of isa.py needs and this CPU lacks."""
    return _absent(required_features(isa))


def require(isa: str, *features: str) -> None:
    """Raise UnavailableError, which names them, if this CPU lacks features that an ISA needs: for a `load` of a plugin."""
    if missing := _absent(features):
        raise UnavailableError(_lacks(missing, isa))


def refusal(isa: str) -> str | None:
    """Ask the operating system for what an ISA needs of it; why it refused, or None."""
    tiles = isa in instruction_sets.ISAS and "amx_tile" in required_features(isa)
    error = core.permit_tiles() if tiles else 0
    if not error:
        return None
    why = "a thread's alternate signal stack is too small for them" if error == errno.ENOSPC else os.strerror(error)
    return f"the operating system refused AMX's tiles: {why} (needed by {isa})"


def load_table(isa: str) -> core.KernelTable:
    """The kernel table of a row of isa.py. Raises UnavailableError if the compiler that built this package did not know it."""
    return core.kernel_table(isa)


def load_built_in(isa: str) -> core.KernelTable:
    """load_table(), on a CPU that can run it. Raises UnavailableError on another one."""
    if missing := missing_features(isa):
        raise UnavailableError(_lacks(missing, isa))
    return load_table(isa)


class NativeBackend(Backend):
    """isas: {form of rows: the ISAs that have kernels for it, best first}. Each form is the activation mode of its name, in
    the order in which "auto" prefers them. MX modes follow: a form serves those whose numbers it holds exactly.

    Each form is served by the first of its ISAs that the CPU and the build have, and that has kernels for the weights.
    The backend can run where an ISA of its form "bf16" can; its rank is that of the first of these.
    load: gives an ISA's kernel table; it raises UnavailableError, which says why, where the ISA cannot run.
    rank: for ISAs that isa.py does not know. forms: that are tried before "bf16" where a mode has several.
    Raises InputError if there is no form "bf16".
    """

    def __init__(
        self,
        isas: Mapping[str, tuple[str, ...]],
        load: Callable[[str], core.KernelTable] = load_built_in,
        rank: int | None = None,
        forms: tuple[str, ...] = (),
    ):
        if not isas.get(_EXACT):
            raise InputError(f"isas must name instruction sets for the form {_EXACT!r}, found {show(isas)}")
        self.isas = isas
        self.forms = forms
        self.load = load
        self._rank = rank

    @property
    def modes(self) -> tuple[str, ...]:  # type: ignore[override]  # nobody sets it
        return tuple(dict.fromkeys((*self.isas, *(mode for mode in MODES if mode_of(mode).x))))

    @property
    def rank(self) -> int:  # type: ignore[override]  # nobody sets it
        """The rank of the best ISA that the backend can use here; if it can use none, of its best one."""
        if self._rank is not None:
            return self._rank
        names = [table.name for table in self._tables(_EXACT)[0]] or [*self.isas[_EXACT]]
        known = [name for name in names[:1] if name in instruction_sets.ISAS]
        return instruction_sets.rank(known[0], core.cpu_features()) if known else 0

    def lookup(self, experts: WeightSpec | None = None, activations: str = "auto") -> Found | Missing:
        usable, reasons = self._tables(_EXACT)
        if not usable:
            return Missing("; ".join(reasons))
        formats = [] if experts is None else list(experts.formats.values())
        served, why_not = {}, None
        for form in self.isas:
            usable, reasons = self._tables(form)
            if form == activations:
                why_not = "" if usable else "; ".join(reasons)
            fitting = (table for table in usable if all(table.serves(weight_format, form) for weight_format in formats))
            if table := next(fitting, None):
                served[form] = table
        if not served:
            return Missing(_refusal_of(formats, self._tables(_EXACT)[0]))
        asked = () if activations == "auto" else (mode_by(activations)[0].name,)
        found = {}
        for mode in dict.fromkeys((*self.modes, *asked)):
            able = mode_by(mode)[0].forms
            fitting_form = next((form for form in (*self.forms, able[0]) if form in able and form in served), None)
            if fitting_form:
                found[mode] = Found(mode, served[fitting_form], fitting_form)
        return select(found, experts, activations, why_not)

    def claim(self, experts: WeightSpec | None = None, activations: str = "auto") -> Found | Missing:
        """lookup(), and asks for the ISA that it found. If that is refused, the next one has its turn."""
        found = self.lookup(experts, activations)
        while isinstance(found, Found) and found.table and (reason := refusal(found.table.name)):
            _refused[found.table.name] = reason
            found = self.lookup(experts, activations)
        return found

    def _tables(self, form: str) -> tuple[list[core.KernelTable], list[str]]:
        """The kernel tables that can serve a form of rows here, best first, and why its other ISAs cannot."""
        tables, reasons = [], []
        for isa in self.isas.get(form, ()):
            try:
                table = self.load(isa)
            except UnavailableError as error:
                reasons.append(str(error))
                continue
            if table.name in _refused:
                reasons.append(_refused[table.name])
            else:
                tables.append(table)
        return tables, reasons

    linear = True

    def pack_linear(self, weights: LinearWeights, plan: Plan, progress: Progress | None = None) -> core.PackedLinear:
        return self._pack(core.PackedLinear, weights, weights.staged_nbytes, plan, progress)  # a matrix may be large

    def map_linear(self, weights: LinearWeights, plan: Plan, arenas: Arenas) -> core.PackedLinear:
        return self._map(core.PackedLinear, weights, plan, arenas)

    def pack(self, experts: ExpertWeights, plan: Plan, progress: Progress | None = None) -> core.PackedLayer:
        return self._pack(core.PackedLayer, experts, 0, plan, progress)

    def map(self, experts: ExpertWeights, plan: Plan, arenas: Arenas) -> core.PackedLayer:
        return self._map(core.PackedLayer, experts, plan, arenas)

    def _pack(
        self, kind: type[P], experts: ExpertWeights | LinearWeights, staged: int, plan: Plan, progress: Progress | None
    ) -> P:
        """staged: bytes that packing takes beside the packed ones."""
        found = self._found_for(experts, plan)
        memory.require(self.packed_nbytes(experts, plan.placement) + staged, f"{experts.name}: packing {experts.amount}")
        packed = _layer(kind, found, experts, plan)
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

    def pack_each(
        self, experts: ExpertWeights | LinearWeights, plan: Plan
    ) -> Generator[core.PackedLayer | core.PackedLinear, None, None]:
        """Yield a layer of one expert for each expert in turn, packed as pack() packs it; the next one takes its place.
        Of a dense matrix, yield it.

        Memory is needed for two packed experts and for what is read ahead.
        """
        kind: type[core.PackedLayer | core.PackedLinear]
        kind = core.PackedLinear if isinstance(experts, LinearWeights) else core.PackedLayer
        one = _layer(kind, self._found_for(experts, plan), experts.take([0]), plan)
        try:
            with closing(_read_ahead(experts)) as read:
                for matrices in read:
                    one.pack(0, matrices)
                    del matrices  # a dense matrix may be large
                    yield one
        finally:
            one.close()

    def _map(self, kind: type[P], experts: WeightSpec, plan: Plan, arenas: Arenas) -> P:
        packed = _layer(kind, self._found_for(experts, plan), experts, plan, arenas.file)
        try:
            core.adopt(packed, arenas.seen, arenas.biases, arenas.factors)
        except BaseException:
            packed.close()
            raise
        return packed

    def _found_for(self, experts: WeightSpec, plan: Plan) -> Found:
        """How to compute these experts, after the pool was made ready for it. Raises UnavailableError."""
        found = self.claim(experts, plan.activations)  # whoever calls this may not have chosen
        if isinstance(found, Missing):
            raise UnavailableError(found.reason)
        threads.configure()
        threads.register_with_threadpoolctl()
        return found

    def packed_nbytes(self, experts: WeightSpec, placement: Placement = UNBOUND) -> int:
        return experts.num_experts * core.expert_nbytes(experts, _shards(experts, placement))


def _layer(kind: type[P], found: Found, experts: WeightSpec, plan: Plan, file: core.ArenaFile | None = None) -> P:
    """The layer before packing: nothing is packed, or all is in the file."""
    shards, workers = _shards(experts, plan.placement), threads.threads_of(plan.placement)
    x, h = mode_by(found.activations)[0].block_rules()
    table = cast("core.KernelTable", found.table)  # which all that lookup() finds here has
    return kind(table, experts, plan, shards, workers, file, found.form, x, h)


def _refusal_of(formats: Iterable[WeightFormat], tables: list[core.KernelTable]) -> str:
    """What of which format these kernel tables lack, and the rows of isa.py that serve it."""
    for weight_format in formats:
        lacking = {table.name: what for table in tables if (what := table.lacks(weight_format, _EXACT))}
        if len(lacking) < len(tables):
            continue
        others = []
        for isa in instruction_sets.ISAS:
            with suppress(UnavailableError):
                if load_table(isa).serves(weight_format, _EXACT):
                    others.append(isa)
        missing = ", ".join(dict.fromkeys(lacking.values()))
        has_it = f"instruction sets that have them are {', '.join(others)}" if others else "no instruction set has them"
        return f"it has no kernels for {weight_format.description}: {missing}; {has_it}"
    return f"it has no instruction set for {' and '.join(sorted({f.description for f in formats}))} together"


def _shards(experts: WeightSpec, placement: Placement) -> list[tuple[int, int]]:
    """[(first, last)]: the columns of the intermediate dimension that each shard has."""
    return numa.split(experts.intermediate, experts.shard_unit, placement.shards)


def _read_ahead(experts: ExpertWeights | LinearWeights) -> Generator[dict[str, Matrix], None, None]:
    """Yields {projection: Matrix} by expert, reading the next ones while the caller packs."""

    def read(expert: int) -> dict[str, Matrix]:
        with memory_for(f"{experts.name}: reading {experts.one(expert)}"):
            return {projection: experts.matrix(expert, projection) for projection in experts.projections}

    with ThreadPoolExecutor(READ_AHEAD, "ktmoe-read", numa.unpin) as pool:
        pending: deque[Future[dict[str, Matrix]]] = deque()
        try:
            for expert in range(experts.num_experts):
                with thread_for(f"{experts.name}: starting a thread to read {experts.one(expert)}"):
                    pending.append(pool.submit(read, expert))
                if len(pending) > READ_AHEAD:
                    yield pending.popleft().result()
            while pending:
                yield pending.popleft().result()
        finally:
            pending.clear()  # an exception's traceback would keep what was read
            pool.shutdown(cancel_futures=True)


def _absent(features: Iterable[str]) -> list[str]:
    present = core.cpu_features()
    return [feature for feature in features if not present.get(feature)]


def _lacks(features: list[str], isa: str) -> str:
    return f"this CPU lacks {' '.join(features)} (needed by {isa})"
