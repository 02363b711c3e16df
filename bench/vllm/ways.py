"""Ways to run a model in vLLM, the checkpoints that they need, and the environment of their processes."""

from __future__ import annotations

import os
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path

import ktmoe
from bench.engines.session import PATIENCE, ROOT
from bench.engines.ways import PASSIVE
from bench.peers import environments, processes

MODEL = "gpt-oss-20b"


@dataclass(frozen=True)
class Way:
    """weights: of the checkpoint's experts, a folder that write() makes. environment: of the process."""

    name: str
    weights: str
    environment: dict[str, str] = field(default_factory=dict)

    @property
    def plugged_in(self) -> bool:
        """Whether ktmoe computes the experts."""
        return self.environment.get("KTMOE_VLLM") != "0"


#: The first one is what the others are compared with. vLLM's own MXFP4 experts need AMX.
WAYS = (
    Way("ktmoe MXFP4", "MXFP4", PASSIVE),
    Way("ktmoe BF16", "BF16", PASSIVE),
    Way("vLLM BF16", "BF16", {"KTMOE_VLLM": "0"}),
)


def variables(folder: Path, way: Way) -> dict[str, str]:
    """The environment of a process with vLLM, in which it finds ktmoe as an installed plug-in. folder: for what that needs."""
    plugin = folder / "plugin"
    environments.describe_ktmoe(plugin)
    return {
        "PYTHONPATH": f"{plugin}:{ROOT}",
        "OMP_NUM_THREADS": str(ktmoe.get_num_threads()),
        "HF_HUB_OFFLINE": "1",
        "VLLM_NO_USAGE_STATS": "1",
        "VLLM_CPU_KVCACHE_SPACE": "1",
        "TORCHDYNAMO_DISABLE": "1",
        **way.environment,
    }


def all_cpus() -> str:
    """The CPUs that this process has, as vLLM wants them named. By itself it would keep one of them free."""
    return ",".join(map(str, sorted(os.sched_getaffinity(0))))


def write(config: dict, folder: Path, progress: Callable[[str], object], gguf: str | None = None) -> None:
    """The same numbers in MXFP4 and in bfloat16, in folders of these names; as a GGUF file of that name, too."""
    python = environments.python(environments.ENGINES, progress)
    progress("writing the checkpoints")
    command = [python, "-m", "bench.engines.worker", folder / "MXFP4", str(ktmoe.get_num_threads())]
    worker = processes.Process(command, folder / "write.log", {"PYTHONPATH": str(ROOT), "HF_HUB_OFFLINE": "1"})
    try:
        worker.ask(do="write", config=config, patience=PATIENCE)
        worker.ask(do="write_bf16", config=config, into=str(folder / "BF16"), patience=PATIENCE)
        if gguf:
            worker.ask(do="write_gguf", into=str(folder / gguf), dense="BF16", tokenizer=True, patience=PATIENCE)
    finally:
        worker.close()
