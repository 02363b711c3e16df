# cython: language_level=3
"""The kernel table of portable."""

from cpython.pycapsule cimport PyCapsule_New

from ktmoe._native.core cimport kt_isa


cdef extern from "kernels/portable/kernels.h":
    const kt_isa kt_isa_portable


table = PyCapsule_New(<void *>&kt_isa_portable, "ktmoe.isa", NULL)
