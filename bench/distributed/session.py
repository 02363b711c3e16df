"""The measurement: ranks on this machine over several networks, and the result, which is JSON."""

from __future__ import annotations

import itertools
import json
import os
import shutil
import socket
import subprocess
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack
from dataclasses import asdict, dataclass, replace
from pathlib import Path

import numpy as np

from bench import footprints
from bench.distributed import traffic, worker
from bench.engines.session import about
from bench.models import Model, models
from bench.namespaces import Machines, UnavailableError
from bench.peers import environments
from bench.peers.processes import WorkerError
from ktmoe.distributed import Division

ROOT = Path(__file__).resolve().parents[2]
#: The layer that is measured. Its experts are published in other formats, too; MXFP4 has the fewest bytes.
MODEL = replace(models()["Qwen3-30B-A3B"], weights="MXFP4")
SHARDS = 8
#: Whose tokens, how many, and calls of it in a round.
POINTS = [("same", 1, 5), ("same", 4, 5), ("same", 16, 3), ("same", 64, 2), ("same", 512, 1), ("own", 4, 5), ("own", 512, 1)]
#: Of messages that a rank sends to each other one, when there is nothing else.
SIZES = (512, 4096, 16384, 65536, 1 << 18, 1 << 20, 1 << 22)
EXCHANGES = 3
#: Seconds until a group of ranks must have ended.
PATIENCE = 600.0
#: And until those that were asked to end are killed.
END_PATIENCE = 5.0


@dataclass(frozen=True)
class Network:
    """rate: of machines that are network namespaces, in tc's words; "": processes of one machine. points: of POINTS; all."""

    name: str
    communicator: str = "gloo"
    rate: str = ""
    ranks: tuple[int, ...] = (2, 4)
    points: tuple[tuple[str, int], ...] = tuple(point[:2] for point in POINTS)


NETWORKS = (
    Network("loopback", ranks=(1, 2, 4)),
    Network("10gbit", rate="10gbit"),
    Network("1gbit", rate="1gbit"),
    Network("MPI", communicator="mpi", ranks=(2,), points=(("same", 1), ("same", 16), ("same", 512))),
)


def measure(networks: Sequence[Network], most_ranks: int, rounds: int, folder: Path, progress: Callable[[str], object]) -> dict:
    """The result. Raises WorkerError, environments.SetUpError. A network that cannot be is left out, and says why."""
    python = environments.python(environments.ENGINES, progress)
    found = {"groups": [], "absent": {}}
    for network in networks:
        try:
            for ranks in network.ranks:
                if ranks <= most_ranks:
                    progress(f"{network.name}, {ranks} ranks")
                    found["groups"].append(_group(network, ranks, most_ranks, rounds, python, folder))
        except (UnavailableError, FileNotFoundError) as error:
            found["absent"][network.name] = str(error)
    return about() | {"model": asdict(MODEL), "shards": SHARDS, **found}


def cpus_of(ranks: int, most_ranks: int) -> list[list[int]]:
    """Each rank's CPUs, as many for any number of ranks. Where there are fewer than most_ranks, ranks share them."""
    available = sorted(os.sched_getaffinity(0))
    each = max(1, len(available) // most_ranks)
    return [[available[(rank * each + i) % len(available)] for i in range(each)] for rank in range(ranks)]


def _group(network: Network, ranks: int, most_ranks: int, rounds: int, python: Path, folder: Path) -> dict:
    cpus = cpus_of(ranks, most_ranks)
    points = [point for point in POINTS if point[:2] in network.points and (ranks > 1 or point[0] == "same")]
    layer_bytes = MODEL.experts * MODEL.expert_bytes
    job = {
        "communicator": network.communicator,
        "model": asdict(MODEL),
        "layers": max(2, -(-footprints.wanted_bytes() // layer_bytes)),
        "cpus": cpus,
        "points": points,
        "rounds": rounds,
        "sizes": SIZES,
        "exchanges": EXCHANGES,
        "shards": SHARDS,
    }
    place = folder / f"{network.name}-{ranks}"
    place.mkdir()
    (place / "job.json").write_text(json.dumps(job))
    variables = {"PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1", "KTMOE_NUM_THREADS": str(len(cpus[0]))}
    _run(network, ranks, [python, "-m", "bench.distributed.worker", place / "job.json"], variables, place)
    by_rank = [json.loads((place / f"rank-{rank}.json").read_text()) for rank in range(ranks)]
    return {
        "network": network.name,
        "communicator": network.communicator,
        "ranks": ranks,
        "cpus": len(cpus[0]),
        "shared": len({cpu for of in cpus for cpu in of}) < sum(map(len, cpus)),
        "nbytes": max(of["nbytes"] for of in by_rank),
        "exchange": {size: _exchanges([of["exchange"][size] for of in by_rank]) for size in by_rank[0]["exchange"]},
        "points": [_point(job, seed, point, [of["points"][seed] for of in by_rank]) for seed, point in enumerate(points)],
    }


def _exchanges(by_rank: Sequence[list[list[float]]]) -> list[float]:
    """Seconds from when the last rank came until the last one had everything."""
    return [max(ended for _, ended in of) - max(began for began, _ in of) for of in zip(*by_rank, strict=True)]


def _point(job: dict, seed: int, point: tuple, by_rank: Sequence[list[dict]]) -> dict:
    """What the ranks say of each call, together. Raises WorkerError where they sent other bytes than the formulas say."""
    tokens, count, times = point
    division = Division(MODEL.experts, job["shards"], 1, len(by_rank), {})
    made = worker.batches(MODEL, tokens, count, len(by_rank), seed)
    calls = []
    made = itertools.islice(made, times, times + len(by_rank[0]))  # the first were for warming up
    for batch, *of in zip(made, *by_rank, strict=True):
        rounds = rounds_of(division, MODEL, tokens, batch.ids)
        sent = np.array([each["sent"] for each in of], np.int64).swapaxes(0, 1)
        others = ~np.eye(len(of), dtype=bool)
        if len(of) > 1 and not np.array_equal(sent * others, np.array(rounds) * others):
            raise WorkerError(f"{count} tokens, {tokens}: ranks sent other bytes than bench/distributed/traffic.py says")
        calls.append(
            {
                "edges": [each["edges"] for each in of],
                "replayed": [each["replayed"] for each in of],
                "experts": max(each["experts"] for each in of),
                "alone": of[0]["alone"],
                "rounds": [each.tolist() for each in rounds] if len(of) > 1 else [],
            }
        )
    return {"tokens": tokens, "count": count, "calls": calls}


def rounds_of(division: Division, model: Model, tokens: str, ids: np.ndarray) -> list[np.ndarray]:
    """A call's messages by traffic.py. ids: of all ranks' tokens."""
    if tokens == "same":
        return traffic.same_tokens(division, ids, model.hidden)
    ends = worker.ends(len(ids), division.ranks)
    return traffic.own_tokens(division, [ids[first:last] for first, last in itertools.pairwise(ends)], model.hidden)


def _run(network: Network, ranks: int, command: list, variables: dict[str, str], place: Path) -> None:
    """All ranks, until they ended. Raises WorkerError with what one that failed said last."""
    with ExitStack() as stack:
        started = list(_started(network, ranks, command, variables, place, stack))
        until = time.monotonic() + PATIENCE
        try:
            while None in (codes := [process.poll() for process in started]) and time.monotonic() < until:
                if any(codes):
                    break  # the others would wait for it
                time.sleep(0.05)
        finally:
            for process in started:
                process.terminate()  # mpiexec ends its ranks then
            for process in started:
                try:
                    process.wait(END_PATIENCE)
                except subprocess.TimeoutExpired:
                    process.kill()
                    process.wait()
    for code, log in zip(codes, sorted(place.glob("*.log")), strict=True):
        if code:
            said = [line.strip() for line in log.read_text(errors="replace").splitlines() if line.strip()]
            raise WorkerError(f"{network.name}, {ranks} ranks: {log.stem} ended with status {code}: {''.join(said[-1:])}")
    if None in codes:
        raise WorkerError(f"{network.name}, {ranks} ranks: no result within {PATIENCE:.0f} s")


def _started(
    network: Network, ranks: int, command: list, variables: dict[str, str], place: Path, stack: ExitStack
) -> Iterator[subprocess.Popen]:
    if network.communicator == "mpi":
        log = stack.enter_context((place / "ranks.log").open("w"))
        mpiexec = shutil.which("mpiexec", path=Path(command[0]).parent)
        if not mpiexec:
            raise FileNotFoundError("mpiexec is not in the environment of transformers, which has mpi4py and mpich")
        words = [mpiexec, "-n", str(ranks), *map(str, command)]
        yield subprocess.Popen(words, cwd=ROOT, env=os.environ | variables, stdout=log, stderr=log)
        return
    address, interface, port = "127.0.0.1", "lo", _free_port()
    machines = stack.enter_context(Machines(ranks, network.rate)) if network.rate else None
    if machines:
        address, interface = machines.addresses[0], machines.interface
    for rank in range(ranks):
        log = stack.enter_context((place / f"rank-{rank}.log").open("w"))
        told = {"RANK": rank, "WORLD_SIZE": ranks, "MASTER_ADDR": address, "MASTER_PORT": port, "GLOO_SOCKET_IFNAME": interface}
        options = {"env": os.environ | variables | {name: str(value) for name, value in told.items()}, "stdout": log}
        options |= {"stderr": log, "cwd": ROOT}
        words = list(map(str, command))
        yield machines.start(rank, words, **options) if machines else subprocess.Popen(words, **options)


def _free_port() -> int:
    with socket.create_server(("127.0.0.1", 0)) as server:
        return server.getsockname()[1]
