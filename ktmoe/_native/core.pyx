# cython: language_level=3, boundscheck=False, wraparound=False
"""The driver's face to Python: CPU features, the pool, kernel tables, packed layers. Checks, one nogil block, checks.

The pool's lock is never held together with the GIL: fork takes both.
"""

import errno
import os

import numpy as np

from cpython.pycapsule cimport PyCapsule_GetPointer
from libc.stdlib cimport calloc, free
from libc.string cimport memcpy, memset

from ktmoe._native.driver cimport *

from ktmoe import codebook
from ktmoe.errors import ClosedError, FormatError, InputError, OutOfMemoryError, UnavailableError

LAYOUT_VERSIONS = {"q4": KT_Q4_LAYOUT_VERSION, "b16": KT_B16_LAYOUT_VERSION}
M_BLOCK = KT_M_BLOCK


def cpu_features():
    """{name as in /proc/cpuinfo: whether this CPU has it and the operating system has it enabled}."""
    cdef size_t count = 0
    cdef const kt_cpu_feature *features = kt_cpu_features(&count)
    return {features[i].name.decode(): bool(features[i].present) for i in range(count)}


def permit_tiles():
    """Ask the operating system to let this process use AMX's tiles; 0, or the errno of a refusal. It cannot be undone."""
    return kt_os_permit_tiles()


def configure_pool(size_t threads, uint64_t spin_us):
    """Threads, the caller's included, and how long idle ones spin before they sleep; from the next run on."""
    with nogil:
        kt_pool_configure(threads, spin_us * 1000)


def pool_threads():
    """What configure_pool last said."""
    cdef size_t threads
    with nogil:
        threads = kt_pool_threads()
    return threads


def tune(**settings):
    """Set fields of kt_tuning (driver.h); returns all fields as they were. None of them changes a bit of any result."""
    cdef kt_tuning tuning
    with nogil:
        kt_pool_lock()
        tuning = kt_moe_tuning
        kt_pool_unlock()
    old = dict(tuning)
    unknown = settings.keys() - old.keys()
    if unknown:
        raise InputError(f"unknown tuning {sorted(unknown)}; known are {sorted(old)}")
    tuning = {**old, **settings}
    with nogil:
        kt_pool_lock()
        memcpy(&kt_moe_tuning, &tuning, sizeof(tuning))
        kt_pool_unlock()
    return old


def scratch_bytes():
    """Bytes of scratch memory that the runtime holds, for all layers together."""
    cdef size_t held
    with nogil:
        kt_pool_lock()
        held = kt_moe_scratch_bytes()
        kt_pool_unlock()
    return held


cdef object _raise(int error, str doing):
    if error == errno.ENOMEM:
        raise OutOfMemoryError(f"{doing}: the operating system refused memory")
    if error == errno.EAGAIN:
        raise UnavailableError(f"{doing}: could not start {pool_threads()} threads; see ktmoe.set_num_threads")
    raise OSError(error, f"{doing}: {os.strerror(error)}")


def pool_wake(uint64_t idle_us):
    """Seconds from handing the pool a task to its last thread's beginning, the threads having been idle for idle_us."""
    cdef double seconds
    with nogil:
        seconds = kt_latency_wake(idle_us * 1000)
    return _latency(seconds)


def pool_barrier(size_t count):
    """Seconds of a barrier of all threads, the mean of count."""
    cdef double seconds
    _at_least_one(count)
    with nogil:
        seconds = kt_latency_barrier(count)
    return _latency(seconds)


def pool_handoff(size_t count):
    """Seconds in which one thread sees what another one wrote, the mean of 2 * count: no wake-up and no barrier can be faster.

    Raises InputError where the pool has one thread.
    """
    cdef double seconds
    _at_least_one(count)
    with nogil:
        seconds = kt_latency_handoff(count)
    if seconds == -errno.EINVAL:
        raise InputError("a handoff needs 2 threads or more, the pool has 1; see ktmoe.set_num_threads")
    return _latency(seconds)


cdef _at_least_one(size_t count):
    if count < 1:
        raise InputError("count must be at least 1, found 0")


cdef double _latency(double seconds) except *:
    if seconds < 0:
        _raise(<int>-seconds, "measuring the pool's latency")
    return seconds


cdef class KernelTable:
    """One instruction set's kernels, from the `table` of a module such as ktmoe._native.avx512_bf16.

    Raises UnavailableError if it was built for another version of ktmoe.h.
    """

    cdef const kt_isa *isa
    cdef object _capsule

    def __cinit__(self, capsule):
        self.isa = <const kt_isa *>PyCapsule_GetPointer(capsule, "ktmoe.isa")
        self._capsule = capsule
        if self.isa.abi_version != KT_ABI_VERSION:
            raise UnavailableError(
                f"kernel table {self.name!r} was built for version {self.isa.abi_version} of ktmoe.h, this is {KT_ABI_VERSION}"
            )

    @property
    def name(self):
        return self.isa.name.decode()

    def kernels(self):
        """[(family, scale kind, longest group, activations, folded)] of every kernel."""
        rows = []
        cdef const kt_kernel *const *family = self.isa.families
        cdef const kt_kernel *kernel
        while family[0]:
            kernel = family[0]
            while kernel.family:
                rows.append((
                    kernel.family.decode(),
                    kernel.scale.decode(),
                    kernel.group_max,
                    kernel.rows.activations.decode(),
                    bool(kernel.folded),
                ))
                kernel += 1
            family += 1
        return rows

    def serves(self, weight_format, str activations):
        """Whether it has a kernel for these weights, whatever their scales are."""
        return self.find(weight_format, activations, False) != NULL

    cdef const kt_kernel *find(self, weight_format, str activations, bint folded):
        cdef const kt_kernel *const *family = self.isa.families
        cdef const kt_kernel *kernel
        scale = weight_format.scale
        kind, rows, group = (scale.kind, *scale.extent) if scale else ("none", 1, 0)
        if rows != 1 or (group and (group % KT_GROUP or group & (group - 1))):
            return NULL
        whole = codebook.unit(weight_format.codebook) > 0
        while family[0]:
            kernel = family[0]
            while kernel.family:
                if (
                    kernel.family.decode() == weight_format.family and kernel.scale.decode() == kind
                    and group <= kernel.group_max and kernel.rows.activations.decode() == activations
                    and kernel.folded == folded and (whole or not kernel.whole)
                ):
                    return kernel
                kernel += 1
            family += 1
        return NULL

    def encode(self, weight_format, str activations, const uint16_t[::1] row):
        """One row of bfloat16 bits [k], k a multiple of 32, as the kernel for any scale takes it: uint8 [bytes]."""
        cdef const kt_kernel *kernel = self.find(weight_format, activations, False)
        cdef const kt_rows *rows = kernel.rows if kernel else NULL
        if not rows or row.shape[0] % KT_GROUP:
            raise InputError(f"{self.name} has no rows of {row.shape[0]} for {activations!r}")
        if not rows.encode:
            return np.asarray(row).view(np.uint8).copy()
        encoded = np.empty(row.shape[0] // KT_GROUP * rows.group_bytes, np.uint8)
        cdef uint8_t[::1] to = encoded
        if row.shape[0]:
            rows.encode(&row[0], 0, row.shape[0], row.shape[0], &to[0])
        return encoded

    def exp(self, const float[::1] x):
        """The activation's exponential, float32 [n]."""
        y = np.empty(x.shape[0], np.float32)
        cdef float[::1] to = y
        if x.shape[0]:
            self.isa.exp(&x[0], &to[0], x.shape[0])
        return y

    def peak(self, size_t iterations):
        """(FLOPs, seconds) of multiplies from registers on all threads of the pool."""
        cdef double flops = 0, seconds
        with nogil:
            seconds = kt_limit_peak(self.isa.peak, iterations, &flops)
        if seconds < 0:
            _raise(<int>-seconds, "measuring the multiply peak")
        return flops, seconds


cdef class PackedLayer:
    """All experts of one layer in the packed layout, in one arena, and how to compute them.

    formats: {projection: WeightFormat}. router_weight: a value of layer.ROUTER_WEIGHTS. scales: one of codebook.ROUNDING.
    Raises OutOfMemoryError if the arena cannot be had. Every matrix must be packed before forward().
    """

    cdef kt_layer layer
    cdef uint8_t *arena
    cdef readonly size_t nbytes
    cdef size_t expert_bytes
    cdef size_t offsets[3]
    cdef size_t missing
    cdef kt_codebook codebooks[3]
    cdef kt_format layouts[3]
    cdef dict _formats
    cdef str _activations, _scales
    cdef KernelTable _table
    cdef list _biases

    def __cinit__(self, KernelTable table, size_t num_experts, size_t hidden, size_t intermediate, dict formats, activation,
                  str router_weight, str activations, str scales):
        cdef size_t n, k, at = 0
        self._table = table
        self._formats = formats
        self._activations, self._scales = activations, scales
        self._biases = []
        for i, projection in enumerate(("gate", "up", "down")):
            n, k = (hidden, intermediate) if projection == "down" else (intermediate, hidden)
            _fill_codebook(&self.codebooks[i], formats[projection])
            _fill_layout(&self.layouts[i], formats[projection])
            self.offsets[i] = at
            at += (n + KT_PANEL - 1) // KT_PANEL * self.layouts[i].packing.panel_bytes(&self.layouts[i], k)
        self.expert_bytes = at
        self.nbytes = at * num_experts
        self.missing = 3 * num_experts
        self.layer.num_experts = num_experts
        self.layer.hidden = hidden
        self.layer.intermediate = intermediate
        self.layer.act = kt_activation(activation.alpha, activation.limit, activation.up_offset)
        self.layer.isa = table.isa
        self.layer.router_weight = {
            "down_output": KT_DOWN_OUTPUT, "down_input": KT_DOWN_INPUT, "expert_input": KT_EXPERT_INPUT
        }[router_weight]
        self.layer.experts = <kt_expert *>calloc(num_experts, sizeof(kt_expert))
        self.arena = <uint8_t *>kt_os_map(self.nbytes)
        if not self.layer.experts or not self.arena:
            raise OutOfMemoryError(f"packed weights of {num_experts} experts need {self.nbytes} bytes; the system refused them")

    def __dealloc__(self):
        self._free()

    cdef void _free(self) noexcept nogil:
        kt_os_unmap(self.arena, self.nbytes)
        free(self.layer.experts)
        self.arena = NULL
        self.layer.experts = NULL

    def close(self):
        """Give the memory back, after the forward calls that are running."""
        with nogil:
            kt_pool_lock()
            self._free()
            kt_pool_unlock()

    cdef kt_matrix *_matrix(self, size_t expert, int projection) except NULL:
        if not self.layer.experts:
            raise ClosedError("this layer was closed")
        if expert >= self.layer.num_experts:
            raise InputError(f"expert must be in [0, {self.layer.num_experts}), found {expert}")
        cdef kt_expert *e = &self.layer.experts[expert]
        return &e.gate if projection == 0 else &e.up if projection == 1 else &e.down

    cdef kt_matrix *_packed(self, size_t expert, int projection) except NULL:
        cdef kt_matrix *matrix = self._matrix(expert, projection)
        if not matrix.data:
            raise InputError(f"expert {expert}'s {('gate', 'up', 'down')[projection]} was not packed")
        return matrix

    def pack(self, size_t expert, str projection, matrix):
        """Pack one Matrix. Raises FormatError, which names the tensor, for a scale or a weight that is not finite."""
        cdef int p = ("gate", "up", "down").index(projection)
        cdef kt_matrix *to = self._matrix(expert, p)
        cdef const uint8_t[::1] codes, scales
        cdef kt_source source
        cdef kt_scan scan
        cdef uint8_t *packed = self.arena + expert * self.expert_bytes + self.offsets[p]
        cdef int error
        weight_format = self._formats[projection]
        n, k = self.layer.intermediate, self.layer.hidden
        if p == 2:
            n, k = k, n
        if matrix.shape != (n, k) or matrix.format != weight_format:
            raise FormatError(
                f"{matrix.name}: {projection} must be {weight_format.description} [{n}, {k}], "
                f"found {matrix.format.description} {list(matrix.shape)}"
            )
        source.format = self.layouts[p]
        codes = matrix.codes.reshape(-1).view(np.uint8)
        source.codes, source.scales = &codes[0], NULL
        if matrix.scales is not None:
            scales = matrix.scales.reshape(-1).view(np.uint8)
            source.scales = &scales[0]
        source.n, source.k = matrix.shape
        with nogil:
            error = kt_pack(&source, packed, &scan)
        if error:
            _raise(error, f"packing {matrix.name}")
        if scan.refused:
            matrix.refuse()
        kind = weight_format.scale.kind if weight_format.scale else None
        folded = False
        if kind == "ue8m0" or (kind == "bf16" and self._scales == "folded"):
            low, high = codebook.fold_range(weight_format.codebook, kind)
            folded = low <= scan.low and scan.high <= high
        cdef const kt_kernel *kernel = self._table.find(weight_format, self._activations, folded)
        if not kernel:  # those for any scale serve these, too
            kernel = self._table.find(weight_format, self._activations, False)
        if not kernel:
            raise UnavailableError(
                f"{matrix.name}: {self._table.name} has no kernel for {weight_format.description}, activations {self._activations}"
            )
        cdef const float *bias = self._keep_bias(matrix)
        packed_before = to.kernel != NULL
        if not kt_moe_use(&self.layer, to, p == 2, kernel):
            raise UnavailableError(f"{self._table.name}'s kernels take x in more ways than one layer can have: {KT_X_KINDS}")
        self.missing -= not packed_before
        to.data = packed
        to.panel_bytes = source.format.packing.panel_bytes(&source.format, source.k)
        to.group = source.format.group
        # Gate and up of one format share a codebook, so that one kernel call can take both.
        to.codebook = &self.codebooks[0 if weight_format == self._formats["gate"] else p]
        to.bias = bias

    cdef const float *_keep_bias(self, matrix) except? NULL:
        if matrix.bias is None:
            return NULL
        if not np.isfinite(matrix.bias).all():
            matrix.refuse()
        padded = np.zeros(-(-matrix.shape[0] // KT_PANEL) * KT_PANEL, np.float32)
        padded[: matrix.shape[0]] = matrix.bias
        self._biases.append(padded)
        cdef float[::1] view = padded
        return &view[0]

    def unpack(self, size_t expert, str projection):
        """(codes, scales or None): the checkpoint's own bytes again, in Matrix's dtypes and shapes."""
        cdef int p = ("gate", "up", "down").index(projection)
        cdef kt_matrix *matrix = self._packed(expert, p)
        cdef size_t n = self.layer.hidden if p == 2 else self.layer.intermediate
        cdef size_t k = self.layer.intermediate if p == 2 else self.layer.hidden
        weight_format = self._formats[projection]
        scale = weight_format.scale
        codes = np.empty(weight_format.codes_shape(n, k), weight_format.codes_dtype)
        scales = None if scale is None else np.empty(scale.shape(n, k), scale.dtype)
        cdef uint8_t[::1] codes_to = codes.reshape(-1).view(np.uint8)
        cdef uint8_t[::1] scales_to = codes_to if scale is None else scales.reshape(-1).view(np.uint8)
        with nogil:
            kt_unpack(&self.layouts[p], matrix.data, n, k, &codes_to[0], &scales_to[0])
        return codes, scales

    def packed_bytes(self, size_t expert, str projection):
        """A copy of one matrix's packed bytes, uint8 [panels, panel bytes]: for the layout's golden tests."""
        cdef int p = ("gate", "up", "down").index(projection)
        cdef kt_matrix *matrix = self._packed(expert, p)
        cdef size_t n = self.layer.hidden if p == 2 else self.layer.intermediate
        copy = np.empty(((n + KT_PANEL - 1) // KT_PANEL, matrix.panel_bytes), np.uint8)
        cdef uint8_t[:, ::1] to = copy
        memcpy(&to[0, 0], matrix.data, copy.nbytes)
        return copy

    def kernels(self):
        """{(expert, projection): whether its scales are folded}."""
        return {
            (e, name): bool(self._packed(e, p).kernel.folded)
            for e in range(self.layer.num_experts)
            for p, name in enumerate(("gate", "up", "down"))
        }

    @property
    def scales(self):
        """"folded" if any scaled weight is rounded to bfloat16, else "exact"."""
        rounded = {
            projection for (_, projection), folded in self.kernels().items()
            if folded and self._formats[projection].scale.kind == "bf16"
        }
        return "folded" if rounded else "exact"

    def forward(self, x, const int64_t[:, ::1] ids, const float[:, ::1] weights, const uint8_t[::1] mask, out):
        """y into out. x, out: uint16 (bf16 bits) or float32 [tokens, hidden], C-contiguous, alike; tokens and top_k above 0."""
        cdef kt_batch batch
        cdef const uint16_t[:, ::1] x16
        cdef const float[:, ::1] x32
        cdef uint16_t[:, ::1] y16
        cdef float[:, ::1] y32
        cdef int error
        cdef bint closed
        memset(&batch, 0, sizeof(batch))
        if x.dtype == np.float32:
            x32, y32 = x, out
            batch.dtype, batch.x, batch.y = KT_F32, &x32[0, 0], &y32[0, 0]
        else:
            x16, y16 = x, out
            batch.dtype, batch.x, batch.y = KT_BF16, &x16[0, 0], &y16[0, 0]
        batch.tokens, batch.top_k = ids.shape[0], ids.shape[1]
        batch.ids, batch.weights, batch.mask = &ids[0, 0], &weights[0, 0], &mask[0]
        if (
            x.shape != (ids.shape[0], self.layer.hidden) or out.shape != x.shape or out.dtype != x.dtype
            or weights.shape[0] != ids.shape[0] or weights.shape[1] != ids.shape[1] or mask.shape[0] != self.layer.num_experts
        ):
            raise InputError(
                f"x and out must be [{ids.shape[0]}, {self.layer.hidden}] and alike, found {x.dtype} {list(x.shape)} and "
                f"{out.dtype} {list(out.shape)}; weights and mask {[ids.shape[0], ids.shape[1]]} and [{self.layer.num_experts}], "
                f"found {[weights.shape[0], weights.shape[1]]} and [{mask.shape[0]}]"
            )
        if self.missing:
            raise InputError(f"{self.missing} matrices of this layer were not packed")
        with nogil:
            kt_pool_lock()
            closed = self.arena == NULL
            error = 0 if closed else kt_moe_forward(&self.layer, &batch)
            kt_pool_unlock()
        if closed:
            raise ClosedError("this layer was closed")
        if error:
            _raise(error, f"forward of {batch.tokens} tokens")

    def read_seconds(self, KernelTable table, size_t offset, size_t nbytes):
        """Seconds in which all threads of the pool read that range of the packed weights: the read-bandwidth limit."""
        if not self.arena or offset + nbytes > self.nbytes:
            raise InputError(f"range [{offset}, {offset + nbytes}) is not within the {self.nbytes} packed bytes")
        cdef double seconds
        with nogil:
            seconds = kt_limit_read(table.isa.read, self.arena + offset, nbytes)
        if seconds < 0:
            _raise(<int>-seconds, "measuring the read bandwidth")
        return seconds


cdef void _fill_codebook(kt_codebook *book, weight_format):
    cdef int i
    cdef uint16_t sign, magnitude
    memset(book, 0, sizeof(kt_codebook))
    if not weight_format.codebook:
        return
    values = np.asarray(weight_format.codebook, np.float32)
    bits = values.view(np.uint32) >> 16
    book.unit = codebook.unit(weight_format.codebook)
    for i in range(32):
        book.plain[i] = bits[i % 16]
        sign, magnitude = bits[i % 16] & 0x8000, bits[i % 16] & 0x7FFF
        book.folded[i] = sign | (magnitude + (126 << 7)) if magnitude else 0
        book.value[i % 16] = values[i % 16]
        book.whole[i % 16] = int(values[i % 16] / book.unit) if book.unit else 0


cdef _fill_layout(kt_format *layout, weight_format):
    memset(layout, 0, sizeof(kt_format))
    layout.packing = kt_packing_of(weight_format.family.encode())
    if not layout.packing:
        raise FormatError(f"weights of family {weight_format.family!r} cannot be packed")
    scale = weight_format.scale
    if scale is None:
        return
    rows, group = scale.extent
    if rows != 1 or group % KT_GROUP or group & (group - 1):
        raise FormatError(f"{weight_format.description}: packed scales must be per 1x{KT_GROUP} times a power of two")
    layout.group = group
    layout.scale_bytes = scale.dtype.itemsize
    layout.scale_one = {"ue8m0": 127, "bf16": 0x3F80}[scale.kind]
    layout.zero_code = weight_format.codebook.index(0.0)
