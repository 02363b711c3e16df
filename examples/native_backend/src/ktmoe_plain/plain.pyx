# cython: language_level=3
"""The kernel table of plain."""

from cpython.pycapsule cimport PyCapsule_New

from ktmoe._native.ktmoe cimport kt_isa


cdef extern from "kernels/plain/kernels.h":
    const kt_isa kt_isa_plain


table = PyCapsule_New(<void *>&kt_isa_plain, "ktmoe.isa", NULL)
