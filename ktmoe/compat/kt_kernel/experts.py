"""kt_kernel.experts: the names that callers import from there."""

from ktmoe.compat.kt_kernel import KTMoEWrapper
from ktmoe.compat.methods import MODES

INFERENCE_METHODS, SFT_METHODS = (frozenset(MODES[mode]) for mode in ("inference", "sft"))

__all__ = ["INFERENCE_METHODS", "SFT_METHODS", "KTMoEWrapper"]
