"""Processes of torchrun and of mpiexec that call distributed layers and models. It is also what runs in each of them.

processes.py COMMUNICATOR WORK [arguments]: a line of JSON for each thing that this rank found.
"""

from __future__ import annotations

import json
import os
import signal
import socket
import subprocess
import sys
import time
from pathlib import Path

from bench.namespaces import Machines

#: Seconds that all processes of a run may take.
PATIENCE = 120
ROOT = Path(__file__).resolve().parents[2]


def start(
    size: int, communicator: str, *arguments: object, machines: Machines | None = None, folder: Path | None = None
) -> list[subprocess.Popen]:
    """Ranks by torchrun's variables; or mpiexec alone, with communicator "mpi".

    machines: one for each rank. folder: where mpiexec then finds the program that starts processes on machines.
    """
    script = [sys.executable, __file__, communicator, *map(str, arguments)]
    paths = os.pathsep.join(map(str, (ROOT, ROOT / "tests", ROOT / "tests" / "engines")))
    variables = os.environ | {"PYTHONPATH": paths, "OMP_NUM_THREADS": "1"}
    pipes = {"stdout": subprocess.PIPE, "stderr": subprocess.PIPE, "text": True}
    if communicator == "mpi":
        mpiexec = [Path(sys.executable).with_name("mpiexec"), "-n", str(size)]
        script[1:1] = ["-m", "mpi4py"]  # so that an exception on one rank ends all
        if machines is None:
            return [subprocess.Popen([*mpiexec, *script], env=variables, **pipes)]
        hosts = ["-hosts", ",".join(machines.addresses), "-ppn", "1"]
        ssh = ["-launcher", "ssh", "-launcher-exec", _ssh(machines, folder / "ssh")]
        return [machines.start(0, [*mpiexec, *hosts, *ssh, *script], env=variables, **pipes)]
    variables |= {"WORLD_SIZE": str(size), "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": "29500"}
    if machines is not None:
        variables |= {"MASTER_ADDR": machines.addresses[0], "GLOO_SOCKET_IFNAME": machines.interface}
        return [machines.start(rank, script, env=variables | {"RANK": str(rank)}, **pipes) for rank in range(size)]
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        variables["MASTER_PORT"] = str(free.getsockname()[1])
    return [subprocess.Popen(script, env=variables | {"RANK": str(rank)}, **pipes) for rank in range(size)]


def _ssh(machines: Machines, program: Path) -> Path:
    """The program, written: mpiexec starts processes on machines with it, as with ssh: [options] ADDRESS COMMAND."""
    cases = []
    for machine, address in enumerate(machines.addresses):
        holder = machines.start(machine, ["sleep", "infinity"])
        cases.append(f"{address}) pid={holder.pid};;")
    enter = 'exec nsenter --target "$pid" --net --mount --uts --ipc env --chdir=/ sh -c "$*"'
    lines = ["#!/bin/sh", "while :; do case $1 in -*) shift;; *) break;; esac; done", "to=$1", "shift", "case $to in"]
    program.write_text("\n".join([*lines, *cases, "esac", enter, ""]))
    program.chmod(0o755)
    return program


def found(processes: list[subprocess.Popen]) -> dict[int, list]:
    """What each rank printed, once all have ended. Raises AssertionError with what one wrote where it failed."""
    outputs = [process.communicate(timeout=PATIENCE) for process in processes]
    ranks: dict[int, list] = {}
    for out, _ in outputs:
        for line in out.splitlines():
            rank, said = json.loads(line)
            ranks.setdefault(rank, []).append(said)
    failed = [err[-1000:] for process, (_, err) in zip(processes, outputs, strict=True) if process.returncode > 0]
    assert not failed, failed[0]
    return ranks


def run(size: int, communicator: str, *arguments: object, **where: object) -> dict[int, list]:
    """found() of what start() gives."""
    return found(start(size, communicator, *arguments, **where))


def say(communicator, what: object) -> None:
    # in one write: mpiexec mixes what ranks write at once
    os.write(1, (json.dumps([communicator.rank, what]) + "\n").encode())


def layers(communicator, *_) -> None:
    """Bits of a layer's outputs, with all ways of dividing it; before and after a rank has raised."""
    import distributed_layers as given
    from helpers import bits

    from ktmoe.distributed import DistributedLayer, Distribution

    experts = given.made()
    for cut in (1, 2):
        for count in (1, 30):
            x, ids, weights = given.batch_of(experts, count)
            with DistributedLayer(experts, Distribution(communicator, cut=cut), activations="bf16") as layer:
                say(communicator, bits(layer.forward(x, ids, weights)).tolist())
                try:
                    layer.forward(x[:, communicator.rank :], ids, weights)
                except Exception as error:
                    say(communicator, f"{type(error).__name__}: {error}")
            with DistributedLayer(experts, Distribution(communicator, cut=cut, tokens="own"), activations="bf16") as layer:
                own = slice(communicator.rank, None, communicator.size)
                say(communicator, bits(layer.forward(x[own], ids[own], weights[own])).tolist())


def lost(communicator, how: str) -> None:
    """That ranks call a layer again and again, of which rank 1 sends itself a signal. Seconds until another rank notices that,
    and what it raises, also from then on."""
    import distributed_layers as given

    from ktmoe.distributed import DistributedLayer, Distribution

    experts = given.made()
    batch = given.batch_of(experts, 1)
    layer = DistributedLayer(experts, Distribution(communicator))
    for call in range(10**6):
        if call == 20:
            say(communicator, "calling")
            if communicator.rank == 1:
                os.kill(os.getpid(), getattr(signal, how))
        begun = time.monotonic()
        try:
            layer.forward(*batch)
        except Exception as error:
            say(communicator, [time.monotonic() - begun, f"{type(error).__name__}: {error}"])
            break
    try:
        layer.forward(*batch)
    except Exception as error:
        say(communicator, f"{type(error).__name__}: {error}")


def outside(communicator, *_) -> None:
    """An exception in one rank, while the other one calls a layer."""
    import distributed_layers as given

    from ktmoe.distributed import DistributedLayer, Distribution

    experts = given.made()
    layer = DistributedLayer(experts, Distribution(communicator))
    if communicator.rank == 1:
        _ = 1 / 0
    layer.forward(*given.batch_of(experts, 1))


def text(communicator, folder: str, source: str) -> None:
    """Tokens of a model, greedy and drawn; bytes of this rank's experts; and what a folder that one rank lacks raises."""
    import torch

    import ktmoe.transformers
    from ktmoe.distributed import Distribution

    distributed = True if communicator.size > 1 else Distribution(communicator)
    torch.manual_seed(communicator.rank)
    model = ktmoe.transformers.load(folder, source=source, distributed=distributed)
    ids = torch.tensor([[1, 7, 5, 9, 3]])
    for options in ({"do_sample": False}, {"do_sample": True, "temperature": 2.0}):
        with torch.inference_mode():
            say(communicator, model.generate(ids, max_new_tokens=24, pad_token_id=0, **options)[0].tolist())
    say(communicator, sum(module.ktmoe_layer.nbytes for module in model.modules() if hasattr(module, "ktmoe_layer")))
    try:
        ktmoe.transformers.load(folder if communicator.rank == 0 else f"{folder}-absent", distributed=distributed)
    except Exception as error:
        say(communicator, type(error).__name__)


def main(name: str, work: str, *arguments: str) -> None:
    if name == "gloo":
        from ktmoe.distributed.gloo import GlooCommunicator

        communicator = GlooCommunicator(timeout=float(os.environ.get("TIMEOUT", 60)))
    else:
        from ktmoe.distributed.mpi import MpiCommunicator

        communicator = MpiCommunicator()
    {"layers": layers, "lost": lost, "outside": outside, "text": text}[work](communicator, *arguments)
    communicator.close()


if __name__ == "__main__":
    main(*sys.argv[1:])
