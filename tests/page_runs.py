"""Runs a page of documentation in an environment: a fresh folder, an empty home, no network, that environment's programs."""

from __future__ import annotations

import fcntl
import hashlib
import json
import os
import re
import shutil
import subprocess
import sys
import sysconfig
import tempfile
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from importlib.metadata import distribution
from pathlib import Path

import page_given
import page_models
import page_programs
import pages
import pytest
from page_driver import PAGE, SERVER
from page_programs import ROOT

TESTS = ROOT / "tests"
#: The network of a page: no other machine, and the address that pages of several machines have for this one.
NETWORK = "ip link set lo up; ip link add eth0 type dummy && ip addr add 192.168.0.1/24 dev eth0 && ip link set eth0 up; "
#: Seconds that a page's process may take to end after its own time.
PATIENCE = PAGE + 120


@dataclass(frozen=True)
class Place:
    """An environment. name: one of tests/pages.py. python: its interpreter. variables: of its processes.

    writers: what stands in for a name there, where it is not page_models.WRITERS'. of_pages: the same for one page.
    """

    name: str
    python: Path
    variables: Mapping[str, str] = field(default_factory=dict)
    writers: page_models.Writers = field(default_factory=dict)
    of_pages: Mapping[str, page_models.Writers] = field(default_factory=dict)


def run(page: str, place: Place, folder: Path, text: str | None = None) -> list[int]:
    """Run the blocks of a page that need this environment or none, in page order. Lines of the blocks that ran.

    folder: an empty one. text: of the page, None: what the file says. Raises AssertionError with what failed, and where.
    """
    steps = [block for block in pages.runnable(pages.blocks(page, text)) if block.needs in (pages.CORE, place.name)]
    serves = any(block.language == "sh" and SERVER.search(block.text) for block in steps)
    home, here, site = (folder / name for name in ("home", "page", "site"))
    for each in (home, here, site):
        each.mkdir()
    before = page_given.given(page, place.name)
    page_programs.clone(here)
    shutil.copytree(ROOT / "examples", here / "examples", ignore=shutil.ignore_patterns("build", "*.egg-info", "__pycache__"))
    writers = page_models.WRITERS | dict(place.writers)
    writers |= page_models.OF_PAGES.get(page, {}) | dict(place.of_pages.get(page, {}))
    page_models.prepare(here, writers, steps, before)
    asked = {
        "page": page,
        "before": before,
        "check": page_models.CHECKS.get(page, ""),
        "path": [str(TESTS)],
        "steps": [[block.language, block.line, block.text] for block in steps],
    }
    (folder / "steps").write_text(json.dumps(asked))
    paths = [str(site), *filter(None, [place.variables.get("PYTHONPATH")])]
    environment = {
        **place.variables,
        "PATH": f"{programs(folder / 'bin', place)}:/usr/bin:/bin:/usr/sbin:/sbin",
        "HOME": str(home),
        "LANG": "C.UTF-8",
        "NO_COLOR": "1",
        "PYTHONPATH": os.pathsep.join(paths),
        "PAGE_SITE": str(site),
        "PAGE_BUILDER": sys.executable,
    }
    command = [*alone(serves), place.python, TESTS / "page_driver.py", folder / "steps", folder / "result"]
    with tempfile.TemporaryDirectory() as temporary:  # its path is short, since a socket's path is
        environment["TMPDIR"] = temporary
        options = {"cwd": here, "env": environment, "capture_output": True, "text": True, "timeout": PATIENCE, "check": False}
        done = subprocess.run(command, **options)
    assert (folder / "result").exists(), f"{page}: its process ended with {done.returncode}\n{done.stderr[-4000:]}"
    found = json.loads((folder / "result").read_text())
    assert not found["failed"], found["failed"]
    return found["ran"]


def alone(must: bool) -> list[str]:
    """The beginning of a command that runs without a network. must: its ports are its own, so that nothing else will do."""
    command = ["unshare", "--net", *(() if os.geteuid() == 0 else ("--user", "--map-root-user"))]
    tried = subprocess.run([*command, "ip", "link", "set", "lo", "up"], capture_output=True, text=True, check=False)
    if tried.returncode == 0:
        return [*command, "sh", "-c", f'{NETWORK} exec "$@"', "sh"]
    if must:
        pytest.skip(f"there can be no network namespaces here: {tried.stderr.strip()}")
    return []


def programs(folder: Path, place: Place) -> Path:
    """A folder with the programs that pages call: the environment's, and those of page_programs.py."""
    folder.mkdir()
    checked = f"exec {sys.executable} {TESTS / 'page_programs.py'}"
    own = f"exec {place.python}"
    python = f"""case "$1 $2" in
"-m venv") {checked} venv "$@";;
"-m pip") shift 2; {checked} pip "$@";;
"-m bench."*) shift; {checked} module "$@";;
esac
{own} "$@"
"""
    scripts = {name: f'{checked} {name} "$@"\n' for name in ("pip", "uv", "make", "git")}
    scripts |= dict.fromkeys(("python", "python3"), python)
    for program in place.python.parent.iterdir():
        if program.name in ("torchrun", "mpiexec", "vllm"):
            scripts[program.name] = f'exec {program} "$@"\n'
    installed = place.python.with_name("ktmoe")
    scripts["ktmoe"] = f'exec {installed} "$@"\n' if place.name == pages.CORE else f'{own} -m ktmoe "$@"\n'
    for name, script in scripts.items():
        (folder / name).write_text(f"#!/bin/sh\n{script}")
        (folder / name).chmod(0o755)
    return folder


def core() -> Place:
    """An environment that holds the wheel of this tree, its dependencies and those of the extra cli, and nothing else.

    It is kept beside what the build keeps, and made again if the tree has changed.
    """
    folder = ROOT / "build" / "pages" / str(sysconfig.get_config_var("SOABI"))  # of one Python
    folder.mkdir(parents=True, exist_ok=True)
    with (folder / "lock").open("w") as lock:  # pytest-xdist has several processes
        fcntl.flock(lock, fcntl.LOCK_EX)
        stamp, wanted, made = folder / "stamp", _fingerprint(), folder / "environment"
        if not stamp.exists() or stamp.read_text() != wanted:
            shutil.rmtree(made, ignore_errors=True)
            subprocess.run([sys.executable, "-m", "venv", "--without-pip", made], check=True)
            site = Path(sysconfig.get_path("purelib", "venv", {"base": str(made)}))
            for name in _needed(page_programs.project(ROOT)):
                for part in {Path(file).parts[0] for file in distribution(name).files or ()} - {"..", "__pycache__"}:
                    (site / part).symlink_to(distribution(name).locate_file(part))
            _install(made / "bin" / "python", folder / "source")
            stamp.write_text(wanted)
    return Place(pages.CORE, made / "bin" / "python")


def _install(python: Path, source: Path) -> None:
    """Build the wheel from a copy of the tree that has the objects of this one, and install it."""
    shutil.rmtree(source, ignore_errors=True)
    shutil.copytree(ROOT / "ktmoe", source / "ktmoe", ignore=shutil.ignore_patterns("__pycache__", "*.so"))
    (source / "tools").mkdir()
    for name in ("setup.py", "pyproject.toml", "README.md", "LICENSE", "tools/check_machine.sh"):
        shutil.copy2(ROOT / name, source / name)
    (source / "build").mkdir()
    for name in ("native", "cython"):
        if (ROOT / "build" / name).is_dir():
            (source / "build" / name).symlink_to(ROOT / "build" / name)
    offline = ["--no-build-isolation", "--no-deps", "--no-index", "--no-cache-dir", "--disable-pip-version-check"]
    pip = [sys.executable, "-m", "pip"]
    _call([*pip, "wheel", "-q", *offline, "-w", source / "dist", source])
    _call([*pip, "--python", python, "install", "-q", *offline, *(source / "dist").iterdir()])


def _call(command: list) -> None:
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stdout + done.stderr


def _needed(project: dict) -> Iterable[str]:
    """Names of what a wheel and its extra cli need, and of what these need."""
    found: list[str] = []
    waiting = [*project["dependencies"], *project["optional-dependencies"]["cli"]]
    while waiting:
        name = re.match(r"[\w.-]+", waiting.pop())[0].lower()
        if name not in found:
            found.append(name)
            waiting += [text for text in distribution(name).requires or () if ";" not in text]
    return found


def _fingerprint() -> str:
    """Of what the wheel is made from."""
    digest = hashlib.sha256(sys.version.encode())
    files = [path for path in (ROOT / "ktmoe").rglob("*") if path.is_file() and "__pycache__" not in path.parts]
    for path in sorted([*files, ROOT / "setup.py", ROOT / "pyproject.toml"]):
        if path.suffix != ".so":
            digest.update(f"{path.relative_to(ROOT)}\0".encode() + path.read_bytes())
    return digest.hexdigest()
