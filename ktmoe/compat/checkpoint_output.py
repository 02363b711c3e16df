"""The output of a first forward, kept for a checkpointed layer's second one, as kt-kernel's torch layers keep it.

They recompute a layer on the GPU before its backward (gradient checkpointing) and take the experts' output, which was computed
on the CPU and saved for backward, from here. Any error poisons it: what was kept could be another pass's.
"""

from __future__ import annotations

from enum import StrEnum

from ktmoe import arrays
from ktmoe.errors import InputError, UnavailableError


class State(StrEnum):
    EMPTY = "EMPTY"
    READY = "READY"
    POISONED = "POISONED"


class CheckpointOutput:
    """A mixin of SFTWrapper. Its methods raise UnavailableError (a RuntimeError) in a state that does not allow them."""

    def __init__(self) -> None:
        self.checkpoint_cache_state = State.EMPTY
        self.reuse_checkpoint_forward = False
        self._kept_output = None
        self._poison = ""

    @property
    def _kt_has_cached_forward(self) -> bool:
        return self.checkpoint_cache_state is State.READY

    def cache_checkpoint_output(self, output_cpu, qlen: int) -> None:
        """Keep the first qlen rows of an output on the CPU. Nothing may be kept already."""
        try:
            self._refuse_poisoned()
            if self.checkpoint_cache_state is not State.EMPTY:
                raise UnavailableError("an output is kept already: expected backward() before the next one, found none")
            if arrays.is_torch(output_cpu) and output_cpu.device.type != "cpu":
                raise InputError(f"output_cpu must be on the CPU, found {output_cpu.device}")
            if len(output_cpu) < qlen:
                raise InputError(f"output_cpu must have at least {qlen} rows, found {len(output_cpu)}")
        except Exception as error:
            self.poison_checkpoint_output(error)
            raise
        self._kept_output = output_cpu[:qlen]
        self.checkpoint_cache_state = State.READY

    def get_checkpoint_output(self, qlen: int, output_device=None):
        """The kept output, on a device."""
        self.validate_checkpoint_output(qlen)
        kept = self._kept_output
        try:
            return kept if output_device is None else kept.to(device=output_device, non_blocking=True)
        except Exception as error:
            self.poison_checkpoint_output(error)
            raise

    def validate_checkpoint_output(self, qlen: int) -> None:
        """Check that an output of so many rows is kept; another number poisons it. Raises UnavailableError."""
        self._refuse_poisoned()
        if self.checkpoint_cache_state is not State.READY:
            raise UnavailableError("no output of a checkpointed forward is kept")
        if len(self._kept_output) != qlen:
            error = UnavailableError(f"expected the kept output of {qlen} tokens, found that of {len(self._kept_output)}")
            self.poison_checkpoint_output(error)
            raise error

    def validate_checkpoint_cache_empty(self) -> None:
        """Check that nothing is kept; else it is poisoned. Raises UnavailableError."""
        self._refuse_poisoned()
        if self.checkpoint_cache_state is not State.EMPTY:
            error = UnavailableError("expected no output of a checkpointed forward before a new one, found one that is kept")
            self.poison_checkpoint_output(error)
            raise error

    def clear_checkpoint_output(self) -> None:
        """Forget the kept output. Poison stays."""
        self._kept_output = None
        if self.checkpoint_cache_state is not State.POISONED:
            self.checkpoint_cache_state = State.EMPTY

    def poison_checkpoint_output(self, error: BaseException | str) -> None:
        """Forget the kept output, and let all later calls raise an error that names this one."""
        self._kept_output = None
        self._poison = str(error)
        self.checkpoint_cache_state = State.POISONED

    def _refuse_poisoned(self) -> None:
        if self.checkpoint_cache_state is State.POISONED:
            raise UnavailableError(f"the kept output of a checkpointed forward is poisoned: {self._poison}")
