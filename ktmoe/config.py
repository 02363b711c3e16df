"""show_config(): what was compiled, what this CPU supports, what is chosen and why."""

from __future__ import annotations

import platform
from pathlib import Path
from typing import Any

from ktmoe import backends, loaders
from ktmoe._native import core
from ktmoe.backends.base import Backend, Found, Missing
from ktmoe.backends.choice import choose_backend
from ktmoe.machine import numa, threads
from ktmoe.version import installed_version


def get_include() -> str:
    """The folder with ktmoe.h and pack/layout.h, for a native backend's C compiler: ktmoe/_native, which holds ktmoe.pxd for
    Cython, too.

    Examples:
        >>> "ktmoe.h" in os.listdir(ktmoe.get_include())
        True
    """
    return str(Path(__file__).parent / "_native")


def config() -> dict[str, Any]:
    """What show_config() prints, as data."""
    return {
        "version": installed_version(),
        "python": platform.python_version(),
        "cpu": threads.cpu_name(),
        "features": [name for name, present in core.cpu_features().items() if present],
        "threads": threads.get_num_threads(),
        "threads_why": threads.explain_default(),
        "numa_nodes": list(numa.place().nodes),
        "numa_nodes_why": numa.explain_default(),
        "l3_caches": [len(domain.one_a_core) for of_node in numa.place().domains for domain in of_node],
        **backend_choice(),
        "loaders": loaders.names(),
    }


def backend_choice() -> dict[str, Any]:
    """config()'s backends, which one is chosen, and why."""
    try:
        chosen, why, _ = choose_backend("auto")
    except Exception as error:  # a wrong KTMOE_BACKEND is what show_config is asked about
        chosen, why = None, str(error)
    # after the choice, for which the operating system may have refused something
    rows = {name: _row(backends.get(name)) for name in backends.ranked()}
    return {"backends": rows, "chosen": chosen, "chosen_why": why}


def _row(backend: Backend) -> dict[str, Any]:
    found = backend.lookup()
    if isinstance(found, Missing):
        return {"available": False, "why_not": found.reason, "isa": None, "activations": []}
    modes = [mode for mode in backend.modes if isinstance(backend.lookup(None, mode), Found)]
    return {"available": True, "why_not": None, "isa": found.table and found.table.name, "activations": modes}


def show_config() -> None:
    """Print what was compiled, what this CPU supports, and what would be chosen and why.

    Examples:
        >>> ktmoe.show_config()
        ktmoe ..., Python ...
        CPU: ...
        chosen: ...
        loaders: awq, bf16, ...
    """
    c = config()
    print(f"ktmoe {c['version']}, Python {c['python']}")
    print(f"CPU: {c['cpu']}; {' '.join(c['features']) or 'no feature beyond the baseline'}")
    print(f"threads: {c['threads']} ({c['threads_why']})")
    print(f"NUMA nodes: {c['numa_nodes_why']}")
    if len(c["l3_caches"]) > 1:
        print(f"L3 caches: {len(c['l3_caches'])}, of {', '.join(map(str, c['l3_caches']))} physical cores")
    print("backends, best first:")
    for name, row in c["backends"].items():
        kernels = f", kernels of {row['isa']}" if row["isa"] else ""
        modes = f", activations {', '.join(row['activations'])}"
        state = f"available{kernels}{modes}" if row["available"] else f"not available: {row['why_not']}"
        print(f"  {name}: {state}")
    print(f"chosen: {c['chosen'] or 'none'} ({c['chosen_why']})")
    print(f"loaders: {', '.join(c['loaders'])}")
