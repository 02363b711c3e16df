# What is computed with a layer's packed experts: forward, its two stages, and training.


cdef str _untrainable(_PackedExperts packed, bint experts):
    """Why what was packed cannot be trained, or None. experts: whether it takes more than transposed products."""
    cdef const kt_kernel *kernel
    cdef const kt_isa *isa = packed._table.isa
    cdef size_t p, i
    if packed._form != "bf16" or packed._x is not None or packed._h is not None:
        return "only activations=\"bf16\" can be trained"
    if experts and not (isa.derive and isa.dense and isa.dense_rows and isa.widen):
        return f"{packed._table.name} has no functions for training"
    for p, projection in enumerate(packed._names):
        for i in range(2):
            kernel = packed._kernels[p].kernels[i]
            if not kernel or not kernel.operand or not kt_product_for(isa, kernel.operand):
                description = packed._spec.formats[projection].description
                return f"{packed._table.name}'s kernels for {description} have no transposed product"
    return None


cdef class PackedLayer(_PackedExperts):
    """Packed experts, and how to compute them. Made as _PackedExperts is, of ExpertWeights."""

    def __cinit__(self, KernelTable table, experts, plan, ranges, size_t threads, ArenaFile file=None, str form=None,
                  BlockRule x=None, BlockRule h=None):
        cdef kt_layer *layer = &self.experts.layer
        activation = experts.activation
        layer.act = kt_activation(activation.alpha, activation.limit, activation.up_offset)
        layer.router_weight = {
            "down_output": KT_DOWN_OUTPUT, "down_input": KT_DOWN_INPUT, "expert_input": KT_EXPERT_INPUT
        }[plan.router_weight]

    cdef int _compute(self, _Batch batch) except -1:
        cdef int error = 0
        cdef kt_outcome outcome
        cdef size_t missing
        with nogil:
            kt_pool_lock()
            outcome, missing = self._state(), self.experts.missing
            if outcome == KT_DONE and not missing and not batch.empty:
                error = kt_moe_forward(&self.experts.layer, &batch.batch)
            kt_pool_unlock()
        self._check_outcome(outcome)
        self._check_whole(False, missing)
        if error:
            _raise(error, f"forward of {batch.batch.tokens} tokens")
        return 0

    def forward(self, x, ids, weights, mask, out):
        """y into out. x: uint16 (bf16 bits) or float32 [tokens, hidden]. out: of x's dtype or float32. C-contiguous; tokens and top_k above 0."""
        batch = _Batch(ids, weights, mask, self.experts.layer.num_experts)
        batch.take_x(x, self.experts.layer.hidden)
        batch.take_y(out, self.experts.layer.hidden, True)
        self._compute(batch)

    def stages(self):
        """This layer, which has gate_up() and down()."""
        return self

    def training(self):
        """This layer, which has forward_training() and backward(). Raises UnavailableError, which says why it has not."""
        reason = _untrainable(self, True)
        if reason:
            raise UnavailableError(f"{self._spec.name}: it cannot be trained: {reason}")
        return self

    def forward_training(self, x, ids, weights, mask, out, Adapter adapter=None, saved=None):
        """forward() with an adapter; its bits where that is None.

        saved: (g, u, t), float32 [tokens * top_k, intermediate] both and [tokens * top_k, 3, rank], to be filled for backward(): rows of
        pairs of token and slot, of which those of skipped pairs are not touched. t is None without an adapter. None: nothing is kept.
        Raises UnavailableError, which says why, for layers that cannot be trained.
        """
        self.training()
        held = []
        batch = _Batch(ids, weights, mask, self.experts.layer.num_experts)
        batch.take_x(x, self.experts.layer.hidden)
        batch.take_y(out, self.experts.layer.hidden)
        _take_training(batch, held, self._spec, adapter, saved)
        self._compute(batch)

    def backward(self, x, ids, weights, mask, grad_y, Adapter adapter, saved, grad_x, float[:, ::1] grad_weights, gradients=None,
                 bint add=False, double scale=1.0):
        """The gradients of a loss, whose gradient with respect to y is grad_y, uint16 (bf16 bits) or float32 [tokens, hidden].

        x, ids, weights, mask, adapter: as forward_training() had them. saved: what it kept, or None: that is computed again, and gives
        the same bits. grad_x: x's dtype and shape, or None: not wanted. grad_weights: float32 [tokens, top_k], 0 for skipped pairs.
        gradients: {projection: (da, db)}, float32 of the shapes of the adapter's a and b. add: to what they hold; else they are
        written whole, with zeros for experts without rows. scale: multiplies what goes into them. Where ids has no pairs,
        nothing is written.
        """
        cdef kt_backward to
        cdef int error = 0
        cdef kt_outcome outcome
        cdef size_t missing, hidden = self.experts.layer.hidden
        self.training()
        held = []
        batch = _Batch(ids, weights, mask, self.experts.layer.num_experts)
        batch.take_x(x, hidden)
        if grad_x is not None:
            batch.take_y(grad_x, hidden)
        of_y = _Batch(ids, weights, mask, self.experts.layer.num_experts)
        of_y.take_x(grad_y, hidden)
        _take_training(batch, held, self._spec, adapter, saved)
        memset(&to, 0, sizeof(to))
        _take_gradients(&to, held, adapter, gradients)
        if grad_weights.shape[0] != ids.shape[0] or grad_weights.shape[1] != ids.shape[1]:
            raise InputError(f"grad_weights must be {list(ids.shape)}, found {[grad_weights.shape[0], grad_weights.shape[1]]}")
        to.batch, to.grad_x = batch.batch, batch.batch.y
        to.batch.y = NULL
        to.grad_y, to.grad_dtype = of_y.batch.x, of_y.batch.dtype
        to.add, to.scale = add, scale
        if not batch.empty:
            to.grad_weights = &grad_weights[0, 0]
        with nogil:
            kt_pool_lock()
            outcome, missing = self._state(), self.experts.missing
            if outcome == KT_DONE and not missing and not batch.empty:
                error = kt_moe_backward(&self.experts.layer, &to)
            kt_pool_unlock()
        self._check_outcome(outcome)
        self._check_whole(False, missing)
        if error:
            _raise(error, f"backward of {batch.batch.tokens} tokens")

    def gate_up(self, x, ids, weights, mask, rows, uint16_t[:, ::1] h, bint rounded=False):
        """The first stage of forward() alone: h of each pair of token and expert, bfloat16 bits, as it is before its mode rounds it.

        x, ids, weights, mask: as forward() takes them; tokens and top_k may be 0. rows: integers [tokens, top_k], the row of h
        [any, intermediate] of each pair whose id is in [0, num_experts), which are distinct. Other rows, and those of masked experts,
        are not touched. h overlaps no other argument. rounded: x is what the mode makes of x, and not rounded again.
        """
        if rounded and self.experts.layer.round_x != NULL and self.experts.layer.router_weight == KT_EXPERT_INPUT:
            raise InputError("x cannot be rounded already: the layer multiplies it by router weights before that")
        batch = _Batch(ids, weights, mask, self.experts.layer.num_experts)
        batch.take_x(x, self.experts.layer.hidden)
        batch.take_h(h, rows, self.experts.intermediate, True)
        batch.batch.stages, batch.batch.x_rounded = KT_GATE_UP, rounded
        self._compute(batch)

    def down(self, const uint16_t[:, ::1] h, ids, weights, mask, rows, out):
        """The second stage of forward() alone: y into out, from the h of each pair, which is not rounded: it is what the mode makes of h.

        h, rows: as gate_up() has them; rows need not be distinct. ids, weights, mask, out: as forward() takes them.
        """
        batch = _Batch(ids, weights, mask, self.experts.layer.num_experts)
        batch.take_y(out, self.experts.layer.hidden)
        batch.take_h(h, rows, self.experts.intermediate, False)
        batch.batch.stages = KT_DOWN
        self._compute(batch)
        if batch.empty:
            out[...] = 0
