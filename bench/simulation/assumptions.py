"""What the simulated machines are assumed to be, beside what was measured: docs/simulation.md shows it as a table."""

from __future__ import annotations

from dataclasses import dataclass

from ktmoe._native import core


@dataclass(frozen=True)
class Machine:
    """A machine that is made up: CPU cores in L3 domains on nodes, and memory whose bandwidth the nodes share equally.

    bandwidth: bytes per second of all nodes together. near, far: seconds in which a thread sees what one with the same L3, or
    with another one, wrote. sharpness: how well reading and computing overlap; see memory.py. add: seconds to add up a row of a
    panel. jitter: by how much workers' speeds deviate (a standard deviation), drawn with a seed.
    """

    nodes: int
    threads: int
    bandwidth: float
    cores: int = 128
    domain_cores: int = 8
    domain_bytes: int = 32 << 20
    near: float = 0.03e-6
    far: float = 0.2e-6
    add: float = 10e-9
    sharpness: float = 4.0
    jitter: float = 0.0

    def __post_init__(self):
        if self.nodes < 1 or self.cores % (self.nodes * self.domain_cores):
            raise ValueError(
                f"nodes: expected equal numbers of L3 domains of {self.domain_cores} cores, found {self.nodes} nodes"
            )
        if not 1 <= self.threads <= self.cores:
            raise ValueError(f"threads: expected 1 to {self.cores}, one for each core, found {self.threads}")

    @property
    def teams(self) -> core.Teams:
        domains = self.cores // self.domain_cores // self.nodes
        return core.Teams([[self.domain_cores] * domains] * self.nodes, self.threads)

    @property
    def node_bandwidth(self) -> float:
        return self.bandwidth / self.nodes
