# cython: language_level=3
"""The kernel table of avx_vnni."""

from cpython.pycapsule cimport PyCapsule_New

from ktmoe._native.core cimport kt_isa


cdef extern from "kernels/avx_vnni/kernels.h":
    const kt_isa kt_isa_avx_vnni


table = PyCapsule_New(<void *>&kt_isa_avx_vnni, "ktmoe.isa", NULL)
