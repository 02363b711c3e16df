"""CPUs to predict for: what cpus.toml says of them, as the cost model's machines."""

from __future__ import annotations

import math
import tomllib
from dataclasses import MISSING, dataclass, fields
from pathlib import Path

from bench.cost_model import Machine

FILE = Path(__file__).with_name("cpus.toml")


@dataclass(frozen=True)
class Cores:
    """Cores of one kind. flops_per_cycle: of the multiply instruction of the CPU's backend."""

    count: int
    ghz: float
    flops_per_cycle: int


@dataclass(frozen=True)
class Cpu:
    """A CPU from its maker's specification; see cpus.toml."""

    backend: str
    cores: tuple[Cores, ...]
    channels: int
    mega_transfers: int
    memory_gb: int
    source: str
    sockets: int = 1
    link_gb_s: float = math.inf
    read_limit_gb_s: float = math.inf

    def machine(self, sustained: float, call: float, call_per_thread: float) -> Machine:
        """sustained: the share of the nominal bandwidth that reading reaches. All sockets together."""
        read = min(self.channels * self.mega_transfers * 8e6 * sustained, self.read_limit_gb_s * 1e9)
        count = sum(kind.count for kind in self.cores)
        return Machine(
            threads=self.sockets * count,
            read=self.sockets * read,
            peak=self.sockets * sum(kind.count * kind.ghz * 1e9 * kind.flops_per_cycle for kind in self.cores),
            hertz=sum(kind.count * kind.ghz * 1e9 for kind in self.cores) / count,
            call=call + call_per_thread * self.sockets * count,
            nodes=self.sockets,
            link=self.link_gb_s * 1e9,
        )


def cpus(path: Path = FILE) -> dict[str, Cpu]:
    """By name, in the file's order. Raises ValueError, which names the CPU, for fields that are wrong."""
    found = {}
    for name, table in tomllib.loads(path.read_text()).items():
        where = f"{path.name} [{name}]"
        kinds = tuple(_record(Cores, f"{where} cores", kind) for kind in table.get("cores", ()))
        found[name] = _record(Cpu, where, table | ({"cores": kinds} if kinds else {}))
    return found


def _record(kind: type, where: str, table: dict):
    known = {field.name: field.default is MISSING for field in fields(kind)}
    unknown = sorted(set(table) - set(known))
    missing = sorted(name for name, required in known.items() if required and name not in table)
    if unknown or missing:
        raise ValueError(f"{where}: unknown fields {unknown}, missing fields {missing}; expected are {', '.join(known)}")
    for name, value in table.items():
        if isinstance(value, int | float) and not value > 0:
            raise ValueError(f"{where}: {name}: expected more than 0, found {value!r}")
    return kind(**table)
