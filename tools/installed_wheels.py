"""installed_wheels.py [--smoke] [MODEL ...]: installs the wheels of dist/ as users do. Their bits must be this tree's.

Each wheel goes into an environment of its Python, with what it requires and nothing else, where no compiler is found. Another
environment has the lowest versions of what is required. On CPU models that QEMU emulates, all of MODELS or those that are
named, a wheel must choose the expected backend. Without --smoke, root also installs a wheel in a new Debian that has only
Python. What cannot be had is named, and is no failure.
"""

from __future__ import annotations

import contextlib
import json
import os
import re
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
sys.path.insert(0, str(ROOT))

from bench.peers.environments import SetUpError  # noqa: E402
from tools import bare_debian, guest, pythons  # noqa: E402
from tools.requirements import requirements  # noqa: E402

DIST, FOLDER = ROOT / "dist", ROOT / "build" / "wheels" / "tested"
PROBE = ROOT / "tools" / "wheel_probe.py"
#: The name of the environment of the lowest versions, and its Python.
LOWEST, LOWEST_PYTHON = "lowest", "3.11"
#: QEMU's CPU models, and the best backend on each. QEMU's emulator has no AVX-512 and no AMX.
MODELS = {
    "qemu64": "fp32_lut",
    "core2duo": "fp32_lut",
    "Nehalem": "fp32_lut",
    "Westmere": "fp32_lut",
    "SandyBridge": "fp32_lut",
    "IvyBridge": "fp32_lut",
    "Haswell": "avx2",
    "Broadwell": "avx2",
    "Skylake-Client": "avx2",
    "EPYC": "avx2",
    "max": "avx2",
}
#: Models that numpy 2.4 does not run on, since it needs x86-64-v2. They take the lowest versions.
BEFORE_V2 = {"qemu64", "core2duo"}
#: Seconds that one run of the probe may take.
PATIENCE = 600

Answer = dict[str, object]


class WrongError(Exception):
    """A wheel does not do what it should."""


def main(arguments: list[str]) -> int:
    smoke, models = "--smoke" in arguments, [argument for argument in arguments if argument != "--smoke"]
    wheels = {version_of(path.name): path for path in sorted(DIST.glob("*.whl"))}
    if not wheels:
        say("dist/ has no wheel: run make wheel first")
        return 1
    shutil.rmtree(FOLDER, ignore_errors=True)
    with tempfile.TemporaryDirectory() as name, ThreadPoolExecutor(2) as pool:
        data = Path(name)
        expected = asked([sys.executable, PROBE, data, "write"], PYTHONPATH=str(ROOT))
        environments = dict(wheels) | ({LOWEST: wheels[LOWEST_PYTHON]} if LOWEST_PYTHON in wheels else {})
        cases: dict[str, Callable[[], Answer]] = {
            title: lambda title=title, wheel=wheel: asked([installed(title, wheel), PROBE, data])
            for title, wheel in environments.items()
        }
        good = list(pool.map(lambda title: passed(title, cases[title], expected), cases))
        emulator()
        cases = {model: lambda model=model: emulated(model, data) for model in models or MODELS}
        good += pool.map(lambda model: passed(model, cases[model], expected), cases)
        if not smoke:
            good.append(passed("Debian", lambda: in_debian(wheels, data), expected))
    return 0 if all(good) else 1


def version_of(wheel: str) -> str:
    """The Python of a wheel's name, such as 3.14t."""
    return re.sub(r".*-cp(\d)(\d+)(t?)-manylinux.*", r"\1.\2\3", wheel)


def passed(title: str, case: Callable[[], Answer], expected: Answer) -> bool:
    """Whether a case gave the expected bits, for each backend that it has, or cannot be had here."""
    try:
        compared(title, case(), expected)
    except (SetUpError, guest.Missing) as error:
        say(f"{title}: not run: {error}")
    except WrongError as error:
        say(f"{title}: FAILED: {error}")
        return False
    return True


def compared(title: str, answer: Answer, expected: Answer) -> None:
    """Raises WrongError. All backends have the same bits: one of another CPU is compared with the best of this one."""
    best, digests = expected["backends"][0], answer["digests"]
    if str(ROOT / "ktmoe") in answer["where"]:
        raise WrongError(f"it imports this tree's {answer['where']}")
    for name, digest in digests.items():
        weights, _, backend = name.partition(" ")
        if digest != expected["digests"].get(name, expected["digests"][f"{weights} {best}"]):
            raise WrongError(f"{weights} by {backend} has other bits than in this tree")
    if title in MODELS and answer["backends"][0] != MODELS[title]:
        raise WrongError(f"it chooses {answer['backends'][0]}, expected {MODELS[title]}")
    backends = ", ".join(answer["backends"])
    say(f"{title}: {len(digests)} outputs have this tree's bits; backends {backends}; numpy {answer['numpy']}")


def installed(title: str, wheel: Path) -> Path:
    """The interpreter of a new environment with a wheel and what it requires. Raises SetUpError."""
    version = version_of(wheel.name)
    interpreter = pythons.find(version)
    if interpreter is None:
        raise SetUpError(f"there is no Python {version} here")
    home = FOLDER / title
    subprocess.run([interpreter, "-m", "venv", "--clear", home], check=True, env=clean())
    packages = list(requirements(("package",)))
    if title == LOWEST:
        packages = [package.replace(">=", "==") for package in packages]
    if version.endswith("t"):  # safetensors has no wheels for Pythons without a GIL; reading a checkpoint does without it
        packages = [package for package in packages if not package.startswith("safetensors")]
    for what in (packages, ["--no-deps", wheel]):
        pip = [home / "bin" / "python", "-m", "pip", "install", "-q", "--only-binary", ":all:", *what]
        done = subprocess.run(pip, capture_output=True, text=True, check=False, env=clean())
        if done.returncode:
            raise SetUpError(done.stderr.strip().rpartition("\n")[2])
    return home / "bin" / "python"


def emulator() -> None:
    """Have QEMU. Without it, the models are not run."""
    if not shutil.which("qemu-x86_64") and not os.geteuid() and shutil.which("apt-get"):
        say("installing QEMU")
        with contextlib.suppress(guest.Missing):
            guest.quietly("apt-get update && apt-get install -y --no-install-recommends qemu-user")


def emulated(model: str, data: Path) -> Answer:
    """What a wheel gives on a CPU model."""
    names = [LOWEST] if model in BEFORE_V2 else sorted(path.name for path in FOLDER.iterdir() if path.name != LOWEST)
    interpreter = next((path for name in names if (path := FOLDER / name / "bin" / "python").exists()), None)
    if interpreter is None:
        raise SetUpError("no wheel is installed that could run there")
    if not shutil.which("qemu-x86_64"):
        raise SetUpError("there is no qemu-x86_64, of Debian's package qemu-user")
    return asked(["qemu-x86_64", "-cpu", model, interpreter, PROBE, data])


def in_debian(wheels: dict[str, Path], data: Path) -> Answer:
    """What a wheel gives in a new Debian without a compiler, which has no network: a folder has all packages."""
    version, root = bare_debian.PYTHON, bare_debian.made(say)
    if version not in wheels:
        raise SetUpError(f"dist/ has no wheel for its Python {version}")
    bare_debian.install(root, wheels[version])
    shutil.rmtree(root / "data", ignore_errors=True)
    shutil.copytree(data, root / "data")
    shutil.copy(PROBE, root / "probe.py")
    return asked(["chroot", root, "/venv/bin/python", "/probe.py", "/data"])


def asked(command: list[object], **variables: str) -> Answer:
    """What the probe prints. Raises WrongError."""
    done = subprocess.run(
        [str(word) for word in command],
        env=clean() | variables,
        cwd="/",
        capture_output=True,
        text=True,
        check=False,
        timeout=PATIENCE,
    )
    if done.returncode:
        last = (done.stderr.strip().splitlines() or ["it printed nothing"])[-1]
        raise WrongError(f"it ended with {done.returncode}: {last}")
    return json.loads(done.stdout)


def clean() -> dict[str, str]:
    """The environment without what tells Python, ktmoe or numpy's BLAS how to run, and without a path to a compiler."""
    told = ("KTMOE_", "PYTHON", "OPENBLAS_", "NPY_", "OMP_")
    kept = {name: value for name, value in os.environ.items() if not name.startswith(told)}
    return kept | {"CC": "/nonexistent/cc", "PIP_DISABLE_PIP_VERSION_CHECK": "1"}


def say(text: str) -> None:
    print(f"ktmoe: {text}", flush=True)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
