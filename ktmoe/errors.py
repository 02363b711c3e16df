"""One exception tree: every error ktmoe raises on purpose is a KtmoeError and also the builtin a caller expects."""


class KtmoeError(Exception):
    """Base of every error that ktmoe raises on purpose."""


class InputError(KtmoeError, ValueError):
    """An argument of a forward call, or of a constructor, has a wrong shape, dtype, layout or value."""


class FormatError(KtmoeError, ValueError):
    """Weights do not match the WeightFormat that is claimed for them, or hold a code that stands for NaN."""


class CheckpointError(KtmoeError, ValueError):
    """A checkpoint's file, header, index or config is malformed, truncated or inconsistent."""


class MissingTensorError(CheckpointError, LookupError):
    """A checkpoint lacks a tensor or a layer that was asked for."""


class UnknownNameError(KtmoeError, LookupError):
    """A registry has no backend or loader of that name."""


class UnavailableError(KtmoeError, RuntimeError):
    """A backend exists but cannot run here: the CPU, the build or the weights' format rules it out."""


class ClosedError(KtmoeError, RuntimeError):
    """A layer was used after close()."""


class OutOfMemoryError(KtmoeError, MemoryError):
    """The operating system refused memory; nothing was kept of what was being built."""


class OutOfSpaceError(KtmoeError, OSError):
    """A disk has too little free space for what is about to be written; nothing was."""
