# Kernel tables: those of this build, and those of third parties.

def kernel_table(str isa):
    """The kernels of a row of isa.py. Raises UnavailableError if the compiler that built this package did not know it."""
    cdef const kt_isa *const *table = kt_isas
    while table[0]:
        if table[0].name.decode() == isa:
            return KernelTable(PyCapsule_New(<void *>table[0], "ktmoe.isa", NULL))
        table += 1
    raise UnavailableError(f"{isa} was not compiled into this build: its compiler did not know the instructions")


cdef class KernelTable:
    """One instruction set's kernels, from a capsule that a module of them has.

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
        """[(family, scale kind, longest scale group, activations, folded)] of every kernel."""
        rows = []
        cdef const kt_kernel *const *row = self.isa.kernels
        cdef const kt_kernel *kernel
        while row[0]:
            kernel = row[0]
            while kernel.family:
                rows.append((
                    kernel.family.decode(),
                    kernel.scale.decode(),
                    kernel.scale_group_max,
                    kernel.rows.mode.decode(),
                    bool(kernel.folded),
                ))
                kernel += 1
            row += 1
        return rows

    def serves(self, weight_format, str activations):
        """Whether it has a kernel for these weights, whatever their scales are."""
        return self.find(weight_format, activations, False) != NULL

    cdef const kt_kernel *find(self, weight_format, str activations, bint folded):
        cdef const kt_kernel *const *row = self.isa.kernels
        cdef const kt_kernel *kernel
        scale = weight_format.scale
        kind, rows, columns = (scale.kind, *scale.extent) if scale else ("none", 1, 0)
        if rows != 1 or (columns and (columns % KT_BLOCK or columns & (columns - 1))):
            return NULL
        whole = codebook.unit(weight_format.codebook) > 0
        while row[0]:
            kernel = row[0]
            while kernel.family:
                if (
                    kernel.family.decode() == weight_format.family and kernel.scale.decode() == kind
                    and columns <= kernel.scale_group_max and kernel.rows.mode.decode() == activations
                    and kernel.folded == folded and (whole or not kernel.whole)
                ):
                    return kernel
                kernel += 1
            row += 1
        return NULL

    cdef bint find_both(self, weight_format, str activations, str rounding, kt_given *given):
        """given.kernels[1] where all scales are in [low, high], which fold into the weights, else kernels[0]. False: there is none."""
        kind = weight_format.scale.kind if weight_format.scale else None
        given.kernels[0] = given.kernels[1] = self.find(weight_format, activations, False)
        given.low, given.high = 0, 255
        if kind == "ue8m0" or (kind == "bf16" and rounding == "folded"):
            given.low, given.high = codebook.fold_range(weight_format.codebook, kind)
            given.kernels[1] = self.find(weight_format, activations, True)
            if not given.kernels[1]:  # those for any scale serve these, too
                given.kernels[1] = given.kernels[0]
        return given.kernels[0] != NULL

    def encode(self, weight_format, str activations, const uint16_t[::1] row):
        """One row of bfloat16 bits [k], k a multiple of 32, as the kernel for any scale takes it: uint8 [bytes]."""
        cdef const kt_kernel *kernel = self.find(weight_format, activations, False)
        cdef const kt_rows *rows = kernel.rows if kernel else NULL
        if not rows or row.shape[0] % KT_BLOCK:
            raise InputError(f"{self.name} has no rows of {row.shape[0]} for {activations!r}")
        if not rows.encode:
            return np.asarray(row).view(np.uint8).copy()
        encoded = np.empty(row.shape[0] // KT_BLOCK * rows.block_bytes, np.uint8)
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
