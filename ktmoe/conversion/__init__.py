"""Converting checkpoints: the routed experts are rounded by a named rule, all other tensors stay as they are."""

from ktmoe.conversion.convert import Report, convert

__all__ = ["Report", "convert"]
