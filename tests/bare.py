"""A backend's packed experts that have nothing but what every backend has to have."""

from ktmoe.backends.base import Packed


class Bare(Packed):
    nbytes = 0

    def forward(self, x, ids, weights, mask, out):
        raise AssertionError

    def close(self):
        pass
