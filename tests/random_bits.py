"""What random layers give, as digests of bits: in this process, or in another one, which computes the same cases another way.

Run as a program, it is the other process: it reads requests from its input, a JSON text a line, and answers each with a line.
"""

from __future__ import annotations

import contextlib
import hashlib
import json
import os
import subprocess
import sys
from dataclasses import asdict, dataclass
from pathlib import Path

import numpy as np
import ways
from helpers import BF16, unaligned
from random_layers import one_of, random_layer, random_threads, random_tokens, random_tuning

from ktmoe import MoELayer, set_num_threads
from ktmoe._native import core
from ktmoe.machine import numa, topology

#: Cases that have a layer in common, which is packed once.
AT_ONCE = 20
#: What the other process has in its environment: memory that is freed, or never written, holds this byte.
ELSEWHERE = {"MALLOC_PERTURB_": "165", "MALLOC_ARENA_MAX": "1", "MALLOC_MMAP_THRESHOLD_": "4096"}


@dataclass(frozen=True)
class Cases:
    """Of one subject of ways.SUBJECTS, one family of formats and one mode: a layer's, AT_ONCE or fewer."""

    subject: str
    family: str
    mode: str
    number: int
    count: int

    def layer(self):
        """It, and the generator of its batches."""
        rng = np.random.default_rng((self.number, *f"{self.family} {self.mode}".encode()))
        integers = ways.SUBJECTS[self.subject].activations != "bf16"
        return random_layer(rng, self.family, integers, self.mode), rng

    def batches(self, layer, rng):
        """x, ids, router weights and the mask of each case."""
        for _ in range(self.count):
            tokens = 1 if rng.integers(4) == 0 else int(rng.integers(1, 25))
            batch = random_tokens(rng, layer, tokens, np.float32 if rng.integers(3) else BF16)
            yield batch, rng.integers(4, size=layer.experts.num_experts) > 0


def digest(y: np.ndarray) -> str:
    return hashlib.blake2b(np.ascontiguousarray(y).view(np.uint8), digest_size=8).hexdigest()


def here(cases: Cases, backend: str, check) -> list[str]:
    """The digests of cases, each batch computed at once. check(layer, batch, y): called for the last one."""
    made, rng = cases.layer()
    digests, how = [], np.random.default_rng((cases.number, 1))
    with made.made(backend) as layer:
        set_num_threads(random_threads(how))
        for batch, mask in cases.batches(made, rng):
            core.tune(**random_tuning(how))
            layer.expert_mask[:] = mask
            y = layer.forward(*batch)
            digests.append(digest(y))
        check(layer, batch, y)
    return digests


def in_pieces(layer: MoELayer, batch, rng) -> np.ndarray:
    """y of a batch whose tokens come in another order and in several calls, from arrays that begin elsewhere."""
    x, ids, weights = batch
    y, order = np.empty_like(x), rng.permutation(len(x))
    for tokens in np.array_split(order, rng.integers(1, 4)):
        core.tune(**random_tuning(rng))
        room = np.empty((len(tokens) + 1, layer.hidden), x.dtype)
        out = room[1:] if rng.integers(2) else room[:-1]
        y[tokens] = layer.forward(*(shifted(of[tokens], rng) for of in (x, ids, weights)), out=out)
    return y


def shifted(array: np.ndarray, rng) -> np.ndarray:
    """The same numbers at another place in a page; not even aligned, now and then."""
    if rng.integers(4) == 0:
        return unaligned(array)
    memory = np.empty(array.nbytes + 4096, np.uint8)
    first = int(rng.integers(0, 4096 // 8)) * 8 + (-memory.ctypes.data) % 8
    moved = memory[first : first + array.nbytes].view(array.dtype).reshape(array.shape)
    moved[...] = array
    return moved


def elsewhere(cases: Cases, backend: str) -> list[str]:
    """The digests of the same cases, computed another way: in_pieces(), the last case first, on other nodes, between calls
    of another layer."""
    made, rng = cases.layer()
    batches, how = list(cases.batches(made, rng)), np.random.default_rng((cases.number, 2))
    nodes = made.settings["numa_nodes"]
    other = [int(node) for node in how.permutation(3)[: len(nodes)]]
    digests = []
    with made.made(backend) as beside, made.made(backend, numa_nodes=other) as layer:
        set_num_threads(random_threads(how))
        for batch, mask in reversed(batches):
            if how.integers(8) == 0:
                set_num_threads(random_threads(how))
                one = one_of(how, batches)[0]
                beside.forward(*one)
            layer.expert_mask[:] = mask
            digests.append(digest(in_pieces(layer, batch, how)))
    return digests[::-1]


class Elsewhere:
    """The other process."""

    def __init__(self, emulator_folder: Path):
        of_users = [name for name in os.environ if name.startswith("KTMOE_") and not name.startswith("KTMOE_TEST_")]
        inherited = {name: value for name, value in os.environ.items() if name not in of_users}
        self._unread = 0
        self._process = subprocess.Popen(
            [sys.executable, __file__, str(emulator_folder)],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
            env=inherited | ELSEWHERE | {"PYTHONPATH": os.pathsep.join(sys.path)},
        )

    def ask(self, cases: Cases) -> None:
        """Let it begin."""
        where = [str(path) for path in (numa.NODES, numa.STATUS, topology.CPUS)]
        self._process.stdin.write(json.dumps({"cases": asdict(cases), "where": where}) + "\n")
        self._process.stdin.flush()
        self._unread += 1

    def answer(self) -> list[str]:
        """The digests of what was asked for last; a test that failed may have left others unread."""
        for _ in range(self._unread):
            line = self._process.stdout.readline()
            assert line, f"the other process ended with {self._process.wait()}"
        self._unread = 0
        return json.loads(line)

    def close(self) -> None:
        self._process.stdin.close()
        assert self._process.wait(60) == 0
        self._process.stdout.close()


def main() -> None:
    folder, subject = Path(sys.argv[1]), None
    with contextlib.ExitStack() as stack:
        for line in sys.stdin:
            request = json.loads(line)
            cases = Cases(**request["cases"])
            numa.NODES, numa.STATUS, topology.CPUS = map(Path, request["where"])
            if cases.subject != subject:
                stack.close()
                subject = cases.subject
                backend = stack.enter_context(ways.chosen(ways.SUBJECTS[subject], folder))
            print(json.dumps(elsewhere(cases, backend)), flush=True)


if __name__ == "__main__":
    main()
