"""The perplexity of a text, window by window, and how far one run's predictions are from another's.

A model reads windows of `context` tokens that begin every context // 2 tokens ("stride"). Each window scores the tokens that no
window before it has scored: the first one all but its first token, any other its last ones. So every token is predicted from at
least context // 2 tokens, the first window's apart. Perplexity is exp of the mean negative log-likelihood of the scored tokens.
transformers' documentation defines it so ("Perplexity of fixed-length models").

Standard errors are over windows, which count as independent of each other. Logarithms are natural.
"""

from __future__ import annotations

import math
import shutil
import tempfile
from collections.abc import Callable
from dataclasses import dataclass
from typing import BinaryIO

import numpy as np
import torch

from ktmoe.errors import InputError, OutOfSpaceError

#: Logits that become float64 at a time: a window's may be 100 million.
AT_ONCE = 2**21


@dataclass(frozen=True)
class Window:
    """The model reads tokens first to last - 1; the last `scored` of them are scored."""

    first: int
    last: int
    scored: int


@dataclass(frozen=True)
class Mean:
    """A mean over tokens, and its standard error over windows."""

    value: float
    error: float


@dataclass(frozen=True)
class Scores:
    """Sums over each window's scored tokens: float64 [windows].

    nll: of the negative log-likelihoods. kl: of the Kullback-Leibler divergences of the next token's distribution from the
    exact run's. same_top: how often the likeliest token is the exact run's. kl and same_top: None for the exact run itself.
    """

    tokens: np.ndarray
    nll: np.ndarray
    kl: np.ndarray | None = None
    same_top: np.ndarray | None = None

    @property
    def perplexity(self) -> Mean:
        mean = self.mean(self.nll)
        with np.errstate(over="ignore"):
            value = float(np.exp(mean.value))
        return Mean(value, value * mean.error)

    def mean(self, sums: np.ndarray) -> Mean:
        """The mean over tokens of what was summed up for each window.

        The error is that of a ratio of sums (Cochran 1977, "Sampling Techniques", chapter 6).
        """
        value = sums.sum() / self.tokens.sum()
        apart = sums - value * self.tokens
        n = len(sums)
        return Mean(float(value), float(math.sqrt(n / (n - 1) * (apart**2).sum()) / self.tokens.sum()) if n > 1 else math.nan)


def windows(tokens: int, context: int) -> list[Window]:
    """The windows of a text of so many tokens. Raises InputError if there are not at least two: one has no standard error."""
    if context < 2:
        raise InputError(f"context must be at least 2 tokens, found {context}")
    if tokens <= context:
        raise InputError(
            f"the text must have more tokens than one window of {context}, found {tokens}; a smaller context may help"
        )
    found, scored = [], 1
    for first in range(0, tokens, context // 2):
        last = min(first + context, tokens)
        found.append(Window(first, last, last - scored))
        scored = last
        if last == tokens:
            break
    return found


class Logits:
    """The exact run's logits, bit for bit, in a file. file: a temporary one, which the caller closes."""

    def __init__(self, file: BinaryIO):
        self._file = file

    def write(self, logits: torch.Tensor) -> None:
        self._file.write(memoryview(logits.contiguous().view(torch.uint8).numpy()))

    def rewind(self) -> None:
        """Let the next read() give what was written first."""
        self._file.seek(0)

    def read(self, like: torch.Tensor) -> torch.Tensor:
        """The next logits, of that shape and dtype."""
        data = bytearray(like.numel() * like.element_size())
        self._file.readinto(data)
        return torch.frombuffer(data, dtype=like.dtype).view(like.shape)


def require_space(nbytes: int) -> None:
    """Raise OutOfSpaceError, which says how to do with less, if temporary files cannot have so many bytes."""
    folder = tempfile.gettempdir()
    free = shutil.disk_usage(folder).free
    if free < nbytes:
        raise OutOfSpaceError(
            f"{folder}: the logits of the exact run need {nbytes / 1e9:.2f} GB of free space, found {free / 1e9:.2f} GB;"
            " take fewer tokens, or set TMPDIR to a folder that has more"
        )


def logits(model: torch.nn.Module, tokens: torch.Tensor, window: Window) -> torch.Tensor:
    """What predicts the window's scored tokens: [scored, vocabulary] on the CPU, in the model's dtype.

    tokens: the whole text's, int64 [n].
    """
    read = tokens[window.first : window.last].to(model.device)
    with torch.no_grad():
        found = model(read[None], use_cache=False, logits_to_keep=window.scored + 1).logits
    return found[0, -window.scored - 1 : -1].cpu()


def score(
    model: torch.nn.Module,
    tokens: torch.Tensor,
    cut: list[Window],
    *,
    keep: Logits | None = None,
    against: Logits | None = None,
    progress: Callable[[float, float], object] | None = None,
    before: Callable[[int], object] | None = None,
) -> Scores:
    """Run a model over all windows, one at a time.

    tokens: int64 [n]. keep: where to write its logits. against: the exact run's, to compare with.
    progress: called with (windows done, windows). before: called with a window's number before the model runs.
    """
    sums = np.zeros((3, len(cut)))
    if against:
        against.rewind()
    for number, window in enumerate(cut):
        if before:
            before(number)
        found = logits(model, tokens, window)
        if keep:
            keep.write(found)
        exact = against.read(found) if against else None
        targets = tokens[window.last - window.scored : window.last]
        count = max(1, AT_ONCE // found.shape[1])
        for start in range(0, window.scored, count):
            rows = slice(start, start + count)
            sums[:, number] += _sums(found[rows], targets[rows], None if exact is None else exact[rows])
        if progress:
            progress(number + 1, len(cut))
    counts = np.array([window.scored for window in cut], np.float64)
    return Scores(counts, sums[0], *(sums[1:] if against else ()))


def _sums(found: torch.Tensor, targets: torch.Tensor, exact: torch.Tensor | None) -> tuple[float, float, float]:
    """Sums over rows of logits: of -log p of the targets, of the divergence from exact's, of equal likeliest tokens."""
    ours = torch.log_softmax(found.double(), -1)
    nll = -ours.gather(1, targets[:, None]).sum().item()
    if exact is None:
        return nll, 0.0, 0.0
    theirs = torch.log_softmax(exact.double(), -1)
    p = theirs.exp()
    kl = theirs.sub_(ours).mul_(p).nansum().item()  # NaN is 0 times infinity: a token whose p is 0 counts 0
    same = (found.argmax(-1) == exact.argmax(-1)).sum().item()
    return nll, kl, same
