"""The names that callers import from kt-kernel, served by ktmoe; never comes with ktmoe.

`pip install . ./extras/kt_kernel_shim` installs both. It takes the place of kt-kernel, which must not be installed beside it.
Upstream SGLang needs it not: ktmoe is a plug-in there.
"""

from ktmoe.compat.provided import provide

provide()
