"""test_pythons.py [--smoke] [pytest's arguments]: builds and tests ktmoe on other CPythons, with a GIL and without.

--smoke: a few modules of tests each, and no Python is compiled. Else the cases of `make test` run. Versions that are not there
are had from Debian's archive, if it has them: built ones with a GIL, sources of those without. VERSIONS=3.13,3.14t in the
environment names some. An interpreter that cannot be had is named, and is no failure.
"""

import os
import subprocess
import sys
import threading
import time
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
sys.path.insert(0, str(ROOT))

from bench.peers import environments  # noqa: E402
from bench.peers.environments import Environment, SetUpError  # noqa: E402
from tools import pythons  # noqa: E402
from tools.requirements import requirements  # noqa: E402

VERSIONS = ("3.12", "3.13", "3.14", "3.13t", "3.14t")
#: What --smoke runs: importing, the pool, a loader, training, captured calls, forks, plug-ins, many threads. All have layers.
SMOKE = (
    "test_public.py",
    "test_pool.py",
    "test_loader_mxfp4.py",
    "test_training.py",
    "test_captured_calls.py",
    "test_forks.py",
    "test_registry.py",
    "test_many_callers.py",
)
#: Seconds after which tests on one interpreter count as hanging.
SMOKE_PATIENCE, PATIENCE = 600, 3600
#: Whether the GIL is on once ktmoe is imported; a warning that it was turned on is an error.
IMPORTS = "import sys, ktmoe, ktmoe.training, ktmoe.quantization; print(getattr(sys, '_is_gil_enabled', lambda: True)())"
ONE_AT_A_TIME = threading.Lock()  # pip writes what it knows of ktmoe into this folder


@dataclass
class Result:
    version: str
    full: str = ""
    gil: str = ""
    said: str = ""
    good: bool = True
    seconds: float = 0.0


def main(arguments: list[str]) -> int:
    smoke = "--smoke" in arguments
    arguments = [argument for argument in arguments if argument != "--smoke"]
    versions = [version for version in os.environ.get("VERSIONS", "").split(",") if version] or VERSIONS
    # small sets of tests run side by side; large ones have all processors, one after another
    with ThreadPoolExecutor(2 if smoke else 1) as pool:
        results = list(pool.map(lambda version: tested(version, smoke, arguments), versions))
    print(f"{'Python':8}{'version':12}{'GIL':6}{'seconds':>8}  result")
    for result in results:
        print(f"{result.version:8}{result.full:12}{result.gil:6}{result.seconds:8.0f}  {result.said}")
    return 0 if all(result.good for result in results) else 1


def tested(version: str, smoke: bool, arguments: list[str]) -> Result:
    result, begun = Result(version), time.monotonic()
    try:
        interpreter = pythons.find(version)
        if interpreter is None and smoke and without_gil(version):
            raise SetUpError("there is none on this machine, and compiling one takes minutes")
        interpreter = environment_of(version, interpreter or pythons.make(version, say))
    except SetUpError as error:
        result.said = f"not found: {error}"
        return result
    failed = _built(interpreter)
    if not failed:
        result.full = printed(interpreter, "import platform; print(platform.python_version())")
        gil = printed(interpreter, IMPORTS, "-W", "error")
        result.gil = {"True": "on", "False": "off"}.get(gil, "?")
        if result.gil == "?" or (result.gil == "on") == without_gil(version):
            failed = f"importing ktmoe: {gil}"
    if failed:
        result.said, result.good = failed, False
    else:
        result.said, result.good = _run(interpreter, version, smoke, arguments)
    result.seconds = time.monotonic() - begun
    say(f"{version}: {result.said}")
    return result


def environment_of(version: str, interpreter: Path) -> Path:
    """The interpreter of an environment that has what building and testing need. Raises SetUpError."""
    needs = list(requirements(("build", "package", "cli", "test")))
    if without_gil(version):  # some projects have wheels of older releases alone; of safetensors, see below
        needs = ["--prefer-binary", *(need for need in needs if not need.startswith("safetensors"))]
    made = Environment(f"python-{version}", f"Python {version}", (tuple(needs),), interpreter=interpreter)
    return environments.python(made, say)


def without_gil(version: str) -> bool:
    return version.endswith("t")


def stand_in(interpreter: Path) -> list[Path]:
    """Folders for PYTHONPATH. safetensors 0.8 has no wheels for Pythons without a GIL, and Rust would have to fetch what it is
    made of. ktmoe needs it for what it makes up alone, and tests to write files."""
    command = [interpreter, "-m", "pip", "install", "-q", "--only-binary", ":all:", "safetensors>=0.8"]
    there = subprocess.run([interpreter, "-c", "import safetensors"], capture_output=True, check=False).returncode == 0
    if there or subprocess.run(command, capture_output=True, check=False).returncode == 0:
        return []
    return [ROOT / "tests" / "stand_in"]


def _built(interpreter: Path) -> str:
    """Build the module and install ktmoe as it is here. What failed, or ""."""
    # the compiler of all is that of this Python, so that they share what does not depend on Python
    variables = os.environ | {
        "CC": os.environ.get("CC") or printed(Path(sys.executable), "import sysconfig; print(sysconfig.get_config_var('CC'))")
    }
    build = [interpreter, "setup.py", "-q", "build_ext", "--inplace"]
    done = subprocess.run(build, cwd=ROOT, env=variables, capture_output=True, text=True, check=False)
    if not done.returncode:
        install = [interpreter, "-m", "pip", "install", "-q", "--no-build-isolation", "--no-deps", "-e", "."]
        with ONE_AT_A_TIME:
            done = subprocess.run(install, cwd=ROOT, env=variables, capture_output=True, text=True, check=False)
    return f"it does not build: {(done.stderr.strip().splitlines() or ['?'])[-1]}" if done.returncode else ""


def _run(interpreter: Path, version: str, smoke: bool, arguments: list[str]) -> tuple[str, bool]:
    """(pytest's last line, whether all is well)."""
    command = [interpreter, "-m", "pytest", "-q", *arguments]
    command += ["-n", "0", *(f"tests/{name}" for name in SMOKE)] if smoke else ["-n", "2", "--dist", "loadfile"]
    # what tests import besides may be built for Pythons with a GIL, and would turn it on
    variables, said = dict(os.environ), ""
    if without_gil(version):
        folders = stand_in(interpreter)
        variables |= {"PYTHON_GIL": "0", "PYTHONPATH": os.pathsep.join(map(str, folders))}
        said = ", without safetensors" if folders else ""
    patience = SMOKE_PATIENCE if smoke else PATIENCE
    try:
        done = subprocess.run(command, cwd=ROOT, env=variables, capture_output=True, text=True, check=False, timeout=patience)
    except subprocess.TimeoutExpired:
        return f"the tests took more than {patience} seconds", False
    if done.returncode:
        print(f"ktmoe: Python {version}:\n{done.stdout}{done.stderr}", flush=True)
    return (done.stdout.strip().splitlines() or ["no output"])[-1].strip("= ") + said, done.returncode == 0


def printed(interpreter: Path, code: str, *options: str) -> str:
    """What code prints, or the last line of why it does not run."""
    done = subprocess.run([interpreter, *options, "-c", code], cwd=ROOT, capture_output=True, text=True, check=False)
    return (done.stderr if done.returncode else done.stdout).strip().rpartition("\n")[2]


def say(text: str) -> None:
    print(f"ktmoe: {text}", flush=True)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
