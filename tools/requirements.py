"""requirements.py [build] [package] [EXTRA ...]: prints requirements of pyproject.toml, one a line, for pip install -r."""

import re
import sys
import tomllib
from collections.abc import Iterable, Iterator
from pathlib import Path

PYPROJECT = Path(__file__).resolve().parents[1] / "pyproject.toml"


def requirements(names: Iterable[str]) -> Iterator[str]:
    """Of the build, of the package itself, and of its extras; an extra may name others, as "ktmoe[cli]"."""
    pyproject = tomllib.loads(PYPROJECT.read_text())
    known = {
        "build": pyproject["build-system"]["requires"],
        "package": pyproject["project"]["dependencies"],
        **pyproject["project"]["optional-dependencies"],
    }
    for requirement in (requirement for name in names for requirement in known[name]):
        own = re.fullmatch(r"ktmoe\[(.*)\]", requirement)
        yield from requirements(own[1].split(",")) if own else (requirement,)


if __name__ == "__main__":
    print("\n".join(requirements(sys.argv[1:])))
