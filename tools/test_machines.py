"""test_machines.py [pytest's arguments]: tests ktmoe on several machines, which are network namespaces of this one.

Distributed layers run over torch.distributed and MPI, and whole models in vLLM. Installs these in .venv-peers first. Ends well,
and says why nothing was tested, where there can be no such machines, or where something cannot be installed.
"""

import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
sys.path[:0] = [str(ROOT), str(ROOT / "tools")]

import test_engines  # noqa: E402

from bench.namespaces import Machines, UnavailableError  # noqa: E402
from bench.peers import environments  # noqa: E402

ALL = (
    test_engines.Engine(environments.ENGINES, "transformers", "tests/engines/test_distributed_machines.py"),
    test_engines.Engine(environments.VLLM, "vllm", "tests/machines"),
)


def main(arguments: list[str]) -> int:
    """pytest's exit code, or 0 where nothing can be tested."""
    try:
        with Machines(2, "1gbit"):
            pass
    except UnavailableError as error:
        print(f"ktmoe: nothing was tested on several machines: {error}", flush=True)
        return 0
    return test_engines.run_all(ALL, arguments)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
