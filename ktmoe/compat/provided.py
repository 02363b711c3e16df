"""The module name kt_kernel, for callers of kt-kernel that are not changed."""

from __future__ import annotations

import sys

from ktmoe.compat import kt_kernel
from ktmoe.compat.kt_kernel import experts, sft

#: What `import` finds under these names. There is no kt_kernel_ext.
MODULES = {"kt_kernel": kt_kernel, "kt_kernel.experts": experts, "kt_kernel.sft": sft}


def provide() -> None:
    """Make kt_kernel ktmoe's in this process, also where kt-kernel is imported already; who has its names keeps them."""
    for name in [name for name in [*sys.modules] if name.partition(".")[0] == "kt_kernel"]:
        del sys.modules[name]
    sys.modules.update(MODULES)
