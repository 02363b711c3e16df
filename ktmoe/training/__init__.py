"""LoRA on the routed experts of a layer whose weights stay packed: forward that keeps what backward needs, and backward.

numpy only; ktmoe.torch has the same as a module of PyTorch. docs/fine-tuning.md says how to use it,
docs/training-numerics.md what is computed.
"""

from ktmoe.training.lora import RANK_MAX, Lora
from ktmoe.training.passes import Gradients, Training
from ktmoe.training.saved import Saved, SavedStack, saved_nbytes

__all__ = ["RANK_MAX", "Gradients", "Lora", "Saved", "SavedStack", "Training", "saved_nbytes"]
