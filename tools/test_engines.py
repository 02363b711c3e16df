"""test_engines.py [pytest's arguments]: tests ktmoe in transformers and in vLLM, which it first installs in .venv-peers.

Ends well, and says why nothing was tested in one of them, where it cannot be installed or does not start.
"""

import os
import subprocess
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
sys.path.insert(0, str(ROOT))

from bench.peers import environments  # noqa: E402
from bench.peers.environments import Environment  # noqa: E402

#: pytest's exit code where its arguments, such as -k, leave no test.
NO_TESTS = 5


@dataclass(frozen=True)
class Engine:
    """package: what is imported. tests: the folder of its tests."""

    environment: Environment
    package: str
    tests: str

    @property
    def starts(self) -> str:
        """What prints the versions if it can be loaded."""
        title = self.environment.title
        return f"import torch, {self.package} as it; print(f'{title} {{it.__version__}} with torch {{torch.__version__}}')"


ALL = (
    Engine(environments.ENGINES, "transformers", "tests/engines"),
    Engine(environments.VLLM, "vllm", "tests/vllm"),
)


def main(arguments: list[str]) -> int:
    return run_all(ALL, arguments)


def run_all(engines: Sequence[Engine], arguments: list[str]) -> int:
    """pytest's exit code of the worst run; that no test was left counts where it is so in all."""
    codes = {run(engine, arguments) for engine in engines}
    return max(codes if codes == {NO_TESTS} else codes - {NO_TESTS}, key=abs)


def run(engine: Engine, arguments: list[str]) -> int:
    """pytest's exit code, or 0 where the engine cannot be had."""
    try:
        interpreter = environments.python(engine.environment, lambda text: print(f"ktmoe: {text}", flush=True))
    except environments.SetUpError as error:
        return nothing(engine, str(error))
    started = subprocess.run([interpreter, "-c", engine.starts], capture_output=True, text=True, check=False)
    if started.returncode:
        last = (started.stderr.strip().splitlines() or [f"exit code {started.returncode}"])[-1]
        return nothing(engine, f"it does not start: {last}")
    print(f"ktmoe: testing in {started.stdout.strip().splitlines()[-1]}", flush=True)
    command = [interpreter, "-m", "pytest", "-q", "--exhaustive", engine.tests, *arguments]
    # nothing is fetched, since models are made here; and they are too small for more threads
    variables = {"PYTHONPATH": str(ROOT), "HF_HUB_OFFLINE": "1", "TOKENIZERS_PARALLELISM": "false", "OMP_NUM_THREADS": "1"}
    return subprocess.run(command, cwd=ROOT, env=os.environ | variables, check=False).returncode


def nothing(engine: Engine, reason: str) -> int:
    print(f"ktmoe: nothing was tested in {engine.environment.title}: {reason}", flush=True)
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
