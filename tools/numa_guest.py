"""numa_guest.py [guests' names] [-- a command of the shell]: runs it, or tests/nodes, in QEMU guests with several NUMA nodes.

First installs QEMU and fetches a kernel. Ends well, and says why nothing ran, where they cannot be had.
"""

import shlex
import sys
from dataclasses import dataclass
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
sys.path.insert(0, str(ROOT))

from tools import guest  # noqa: E402

#: Distance of a node to itself, and to another one unless a guest says otherwise.
HERE, THERE = 10, 20


@dataclass(frozen=True)
class Guest:
    """nodes: the CPUs and the MiB of memory of each, either of which may be none. smp: QEMU's cores. usable: what ktmoe should
    find, the CPUs that count to each node with memory. distances: of two nodes, where it is not THERE.
    """

    nodes: dict[int, tuple[tuple[int, ...], int]]
    smp: str
    usable: dict[int, set[int]]
    distances: dict[tuple[int, int], int]

    def distance(self, a: int, b: int) -> int:
        return HERE if a == b else self.distances.get((min(a, b), max(a, b)), THERE)

    @property
    def arguments(self) -> list[str]:
        """QEMU's."""
        found = ["-smp", self.smp, "-m", f"{sum(mib for _, mib in self.nodes.values())}M"]
        for node, (cpus, mib) in self.nodes.items():
            if mib:
                found += ["-object", f"memory-backend-ram,id=memory{node},size={mib}M"]
            memory = f",memdev=memory{node}" if mib else ""
            found += ["-numa", f"node,nodeid={node}{''.join(f',cpus={cpu}' for cpu in cpus)}{memory}"]
        for a in self.nodes:
            for b in self.nodes:
                found += ["-numa", f"dist,src={a},dst={b},val={self.distance(a, b)}"]
        return found


#: By name; tests/nodes says of each what ktmoe makes of it. Small: an emulator computes, and the memory is this machine's.
GUESTS = {
    "two": Guest({0: ((0, 1), 1280), 1: ((2, 3), 1024)}, "4,sockets=2,cores=2", {0: {0, 1}, 1: {2, 3}}, {}),
    "four": Guest(
        {node: ((node,), 768) for node in range(4)},
        "4,sockets=4,cores=1",
        {node: {node} for node in range(4)},
        {(0, 2): 30, (1, 3): 30},
    ),
    "unequal": Guest({0: ((0, 1, 2), 1792), 1: ((3,), 320)}, "4,sockets=4,cores=1", {0: {0, 1, 2}, 1: {3}}, {}),
    # node 1 has no memory, and node 2 is nearest to it; node 3 has no CPUs: Linux numbers such nodes last
    "apart": Guest(
        {0: ((0,), 1280), 1: ((1, 2), 0), 2: ((3,), 1024), 3: ((), 256)},
        "4,sockets=4,cores=1",
        {0: {0}, 2: {1, 2, 3}},
        {(0, 1): 25, (1, 2): 15, (1, 3): 30},
    ),
}
#: Of the kernel: a disk of the guest's own, since files on a disk come into memory in another way than those that lie there.
MODULES = ("loop", "crc32c_generic", "ext4")
#: What the tests find: an empty folder in memory, a disk, and control groups, which they make some of.
PREPARED = f"""mount -t tmpfs tmp /tmp
mkdir /tmp/disk
truncate -s 96M /tmp/image && mkfs.ext4 -q /tmp/image && mount -o loop /tmp/image /tmp/disk || exit 1
mount -t cgroup2 groups /sys/fs/cgroup && echo +cpuset >/sys/fs/cgroup/cgroup.subtree_control || exit 1
export PYTHONPATH={ROOT} OMP_NUM_THREADS=1
"""


def main(arguments: list[str]) -> int:
    names, _, command = " ".join(arguments).partition("--")
    chosen = names.split() or list(GUESTS)
    unknown = [name for name in chosen if name not in GUESTS]
    if unknown:
        print(f"ktmoe: guests are {', '.join(GUESTS)}, found {', '.join(unknown)}")
        return 2

    def work() -> int:
        guest.install({"e2fsprogs": "mkfs.ext4"})
        return max([run(name, command or tests()) for name in chosen])

    return guest.attempt(work)


def run(name: str, command: str) -> int:
    print(f"ktmoe: guest {name}", flush=True)
    return guest.run(f"{PREPARED}export KTMOE_TEST_GUEST={name}\n{command}", GUESTS[name].arguments, MODULES)


def tests() -> str:
    """The command that runs them; a test that is about other guests is skipped."""
    return f"{shlex.quote(sys.executable)} -m pytest -q --color=no -n 0 -p no:cacheprovider tests/nodes"


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
