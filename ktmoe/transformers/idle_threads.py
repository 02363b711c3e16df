"""torch's idle threads: whether they spin on the CPUs that ktmoe's threads need."""

from __future__ import annotations

import functools
import os
import warnings

import torch

#: What tells an OpenMP how long idle threads spin. Each reads them once, when torch is imported.
_SETTINGS = ("OMP_WAIT_POLICY", "GOMP_SPINCOUNT", "KMP_BLOCKTIME")
_chosen = any(name in os.environ for name in _SETTINGS)  # now, just after that: what is set later has no effect


@functools.cache  # once a process
def warn_of_spinning() -> None:
    """Warn if torch has several threads, and nobody has said how long they spin when they are idle."""
    if _chosen or not torch.backends.openmp.is_available() or torch.get_num_threads() == 1:
        return
    warnings.warn(
        "torch's idle threads spin on the CPUs that ktmoe's threads need. On a busy machine text may then take several times "
        "as long. "
        "OpenMP reads OMP_WAIT_POLICY once, when torch is imported: start Python with OMP_WAIT_POLICY=passive, or put "
        "os.environ['OMP_WAIT_POLICY'] = 'passive' before the first import of torch or ktmoe.transformers. "
        "The value 'active' keeps them spinning without this warning",
        RuntimeWarning,
        stacklevel=2,
    )
