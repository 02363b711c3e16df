"""The names that callers import from kt-kernel, served by ktmoe; never comes with ktmoe.

`pip install . ./extras/kt_kernel_shim` installs both. It takes the place of kt-kernel, which must not be installed beside it.
There is no kt_kernel_ext.
"""

from ktmoe.compat.kt_kernel import KTMoEWrapper, generate_gpu_experts_masks

#: The version of kt-kernel whose interface this is.
__version__ = "0.7.2+ktmoe"

__all__ = ["KTMoEWrapper", "generate_gpu_experts_masks"]
