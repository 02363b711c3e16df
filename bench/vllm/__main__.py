"""`python -m bench.vllm`: text by vLLM with the plug-in and without it, in turns. Saves the result, and prints a table."""

from __future__ import annotations

import argparse
import json
import signal
import sys
import tempfile
from collections.abc import Callable
from dataclasses import asdict, dataclass, field
from pathlib import Path

import ktmoe
from bench import runs
from bench.engines.session import PATIENCE, ROOT, Call, about
from bench.engines.shapes import engines
from bench.engines.ways import PASSIVE
from bench.peers import environments, processes
from bench.peers.__main__ import progress_line
from bench.peers.processes import WorkerError
from bench.vllm import report

RESULT = runs.STORAGE / "vllm.json"
CALLS = (Call(1, 512, 1), Call(1, 128, 33), Call(4, 128, 17))
WARM = Call(1, 16, 3)
MODEL = "gpt-oss-20b"


@dataclass(frozen=True)
class Way:
    """weights: of the checkpoint's experts, a folder that bench.engines.worker writes. environment: of the process."""

    name: str
    weights: str
    environment: dict[str, str] = field(default_factory=dict)


#: The first one is what the others are compared with. vLLM's own MXFP4 experts need AMX.
WAYS = (
    Way("ktmoe MXFP4", "MXFP4", PASSIVE),
    Way("ktmoe BF16", "BF16", PASSIVE),
    Way("vLLM BF16", "BF16", {"KTMOE_VLLM": "0"}),
)


def main(arguments: list[str] | None = None) -> int:
    """The exit status: 0, or 1 if something is missing, or 130 after Ctrl-C."""
    parser = argparse.ArgumentParser(prog="python -m bench.vllm", description="Text by vLLM, with the plug-in and without it.")
    parser.add_argument("--layers", metavar="N", type=int, default=2, help="of the model (%(default)s)")
    parser.add_argument("--rounds", metavar="N", type=int, default=5, help="(%(default)s)")
    parser.add_argument("--folder", metavar="DIR", type=Path, help="for checkpoints of 5 GB, removed afterwards")
    parser.add_argument("--save", metavar="FILE", type=Path, default=RESULT, help="(%(default)s)")
    options = parser.parse_args(arguments)
    if min(options.rounds, options.layers) < 1:
        parser.error(f"expected --rounds and --layers above 0, found {options.rounds} and {options.layers}")
    try:
        with progress_line() as progress, tempfile.TemporaryDirectory(prefix="ktmoe-vllm-", dir=options.folder) as folder:
            saved = measure(options.layers, options.rounds, Path(folder), progress)
    except (OSError, ValueError, WorkerError, environments.SetUpError) as error:
        print(f"vllm: {error}", file=sys.stderr)
        return 1
    except KeyboardInterrupt:
        print("vllm: interrupted", file=sys.stderr)
        return 130
    options.save.parent.mkdir(parents=True, exist_ok=True)
    options.save.write_text(json.dumps(saved, indent=1) + "\n")
    report.show(saved)
    print(f"saved: {options.save}")
    return 0


def measure(layers: int, rounds: int, folder: Path, progress: Callable[[str], object]) -> dict:
    """The result, which is JSON. A way that cannot be measured is out, and the result says why. Raises WorkerError without the
    first way."""
    engine = engines()[MODEL]
    python = environments.python(environments.VLLM, progress)
    _write(engine.config(layers), folder, progress)
    workers, found = {}, {}
    try:
        for way in WAYS:
            progress(f"loading {way.name}")
            workers[way.name] = worker = _start(python, folder, way)
            found[way.name] = {"weights": way.weights, "environment": way.environment, "load": {}, "failure": None}
            try:
                load = worker.ask(do="load", folder=str(folder / way.weights), patience=PATIENCE)
                expected = 0 if way.environment.get("KTMOE_VLLM") == "0" else layers
                if load["packed"] != expected:
                    raise WorkerError(f"expected ktmoe in {expected} layers, found {load['packed']}")
                found[way.name]["load"] = load
            except WorkerError as error:
                if way is WAYS[0]:
                    raise
                found[way.name]["failure"] = str(error)
        names = [name for name in found if not found[name]["failure"]]
        measured = []
        for number in range(rounds + 1):
            turns = {}
            for name in names[:: -1 if number % 2 else 1]:
                progress(f"round {number} of {rounds}, {name}")
                calls = [workers[name].ask(do="generate", **asdict(call), seed=10 * number + i) for i, call in _numbered()]
                turns[name] = calls[1:]
            measured.append(turns)
    finally:
        for worker in workers.values():
            worker.close()
    return about() | {
        "model": engine.name,
        "layers": layers,
        "of_layers": engine.experts.layers,
        "base": WAYS[0].name,
        "calls": [asdict(call) for call in CALLS],
        "ways": found,
        "rounds": measured[1:],  # the first is for warming up
    }


def _numbered() -> list[tuple[int, Call]]:
    """A short call wakes the threads."""
    return list(enumerate((WARM, *CALLS)))


def _write(config: dict, folder: Path, progress: Callable[[str], object]) -> None:
    """The same numbers twice: in MXFP4, and in bfloat16."""
    python = environments.python(environments.ENGINES, progress)
    progress("writing the checkpoints")
    command = [python, "-m", "bench.engines.worker", folder / "MXFP4", str(ktmoe.get_num_threads())]
    worker = processes.Process(command, folder / "write.log", {"PYTHONPATH": str(ROOT), "HF_HUB_OFFLINE": "1"})
    try:
        worker.ask(do="write", config=config, patience=PATIENCE)
        worker.ask(do="write_bf16", config=config, into=str(folder / "BF16"), patience=PATIENCE)
    finally:
        worker.close()


def _start(python: Path, folder: Path, way: Way) -> processes.Process:
    plugin = folder / "plugin"
    environments.describe_ktmoe(plugin)
    variables = {
        "PYTHONPATH": f"{plugin}:{ROOT}",
        "OMP_NUM_THREADS": str(ktmoe.get_num_threads()),
        "HF_HUB_OFFLINE": "1",
        "VLLM_NO_USAGE_STATS": "1",
        "VLLM_CPU_KVCACHE_SPACE": "1",
        "VLLM_ENABLE_V1_MULTIPROCESSING": "0",  # in which case vLLM keeps no CPU for itself
        "TORCHDYNAMO_DISABLE": "1",
    }
    log = folder / f"{way.name}.log".replace(" ", "-")
    return processes.Process([python, "-m", "bench.vllm.worker"], log, variables | way.environment)


if __name__ == "__main__":
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(143))  # by exceptions, workers end and their weights are removed
    sys.exit(main())
