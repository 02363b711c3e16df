# cython: language_level=3
"""The kernel table of avx2."""

from cpython.pycapsule cimport PyCapsule_New

from ktmoe._native.core cimport kt_isa


cdef extern from "kernels/avx2/kernels.h":
    const kt_isa kt_isa_avx2


table = PyCapsule_New(<void *>&kt_isa_avx2, "ktmoe.isa", NULL)
