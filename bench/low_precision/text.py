"""A tiny model that was trained on English text, and what `ktmoe accuracy` says of it: in an environment with transformers."""

from __future__ import annotations

import json
import math
import os
import platform
import subprocess
import tempfile
from collections.abc import Callable
from pathlib import Path

from bench.peers import environments

ROOT = Path(__file__).resolve().parents[2]
MODES = ("int8", "mxfp8", "mxfp8/mxfp4", "mxfp4", "mxfp4:floor", "mxfp4:even")
CONTEXT = 128


def measured(progress: Callable[[str], object]) -> dict:
    """A section of results.SCHEMA. Raises environments.SetUpError; OSError if a program failed."""
    interpreter = environments.python(environments.ENGINES, progress)
    with tempfile.TemporaryDirectory() as folder:
        progress("training a tiny model")
        _run(interpreter, "-m", "bench.low_precision.train", folder)
        return accuracy(interpreter, Path(folder))


def accuracy(interpreter: Path, folder: Path) -> dict:
    """folder: what train.py has made."""
    options = ["--text", folder / "text", "--context", CONTEXT, "--activations", ",".join(MODES), "--json"]
    found = json.loads(_run(interpreter, "-m", "ktmoe", "accuracy", folder / "mxfp4", *options))
    runs = []
    for number, run in enumerate(found["runs"]):
        means = {name: run[name] for name in ("perplexity", "kl", "same_top") if run[name]}
        if run["ln_ratio"]:  # of perplexities, beside bf16: its error by the derivative of exp
            ratio = math.exp(run["ln_ratio"]["mean"])
            means["ratio"] = {"mean": ratio, "standard_error": ratio * run["ln_ratio"]["standard_error"]}
        errors = [layer["runs"][number - 1]["relative_error"] for layer in found["layers"]] if number else []
        layers = {"least_error": min(errors), "most_error": max(errors)} if errors else {}
        runs.append({"activations": run["activations"], **means, **layers})
    return {"python": platform.python_version(), "tokens": found["tokens"], "run": runs}


def _run(*command: object) -> str:
    """stdout. Raises OSError with the last line of stderr."""
    done = subprocess.run(
        [*map(str, command)], cwd=ROOT, env=os.environ | {"PYTHONPATH": str(ROOT)}, capture_output=True, text=True, check=False
    )
    if done.returncode:
        last = (done.stderr.strip().splitlines() or [f"exit code {done.returncode}"])[-1]
        raise OSError(f"{' '.join(map(str, command[1:4]))}: {last}")
    return done.stdout
