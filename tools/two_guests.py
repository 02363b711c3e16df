"""two_guests.py [--delay 5ms] [--cpus 2] [--memory 4G] 'a command of the shell': runs it in two QEMU guests at once.

They are two machines with a network between them, whose packets take the delay each way. What each prints is shown line by
line, after its rank. The command finds RANK (0 or 1), WORLD_SIZE, MASTER_ADDR, MASTER_PORT and GLOO_SOCKET_IFNAME, as
torch.distributed wants them. Ends well, and says why nothing ran, where guests cannot be had.
"""

import argparse
import subprocess
import sys
import tempfile
import threading
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
sys.path.insert(0, str(ROOT))

from tools import guest  # noqa: E402

ADDRESSES = ("10.0.0.1", "10.0.0.2")
MODULES = ("virtio_net", "sch_netem")
#: Seconds that a guest may go on after the other one's command has failed, since it may wait for it for good.
PATIENCE = 60
#: What each does before the command. It begins when each has heard the other.
PREPARED = """ip link set eth0 up && ip address add {own}/24 dev eth0 || exit 1
tc qdisc add dev eth0 root netem delay {delay} || exit 1
hostname guest{rank} && printf '%s\n' '{addresses[0]} guest0' '{addresses[1]} guest1' >>/etc/hosts
until busybox ping -c 1 -W 1 {other} >/dev/null; do sleep 0.2; done
export RANK={rank} WORLD_SIZE=2 MASTER_ADDR={addresses[0]} MASTER_PORT=29500 GLOO_SOCKET_IFNAME=eth0
"""


def main(arguments: list[str]) -> int:
    parser = argparse.ArgumentParser(prog="two_guests.py", description="Runs a command in two QEMU guests at once.")
    parser.add_argument("command", help="of the shell; each guest runs it")
    parser.add_argument("--delay", default="5ms", help="of each packet, as tc has it; a round trip takes it twice")
    parser.add_argument("--cpus", default="2", help="of each guest")
    parser.add_argument("--memory", default="4G", help="of each guest")
    given = parser.parse_args(arguments)

    def work() -> int:
        guest.install({"iproute2": "tc"})
        return run(given.command, given.delay, ("-smp", given.cpus, "-m", given.memory))

    return guest.attempt(work)


def run(command: str, delay: str, arguments: tuple[str, ...]) -> int:
    """The greater exit code of the two."""
    with tempfile.TemporaryDirectory() as name:
        folders = [Path(name) / str(rank) for rank in range(2)]
        for rank, folder in enumerate(folders):
            own, other = ADDRESSES[rank], ADDRESSES[1 - rank]
            prepared = PREPARED.format(own=own, other=other, addresses=ADDRESSES, rank=rank, delay=delay)
            guest.initramfs(folder, prepared + command, MODULES)
        accelerator = guest.accelerator()
        machines, readers = [], []
        try:
            for rank, folder in enumerate(folders):
                started = guest.qemu(folder, accelerator, (*arguments, *network(Path(name), rank)))
                pipes = {"stdin": subprocess.DEVNULL, "stdout": subprocess.PIPE}
                machines.append(subprocess.Popen(started, **pipes, text=True, errors="replace"))
                readers.append(threading.Thread(target=show, args=(rank, machines[-1].stdout)))
                readers[-1].start()
            return wait(machines, folders)
        finally:
            for machine in machines:
                machine.kill()
                machine.wait()
            for reader in readers:
                reader.join()


def network(folder: Path, rank: int) -> list[str]:
    """QEMU's arguments: the two processes send each other packets by sockets in the folder."""
    ends = [f"{end}.type=unix,{end}.path={folder}/network{of}" for end, of in (("local", rank), ("remote", 1 - rank))]
    return [
        *("-netdev", f"dgram,id=network,{','.join(ends)}"),
        *("-device", f"virtio-net-pci,netdev=network,mac=52:54:00:00:00:0{rank + 1},vectors=0,romfile="),
    ]


def show(rank: int, lines) -> None:
    for line in lines:
        print(f"{rank}: {line}", end="", flush=True)


def wait(machines: list[subprocess.Popen], folders: list[Path]) -> int:
    codes: dict[int, int] = {}
    while len(codes) < len(machines):
        for rank, machine in enumerate(machines):
            if rank in codes:
                continue
            try:
                machine.wait(PATIENCE if any(codes.values()) else 0.2)
            except subprocess.TimeoutExpired:
                if not any(codes.values()):
                    continue
                print(f"ktmoe: guest {rank} was still running {PATIENCE} seconds after the other one failed", flush=True)
                return max(codes.values())
            codes[rank] = guest.code_of(folders[rank])
    return max(codes.values())


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
