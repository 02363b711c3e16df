# cython: language_level=3, boundscheck=False, wraparound=False, freethreading_compatible=True
"""The driver's face to Python, in one module since the C behind it has one pool. Checks, one nogil block, checks.

placement.pxi: where shards are and which threads serve them. pool.pxi: the pool. tables.pxi: kernel tables. formats.pxi:
formats as the driver has them. records.pxi: codes and scales that stand together. batches.pxi: what one call computes.
training.pxi: what calls have besides in training. packed.pxi: packed experts. passes.pxi: what is computed with them. linear.pxi:
packed dense matrices, and what is computed with these.
captured.pxi: the same in CUDA graphs. arenas.pxi: their arenas in files. quantize.pxi: rounding weights. blocks.pxi: rounding
to MX formats. probe/: what tests and benches look at, and the package never calls. driver/: the C interfaces, by folder.
core.pyi has the types of all this.
The pool's lock is never held together with the GIL: fork takes both.
Nothing here relies on the GIL: what several threads may reach is under the pool's lock, never changed, or a dict of Python's.
"""

import dataclasses
import errno
import math
import operator
import os
import sys

import numpy as np

cimport cython
from cpython.buffer cimport PyBUF_FORMAT, PyBUF_STRIDES, PyBUF_WRITABLE, PyBuffer_Release, PyObject_GetBuffer
from cpython.pycapsule cimport PyCapsule_GetPointer, PyCapsule_New
from libc.errno cimport errno as last_errno
from libc.stdlib cimport calloc, free
from libc.string cimport memcmp, memcpy, memset

from ktmoe._native.ktmoe cimport *
from ktmoe._native.python.driver.base cimport *
from ktmoe._native.python.driver.layer cimport *
from ktmoe._native.python.driver.pack cimport *
from ktmoe._native.python.driver.passes cimport *
from ktmoe._native.python.driver.quantize cimport *
from ktmoe._native.python.probe.driver cimport *

from ktmoe.weights import folding
from ktmoe.weights.elements import ELEMENTS, FAMILIES, UINT4
from ktmoe.weights.grid_records import GridRecords, TernaryRecords
from ktmoe.weights.offsets import Minimum, ZeroPoint
from ktmoe.weights.order import ROWS, Order
from ktmoe.weights.records import Records
from ktmoe.weights.scales import SCALE_KINDS, Scale
from ktmoe.errors import CacheError, ClosedError, FormatError, InputError, OutOfMemoryError, UnavailableError
from ktmoe.experts import PROJECTIONS


def _layout_versions():
    """{family: the version of its packed layout}."""
    versions = {}
    cdef const kt_packing *const *packing = kt_packings
    while packing[0] != NULL:
        family = packing[0].family.decode()
        versions[family] = max(versions.get(family, 0), packing[0].version)  # a family's sizes have one version
        packing += 1
    return versions


LAYOUT_VERSIONS = _layout_versions()


def _cpu_features():
    cdef size_t count = 0
    cdef const kt_cpu_feature *features = kt_cpu_features(&count)
    return {features[i].name.decode(): bool(features[i].present) for i in range(count)}


_FEATURES = _cpu_features()  # it does not change, and every layer that is made asks many times


def cpu_features():
    """{name as in /proc/cpuinfo: whether this CPU has it and the operating system has it enabled}."""
    return dict(_FEATURES)


def permit_tiles():
    """Ask the operating system to let this process use AMX's tiles; 0, or the errno of a refusal. It cannot be undone."""
    return kt_os_permit_tiles()


cdef object _raise(int error, str doing):
    cdef size_t threads
    if error == errno.ENOMEM:
        raise OutOfMemoryError(f"{doing}: the operating system refused memory")
    if error == errno.EAGAIN:
        with nogil:
            threads = kt_pool_threads()
        raise UnavailableError(f"{doing}: could not start {threads} threads; see ktmoe.set_num_threads")
    raise OSError(error, f"{doing}: {os.strerror(error)}")


cdef int _expect_aligned(str name, const void *address, size_t item_bytes) except -1:
    """Check that numbers stand at multiples of their size: C promises nothing for others. Callers copy or refuse them."""
    if <size_t>address % item_bytes:
        raise InputError(f"{name} must be at a multiple of {item_bytes} bytes in memory, found at {<size_t>address}")
    return 0


include "placement.pxi"
include "pool.pxi"
include "tables.pxi"
include "records.pxi"
include "grids.pxi"
include "formats.pxi"
include "blocks.pxi"
include "batches.pxi"
include "training.pxi"
include "packed.pxi"
include "passes.pxi"
include "linear.pxi"
include "captured.pxi"
include "arenas.pxi"
include "quantize.pxi"
include "probe/kernels.pxi"
include "probe/layers.pxi"
include "probe/schedule.pxi"
include "probe/pool.pxi"
