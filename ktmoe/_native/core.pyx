# cython: language_level=3, boundscheck=False, wraparound=False
"""The driver's face to Python: CPU features, the pool, kernel tables, packed layers. Checks, one nogil block, checks.

The pool's lock is never held together with the GIL: fork takes both.
"""

import errno
import math
import os

import numpy as np

from cpython.pycapsule cimport PyCapsule_GetPointer
from libc.stdlib cimport calloc, free
from libc.string cimport memcpy, memset

from ktmoe._native.driver cimport *

from ktmoe.errors import ClosedError, FormatError, InputError, OutOfMemoryError, UnavailableError

Q4_LAYOUT_VERSION = KT_Q4_LAYOUT_VERSION
M_BLOCK = KT_M_BLOCK


def cpu_features():
    """{name as in /proc/cpuinfo: whether this CPU has it and the operating system has it enabled}."""
    cdef size_t count = 0
    cdef const kt_cpu_feature *features = kt_cpu_features(&count)
    return {features[i].name.decode(): bool(features[i].present) for i in range(count)}


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
        """[(family, scale kind, (rows, columns), activations, folded)] of every kernel."""
        rows = []
        cdef const kt_kernel *const *family = self.isa.families
        cdef const kt_kernel *kernel
        while family[0]:
            kernel = family[0]
            while kernel.family:
                rows.append(_key(kernel))
                kernel += 1
            family += 1
        return rows

    cdef const kt_kernel *find(self, key):
        cdef const kt_kernel *const *family = self.isa.families
        cdef const kt_kernel *kernel
        while family[0]:
            kernel = family[0]
            while kernel.family:
                if _key(kernel) == key:
                    return kernel
                kernel += 1
            family += 1
        return NULL

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


cdef tuple _key(const kt_kernel *kernel):
    return (
        kernel.family.decode(),
        kernel.scale.decode(),
        (kernel.extent[0], kernel.extent[1]),
        kernel.activations.decode(),
        bool(kernel.folded),
    )


cdef class PackedLayer:
    """All experts of one layer in the packed layout, in one arena, and how to compute them.

    formats: {projection: WeightFormat}. router_weight: a value of layer.ROUTER_WEIGHTS.
    Raises OutOfMemoryError if the arena cannot be had. Every matrix must be packed before forward().
    """

    cdef kt_layer layer
    cdef uint8_t *arena
    cdef readonly size_t nbytes
    cdef size_t expert_bytes
    cdef size_t offsets[3]
    cdef size_t missing
    cdef kt_codebook codebooks[3]
    cdef dict _formats
    cdef str _activations
    cdef KernelTable _table
    cdef list _biases

    def __cinit__(self, KernelTable table, size_t num_experts, size_t hidden, size_t intermediate, dict formats, activation,
                  str router_weight, str activations):
        cdef size_t n, k, at = 0
        self._table = table
        self._formats = formats
        self._activations = activations
        self._biases = []
        for i, projection in enumerate(("gate", "up", "down")):
            n, k = (hidden, intermediate) if projection == "down" else (intermediate, hidden)
            _fill_codebook(&self.codebooks[i], formats[projection])
            self.offsets[i] = at
            at += (n + KT_PANEL - 1) // KT_PANEL * kt_q4_panel_bytes(k)
        self.expert_bytes = at
        self.nbytes = at * num_experts
        self.missing = 3 * num_experts
        self.layer.num_experts = num_experts
        self.layer.hidden = hidden
        self.layer.intermediate = intermediate
        self.layer.act = kt_activation(activation.alpha, activation.limit, activation.up_offset)
        self.layer.activate = table.isa.activate
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
        """Pack one Matrix. Raises FormatError, which names the tensor, for a scale that is NaN."""
        cdef int p = ("gate", "up", "down").index(projection)
        cdef kt_matrix *to = self._matrix(expert, p)
        cdef const uint8_t[:, ::1] codes = matrix.codes
        cdef const uint8_t[:, ::1] scales = matrix.scales
        cdef kt_q4_source source
        cdef kt_q4_scale_range scale_range
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
        source.codes = &codes[0, 0]
        source.scales = &scales[0, 0]
        source.n, source.k = matrix.shape
        source.zero_code = weight_format.codebook.index(0.0)
        with nogil:
            error = kt_q4_pack(&source, packed, &scale_range)
        if error:
            _raise(error, f"packing {matrix.name}")
        if scale_range.high == 255:
            row, column = np.argwhere(np.asarray(matrix.scales) == 255)[0]
            raise FormatError(f"{matrix.name}: scale [{row}, {column}] is byte 255, which is NaN in UE8M0; expected 0 to 254")
        low, high = fold_range(weight_format.codebook)
        folded = low <= scale_range.low and scale_range.high <= high
        scale = weight_format.scale
        key = (weight_format.family, scale.kind, scale.extent, self._activations, folded)
        cdef const kt_kernel *kernel = self._table.find(key)
        if not kernel:
            raise UnavailableError(f"{matrix.name}: {self._table.name} has no kernel for {key}")
        self.missing -= to.kernel == NULL
        to.kernel = kernel
        to.data = packed
        to.panel_bytes = kt_q4_panel_bytes(source.k)
        # Gate and up of one format share a codebook, so that one kernel call can take both.
        to.codebook = &self.codebooks[0 if weight_format == self._formats["gate"] else p]
        to.bias = self._keep_bias(matrix)
        self.layer.kernel_scratch_bytes = max(self.layer.kernel_scratch_bytes, kernel.scratch_bytes)

    cdef const float *_keep_bias(self, matrix) except? NULL:
        if matrix.bias is None:
            return NULL
        if not np.isfinite(matrix.bias).all():
            raise FormatError(f"{matrix.name}: bias must be finite, found {matrix.bias[~np.isfinite(matrix.bias)][0]}")
        padded = np.zeros(-(-matrix.shape[0] // KT_PANEL) * KT_PANEL, np.float32)
        padded[: matrix.shape[0]] = matrix.bias
        self._biases.append(padded)
        cdef float[::1] view = padded
        return &view[0]

    def unpack(self, size_t expert, str projection):
        """(codes uint8 [n, k/2], scales uint8 [n, ceil(k/32)]): the checkpoint's own bytes again."""
        cdef int p = ("gate", "up", "down").index(projection)
        cdef kt_matrix *matrix = self._packed(expert, p)
        cdef size_t n = self.layer.hidden if p == 2 else self.layer.intermediate
        cdef size_t k = self.layer.intermediate if p == 2 else self.layer.hidden
        codes, scales = np.empty((n, k // 2), np.uint8), np.empty((n, (k + KT_GROUP - 1) // KT_GROUP), np.uint8)
        cdef uint8_t[:, ::1] codes_to = codes
        cdef uint8_t[:, ::1] scales_to = scales
        with nogil:
            kt_q4_unpack(matrix.data, n, k, &codes_to[0, 0], &scales_to[0, 0])
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


def fold_range(codebook):
    """(low, high): the UE8M0 bytes whose scale times any entry is a normal bfloat16, so that folding is exact; 2 to 252 for E2M1."""
    exponents = [math.frexp(value)[1] - 1 for value in codebook if value]
    # kt_codebook.folded holds an exponent field raised by 126; beyond 255 it would run into the sign.
    return (1 - min(exponents), 254 - max(exponents)) if max(exponents) <= 2 else (255, 0)


cdef void _fill_codebook(kt_codebook *book, weight_format):
    cdef int i
    cdef uint16_t sign, magnitude
    values = np.asarray(weight_format.codebook, np.float32)
    bits = values.view(np.uint32) >> 16
    for i in range(32):
        book.plain[i] = bits[i % 16]
        sign, magnitude = bits[i % 16] & 0x8000, bits[i % 16] & 0x7FFF
        book.folded[i] = sign | (magnitude + (126 << 7)) if magnitude else 0
        book.value[i % 16] = values[i % 16]
