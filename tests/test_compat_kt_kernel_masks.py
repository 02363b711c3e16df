"""generate_gpu_experts_masks against a plain sort."""

import numpy as np
import pytest

from ktmoe.compat.kt_kernel import generate_gpu_experts_masks
from ktmoe.errors import InputError


def test_generate_masks():
    frequency = np.array([[0.1, 0.5, 0.3, 0.8], [0.2, 0.4, 0.9, 0.1]])
    masks = generate_gpu_experts_masks(frequency, 3)
    assert masks.dtype == bool
    assert masks.tolist() == [[False, True, False, True], [False, False, True, False]]
    for number, expected in ((0, 0), (-2, 0), (8, 8), (100, 8)):
        assert generate_gpu_experts_masks(frequency, number).sum() == expected


@pytest.mark.parametrize("dtype", [np.float32, np.int64, np.uint8])
def test_generate_masks_against_a_sort(dtype):
    """With many ties: the first expert of the first layer wins."""
    frequency = np.random.default_rng(0).integers(0, 4, (5, 7)).astype(dtype)
    for number in range(36):
        order = sorted(np.ndindex(5, 7), key=lambda place: (-int(frequency[place]), place))
        expected = np.zeros((5, 7), bool)
        for place in order[:number]:
            expected[place] = True
        assert np.array_equal(generate_gpu_experts_masks(frequency, number), expected)


def test_generate_masks_of_what_is_no_table():
    with pytest.raises(InputError, match=r"activation_freq must have shape \[layers, experts\], found \[3\]"):
        generate_gpu_experts_masks(np.zeros(3), 1)
    with pytest.raises(InputError, match="activation_freq must be a numpy array or a torch"):
        generate_gpu_experts_masks([[1.0]], 1)
