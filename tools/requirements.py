"""requirements.py [build] [package] [EXTRA ...]: prints requirements of pyproject.toml, one a line, for pip install -r."""

import sys
import tomllib
from pathlib import Path

pyproject = tomllib.loads((Path(__file__).resolve().parents[1] / "pyproject.toml").read_text())
known = {
    "build": pyproject["build-system"]["requires"],
    "package": pyproject["project"]["dependencies"],
    **pyproject["project"]["optional-dependencies"],
}
print("\n".join(requirement for name in sys.argv[1:] for requirement in known[name]))
