# cython: language_level=3
"""The kernel table of avx512_bf16."""

from cpython.pycapsule cimport PyCapsule_New

from ktmoe._native.core cimport kt_isa


cdef extern from "kernels/avx512_bf16/kernels.h":
    const kt_isa kt_isa_avx512_bf16


table = PyCapsule_New(<void *>&kt_isa_avx512_bf16, "ktmoe.isa", NULL)
