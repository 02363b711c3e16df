"""test_engines.py [pytest's arguments]: tests ktmoe.transformers inside transformers, which it first installs in .venv-peers.

Ends well, and says why nothing was tested, where transformers and torch cannot be installed or do not start.
"""

import os
import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
sys.path.insert(0, str(ROOT))

from bench.peers import environments  # noqa: E402

#: What prints the versions if both can be loaded.
STARTS = "import torch, transformers; print(f'transformers {transformers.__version__} with torch {torch.__version__}')"


def main(arguments: list[str]) -> int:
    try:
        interpreter = environments.python(environments.ENGINES, lambda text: print(f"ktmoe: {text}", flush=True))
    except environments.SetUpError as error:
        return nothing(str(error))
    started = subprocess.run([interpreter, "-c", STARTS], capture_output=True, text=True, check=False)
    if started.returncode:
        return nothing(f"it does not start: {(started.stderr.strip().splitlines() or [f'exit code {started.returncode}'])[-1]}")
    print(f"ktmoe: testing in {started.stdout.strip().splitlines()[-1]}", flush=True)
    command = [interpreter, "-m", "pytest", "-q", "--exhaustive", "tests/engines", *arguments]
    # nothing is fetched, since models are made here; and they are too small for more threads
    variables = {"PYTHONPATH": str(ROOT), "HF_HUB_OFFLINE": "1", "TOKENIZERS_PARALLELISM": "false", "OMP_NUM_THREADS": "1"}
    return subprocess.run(command, cwd=ROOT, env=os.environ | variables, check=False).returncode


def nothing(reason: str) -> int:
    print(f"ktmoe: nothing was tested in transformers: {reason}")
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
