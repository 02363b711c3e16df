"""test_sglang.py [pytest's arguments]: tests ktmoe inside SGLang, upstream's and the fork sglang-kt, installed in .venv-peers.

Of SGLang come the wheels and the small packages that its own layer imports: no CUDA build of torch, and no kernels for GPUs.
Ends well, and says why nothing was tested, where they cannot be installed or do not start.
"""

import os
import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
sys.path.insert(0, str(ROOT))

from bench.peers import environments  # noqa: E402
from tools.requirements import requirements  # noqa: E402

#: Where the fork is, which has upstream's module names.
FORK = environments.FOLDER / "sglang" / "fork"
SGLANG = environments.Environment(
    "sglang",
    "SGLang",
    (
        (
            *requirements(("package", "test")),
            *(
                "aiohttp",
                "compressed-tensors==0.20.0",
                "einops",
                "email-validator",
                "fastapi",
                "jsonschema",
                "loguru",
                "msgspec",
            ),
            *("openai", "orjson", "partial-json-parser", "pillow", "pybase64", "pydantic-extra-types", "python-multipart"),
            *("pyzmq", "sentencepiece", "setproctitle", "tiktoken", "uvicorn"),
        ),
        ("--no-deps", "triton", "apache-tvm-ffi", "xgrammar", "sglang==0.5.23"),
        ("--no-deps", "--target", str(FORK), "sglang-kt==0.7.2"),
    ),
    base=environments.TORCH,
)
#: What prints the versions if both are there.
STARTS = (
    "import torch; from importlib.metadata import version; "
    "print(f\"SGLang {version('sglang')} and sglang-kt {version('sglang-kt')} with torch {torch.__version__}\")"
)


def main(arguments: list[str]) -> int:
    try:
        interpreter = environments.python(SGLANG, lambda text: print(f"ktmoe: {text}", flush=True))
    except environments.SetUpError as error:
        return nothing(str(error))
    both = run(interpreter, [FORK], "-c", STARTS, capture_output=True, text=True)
    if both.returncode:
        return nothing(f"it does not start: {(both.stderr.strip().splitlines() or [f'exit code {both.returncode}'])[-1]}")
    print(f"ktmoe: testing in {both.stdout.strip().splitlines()[-1]}", flush=True)
    tests = ("-m", "pytest", "-q", "--exhaustive", "tests/in_sglang", *arguments)
    return max(run(interpreter, folders, *tests).returncode for folders in ([], [FORK]))


def run(interpreter: Path, folders: list[Path], *arguments: str, **options) -> subprocess.CompletedProcess:
    """folders: what the interpreter imports from beside its own packages, and before them."""
    # nothing is fetched, since checkpoints are made here; and they are too small for more threads
    variables = {"HF_HUB_OFFLINE": "1", "TOKENIZERS_PARALLELISM": "false", "OMP_NUM_THREADS": "1"}
    variables["PYTHONPATH"] = os.pathsep.join(map(str, [ROOT, *folders]))
    return subprocess.run([interpreter, *arguments], cwd=ROOT, env=os.environ | variables, check=False, **options)


def nothing(reason: str) -> int:
    print(f"ktmoe: nothing was tested in SGLang: {reason}")
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
