"""SGLang's plug-in: its layers for experts on GPU and CPU (--kt-weight-path) find ktmoe under the name kt_kernel.

SGLang calls register() in each of its processes, by the entry point group "sglang.srt.plugins". A scheduler is a new process
whose modules import kt_kernel before that, and remember that there is none; they are told again.
"""

from __future__ import annotations

import importlib.util
import logging
import multiprocessing
import os
import sys
from types import ModuleType

from ktmoe.compat import kt_kernel
from ktmoe.compat.provided import provide
from ktmoe.errors import InputError

#: "1": ktmoe, whatever is installed. "0": never. Else ktmoe unless there is a kt_kernel.
VARIABLE = "KTMOE_SGLANG"
#: Where SGLang's modules remember whether there is a kt_kernel, beside its names.
FLAG = "KTRANSFORMERS_AVAILABLE"

logger = logging.getLogger(__name__)


def register() -> None:
    """Give SGLang the name kt_kernel; a second call changes nothing.

    A kt-kernel that is installed stays unless KTMOE_SGLANG=1, which the first process says in one line.
    Raises InputError for another KTMOE_SGLANG than 0 and 1.
    """
    wanted = os.environ.get(VARIABLE, "")
    if wanted not in ("", "0", "1"):
        raise InputError(f"{VARIABLE} must be 0, 1 or nothing, found {wanted!r}")
    if wanted == "0":
        return
    other = None if wanted == "1" else _other()
    if other is None:
        provide()
        for module in _importers():
            vars(module).update({name: getattr(kt_kernel, name) for name in kt_kernel.__all__}, **{FLAG: True})
    elif multiprocessing.parent_process() is None:  # SGLang shows no line below this level before it reads its arguments
        logger.warning(
            "kt_kernel is installed (%s): SGLang asks it for experts on the CPU, and not ktmoe; "
            "%s=1 gives them to ktmoe, %s=0 leaves this line out",
            other,
            VARIABLE,
            VARIABLE,
        )


def _other() -> str | None:
    """Where a kt_kernel is that is not ktmoe's. kt-kernel is a package; ktmoe's own, of extras/kt_kernel_shim, is a module.

    A folder of that name without code, as pip leaves one that has other files, is none, also where Python imported it.
    """
    there = sys.modules.get("kt_kernel")
    if there is not None:
        return None if there is kt_kernel else getattr(there, "__file__", None)
    spec = importlib.util.find_spec("kt_kernel")
    return None if spec is None or spec.submodule_search_locations is None else spec.origin


def _importers() -> list[ModuleType]:
    """The modules of SGLang that asked for kt_kernel."""
    modules = [module for name, module in [*sys.modules.items()] if name.partition(".")[0] == "sglang"]
    return [module for module in modules if isinstance(module, ModuleType) and FLAG in vars(module)]
