# cython: language_level=3
"""The kernel table of avx512_vnni."""

from cpython.pycapsule cimport PyCapsule_New

from ktmoe._native.core cimport kt_isa


cdef extern from "kernels/avx512_vnni/kernels.h":
    const kt_isa kt_isa_avx512_vnni


table = PyCapsule_New(<void *>&kt_isa_avx512_vnni, "ktmoe.isa", NULL)
