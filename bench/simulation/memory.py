"""How the workers that read from one node's memory share its bandwidth.

A piece of work takes `alone` seconds while nobody else reads, and reads `nbytes` meanwhile: nbytes / alone is its demand. Where
all demands together are less than the bandwidth B, each gets its own and a part of what is left; where they are more, all whose
demand is above one level get that level (processor sharing). What a worker may take is its share r, and

    seconds = (alone^s + (nbytes / r)^s - (nbytes / B)^s)^(1/s)

which is the larger of both but for a soft corner: a core that computes about as long as it reads overlaps the two in part. The
sharpness s was fitted to calls of two threads. The last term makes it `alone` where nobody else reads.
"""

from __future__ import annotations

import numpy as np


def seconds(alone: np.ndarray, nbytes: np.ndarray, bandwidth: float, sharpness: float) -> np.ndarray:
    """The seconds of each piece of work, if all of them are done at the same time. All of them read."""
    if len(alone) == 1:
        return alone
    share = level(nbytes / alone, bandwidth)
    # In units of `alone`, so that powers stay within floats.
    beside = (nbytes / (share * alone)) ** sharpness - (nbytes / (bandwidth * alone)) ** sharpness
    return alone * (1 + np.maximum(beside, 0)) ** (1 / sharpness)


def level(demands: np.ndarray, bandwidth: float) -> float:
    """The most that one of them may take."""
    spare = bandwidth - demands.sum()
    if spare >= 0:
        return demands.max() + spare / len(demands)
    ascending = np.sort(demands)
    before = np.concatenate(([0.0], np.cumsum(ascending)[:-1]))
    levels = (bandwidth - before) / np.arange(len(demands), 0, -1)
    return levels[np.argmax(ascending >= levels)]
