# cython: language_level=3
"""The kernel table of amx."""

from cpython.pycapsule cimport PyCapsule_New

from ktmoe._native.core cimport kt_isa


cdef extern from "kernels/amx/kernels.h":
    const kt_isa kt_isa_amx


table = PyCapsule_New(<void *>&kt_isa_amx, "ktmoe.isa", NULL)
