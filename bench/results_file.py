"""bench/results/<cpu>.toml: what was measured on one CPU. bench/README.md says what the fields mean; here they are checked.

Only what a results file holds is here, so that reading one needs nothing but Python.
"""

from __future__ import annotations

import math
import re
import tomllib
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

from bench.results_schema import SCHEMA

FOLDER = Path(__file__).with_name("results")


class ResultsError(ValueError):
    """A results file, or what is to become one, is not as SCHEMA has it; the message names the field."""


@dataclass(frozen=True)
class Results:
    """A file's fields, as SCHEMA has them."""

    data: dict

    @property
    def cpu(self) -> str:
        cpu = self.data["cpu"]
        return cpu_name(cpu["name"], cpu["family"], cpu["model"])

    @property
    def label(self) -> str:
        """What tables call it. Two threads go without saying."""
        threads = self.data["cpu"]["threads"]
        return self.cpu if threads == 2 else f"{self.cpu}, {threads} threads"

    @property
    def file_name(self) -> str:
        return file_stem(f"{self.cpu} {self.data['cpu']['threads']} threads") + ".toml"

    def entries(self, section: str) -> list[dict]:
        return self.data.get(section, [])

    def of_one_stream(self, section: str = "limits") -> bool:
        """Whether a section's shares are of what one stream of reads for each core reads, and no more streams were tried.

        So were all of before. One stream is not the most that a memory can do.
        """
        return "read_streams" not in self.data.get(section, {})


def short_name(name: str) -> str:
    """A CPU's name without trade marks, clock and words that say nothing."""
    name = re.sub(r"\((R|TM)\)|@.*|\b(CPU|Processor|\d+-Core)\b", " ", name, flags=re.IGNORECASE)
    return " ".join(name.split())


def cpu_name(name: str, family: int, model: int) -> str:
    """Makers name many virtual machines' CPUs alike, so family and model are in it."""
    return f"{short_name(name)} {family}-{model}"


def file_stem(words: str) -> str:
    """A file's name without its ending: small letters, digits and hyphens."""
    return re.sub(r"[^a-z0-9]+", "-", words.lower()).strip("-")


def read(path: Path) -> Results:
    """Raises ResultsError, which names file and field."""
    return Results(read_as(path, SCHEMA))


def read_as(path: Path, schema: dict) -> dict:
    """A file of another schema. Raises ResultsError, which names file and field."""
    try:
        data = tomllib.loads(path.read_text())
    except (OSError, tomllib.TOMLDecodeError) as error:
        raise ResultsError(f"{path}: {error}") from None
    check(data, str(path), schema)
    return data


def write_as(data: dict, path: Path, schema: dict, rounded: Callable[[float], float]) -> None:
    """The other way round. rounded: what becomes of each float."""
    import tomli_w  # only whoever measures or simulates needs it

    data = _each_float(data, rounded)
    check(data, str(path), schema)
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(tomli_w.dumps(data))


def _each_float(value, change: Callable[[float], float]):
    if isinstance(value, dict):
        return {name: _each_float(item, change) for name, item in value.items()}
    if isinstance(value, list):
        return [_each_float(item, change) for item in value]
    return change(value) if isinstance(value, float) else value


def read_all(folder: Path = FOLDER) -> list[Results]:
    """All files of a folder, what was measured last first."""
    found = [read(path) for path in sorted(folder.glob("*.toml"))]
    return sorted(found, key=lambda results: results.data["date"], reverse=True)


def newest(found: list[Results], section: str) -> tuple[str, dict] | None:
    """(label, section) of the file that was measured last, of those that have the section."""
    return next(((results.label, results.data[section]) for results in found if section in results.data), None)


def check(value: object, where: str, kind: object = None) -> None:
    """Raises ResultsError where value is not what kind, or SCHEMA, says. Numbers are finite and not negative."""
    kind = SCHEMA if kind is None else kind
    if isinstance(kind, list):
        _expect(isinstance(value, list), where, "a list", value)
        for number, item in enumerate(value):
            check(item, f"{where}[{number}]", kind[0])
    elif isinstance(kind, dict):
        _expect(isinstance(value, dict), where, "a table", value)
        known = dict.fromkeys(value, kind[str]) if str in kind else {name.rstrip("?"): of for name, of in kind.items()}
        required = {name for name in kind if name is not str and not name.endswith("?")}
        unknown, missing = sorted(set(value) - set(known)), sorted(required - set(value))
        if unknown or missing:
            raise ResultsError(f"{where}: unknown fields {unknown}, missing fields {missing}; known are {', '.join(known)}")
        for name, item in value.items():
            check(item, f"{where}: {name}", known[name])
    elif kind is float or kind is int:
        numbers = int if kind is int else (int, float)
        right = isinstance(value, numbers) and not isinstance(value, bool) and math.isfinite(value) and value >= 0
        _expect(right, where, "a whole number" if kind is int else "a number", value)
    else:
        _expect(type(value) is kind, where, f"a {kind.__name__}", value)


def _expect(right: bool, where: str, expected: str, found: object) -> None:
    if not right:
        raise ResultsError(f"{where}: expected {expected}, found {found!r}")


def digits(value: float) -> float:
    """The value with as many digits as files have."""
    return float(f"{value:.4g}")
