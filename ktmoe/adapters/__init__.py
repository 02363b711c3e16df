"""Adapters in files: PEFT's format, written and read, and merged into the weights of a checkpoint."""

from ktmoe.adapters.merge import Merged, merge_adapter
from ktmoe.adapters.reading import import_adapter
from ktmoe.adapters.writing import export_adapter

__all__ = ["Merged", "export_adapter", "import_adapter", "merge_adapter"]
