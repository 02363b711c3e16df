"""bench/results/<cpu>.toml: what was measured on one CPU. bench/README.md says what the fields mean; here they are checked.

Only what a results file holds is here, so that reading one needs nothing but Python.
"""

from __future__ import annotations

import datetime
import math
import re
import tomllib
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

FOLDER = Path(__file__).with_name("results")

#: The fields of one call or kernel. Shares are of the limits that the same rounds measured.
CALL = {"ms?": float, "gb_s?": float, "of_read?": float, "gflop_s?": float, "of_peak?": float}
#: The fields of generate(). experts: their share of the time.
RATE = {"tokens_s": float, "lead?": float, "experts": float}
LOADING = (
    "seconds",
    "gb_s",
    "of_memcpy",
    "of_reading",
    "of_reading_into_new_memory",
    "parsing_seconds",
    "peak_rss_of_packed",
    "packed_of_checkpoint",
)
#: Text of whole models. file: the types of a GGUF file.
TEXTS = {
    "date": datetime.date,
    "commit?": str,
    "source": str,
    "comparison": [
        {
            "model": str,
            "file?": str,
            "layers": int,
            "of_layers": int,
            "vocabulary": int,
            "by_turns": bool,
            "way": [
                {
                    "name": str,
                    "error?": float,
                    "resident_gb": float,
                    "mapped_gb": float,
                    "packed_gb": float,
                    "load_s": float,
                    "prefill": [{"tokens": int, "tokens_s": float, "ratio?": float}],
                    "decode": [{"texts": int, "after": int, "tokens_s": float, "ratio?": float, "of_limit?": float}],
                }
            ],
        }
    ],
}
#: A dict has these fields, and those with a question mark if they are known. [kind] is a list, {str: kind} has any names.
SCHEMA = {
    "date": datetime.date,
    "commit": str,
    "source": str,
    "ktmoe?": str,
    "compiler?": str,
    "cpu": {
        "name": str,
        "family": int,
        "model": int,
        "stepping?": int,
        "features?": [str],
        "threads": int,
        "l2_bytes?": int,
        "llc_bytes?": int,
    },
    "limits?": {"read_gb_s?": float, "read_streams?": int, "handoff_us?": float, "multiply_gflop_s?": {str: float}},
    "layer?": [
        {
            "model": str,
            "weights": str,
            "backend": str,
            "isa": str,
            "activations": str,
            "rounding": str,
            "tuned_for?": str,
            "experts": int,
            "copies": int,
            "bound?": float,
            "decode?": [{"tokens": int, **CALL}],
            "prefill?": [{"tokens": int, **CALL}],
            "per_expert?": [{"rows": int, "experts": int, **CALL}],
        }
    ],
    "kernel?": [
        {
            "weights": str,
            "isa": str,
            "activations": str,
            "scales": str,
            "memory?": [{"rows": int, **CALL}],
            "l2?": [{"rows": int, **CALL}],
        }
    ],
    "pool?": [{"work": str, "us": float, "low_us?": float, "high_us?": float, "of_call?": float}],
    "load?": [{"work": str, **{f"{name}?": float for name in LOADING}}],
    "modes?": {
        "date": datetime.date,
        "commit": str,
        "source": str,
        "model": str,
        "experts": int,
        "mode": [
            {
                "backend": str,
                "isa": str,
                "form": str,
                "activations": str,
                "beside": str,
                "call": [{"work": str, "tokens": int, "ms": float, "ratio": float}],
            }
        ],
    },
    "linear?": {
        "date": datetime.date,
        "commit": str,
        "source": str,
        "call": [
            {
                "model": str,
                "call": str,
                "weights": str,
                "backend": str,
                "isa": str,
                "activations": str,
                "shapes": [[int]],
                "dispatches": int,
                "copies": int,
                "cached": bool,
                "nbytes": int,
                "bound": float,
                "point": [{"rows": int, **CALL}],
            }
        ],
    },
    "linear_peers?": {
        "date": datetime.date,
        "commit?": str,
        "source": str,
        "call": [
            {
                "model": str,
                "call": str,
                "weights": str,
                "shapes": [[int]],
                "dispatches": int,
                "copies": int,
                "library": [
                    {
                        "name": str,
                        "version": str,
                        "weights": str,
                        "activations": str,
                        "bytes": int,
                        "most_error": float,
                        "point": [{"rows": int, "ms": float, "lead?": float, "of_read": float, "of_peak": float}],
                    }
                ],
            }
        ],
    },
    "peers?": [
        {
            "weights": str,
            "date": datetime.date,
            "commit?": str,
            "source": str,
            "experts": int,
            "auto?": str,
            "int8?": str,
            "library": [
                {
                    "name": str,
                    "version?": str,
                    "activations": str,
                    "least_error?": float,
                    "most_error?": float,
                    "calls": [{"tokens": int, "ms": float, "lead?": float, "int8_lead?": float}],
                }
            ],
        }
    ],
    "training?": {
        "date": datetime.date,
        "commit?": str,
        "source": str,
        "model": str,
        "rank": int,
        "run": [
            {
                "experts": int,
                "tokens": int,
                "rows": int,
                "participant": [
                    {
                        "name": str,
                        "forward_gflop_s": float,
                        "forward_of_peak": float,
                        "backward_gflop_s": float,
                        "backward_of_peak": float,
                        "step_s": float,
                        "ratio": float,
                        "loaded_gb?": float,
                        "step_gb?": float,
                        "error?": float,
                    }
                ],
            }
        ],
    },
    "engines?": {
        "date": datetime.date,
        "commit?": str,
        "source": str,
        "read_streams?": int,
        "comparison": [
            {
                "model": str,
                "layers": int,
                "of_layers": int,
                "vocabulary": int,
                "way": [
                    {
                        "name": str,
                        "weights": str,
                        "environment?": {str: str},
                        "error?": float,
                        "peak_gb": float,
                        "load_s?": float,
                        "prefill": [{"tokens": int, **RATE}],
                        "decode": [{"texts": int, **RATE, "read_gb_s": float, "of_read": float}],
                    }
                ],
            }
        ],
    },
    "whole?": TEXTS,
    "gguf?": TEXTS,
    "cold?": {
        "date": datetime.date,
        "commit?": str,
        "source": str,
        "comparison": [
            {
                "model": str,
                "file": str,
                "layers": int,
                "of_layers": int,
                "vocabulary": int,
                "file_gb": float,
                "disk_gb_s": float,
                "way": [
                    {
                        "name": str,
                        "read": str,
                        "before_s": float,
                        "load_s": float,
                        "token_s": float,
                        "of_disk?": float,
                        "total_s": float,
                        "ratio?": float,
                        "ratio_after?": float,
                    }
                ],
            }
        ],
    },
    "vllm?": {
        "date": datetime.date,
        "commit?": str,
        "source": str,
        "version": str,
        "model": str,
        "layers": int,
        "of_layers": int,
        "way": [
            {
                "name": str,
                "weights": str,
                "environment?": {str: str},
                "memory_gb": float,
                "load_s": float,
                "prefill": [{"tokens": int, "tokens_s": float, "lead?": float}],
                "decode": [{"texts": int, "tokens_s": float, "lead?": float}],
            }
        ],
    },
    "vllm_servers?": {
        "date": datetime.date,
        "commit?": str,
        "source": str,
        "version": str,
        "model": str,
        "layers": int,
        "of_layers": int,
        "prompt": int,
        "new": int,
        "read_gb_s": float,
        "read_streams": int,
        "server": [
            {
                "name": str,
                "weights": str,
                "of": str,
                "options": str,
                "environment?": {str: str},
                "users": [
                    {
                        "users": int,
                        "texts": int,
                        "first_s": float,
                        "decode_tokens_s": float,
                        "decode_lead?": float,
                        "tokens_s": float,
                        "lead?": float,
                    }
                ],
            }
        ],
    },
    "vllm_dense?": {
        "date": datetime.date,
        "commit?": str,
        "source": str,
        "layer": [
            {"name": str, "n": int, "k": int, "gb_s": float, "tokens": [{"tokens": int, "lead": float}]},
        ],
    },
    "distributed?": {
        "date": datetime.date,
        "commit?": str,
        "source": str,
        "model": str,
        "weights": str,
        "experts": int,
        "top_k": int,
        "hidden": int,
        "intermediate": int,
        "shards": int,
        "absent": {str: str},
        "group": [
            {
                "network": str,
                "communicator": str,
                "ranks": int,
                "cpus": int,
                "shared": bool,
                "latency_us?": float,
                "gb_s?": float,
                "packed_gb": float,
                "exchange": [{"bytes": int, "us": float}],
                "call": [
                    {
                        "tokens": str,
                        "count": int,
                        "ms": float,
                        "messages_ms": float,
                        "compute_ms": float,
                        "host_ms": float,
                        "model_ms": float,
                        "alone_ms": float,
                        "ratio": float,
                        "rounds": int,
                        "bytes": int,
                    }
                ],
            }
        ],
    },
    "soak?": {
        "date": datetime.date,
        "commit": str,
        "source": str,
        "row": [{"what": str, "done": int, "of": int, "seconds": float, "most": {str: float}}],
    },
    "cost?": [{"isa": str, "activations": str, "decode_ns": float, "efficiency": float, "overlap": float}],
}


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
