"""Adapters in files: PEFT's format, written and read."""

from ktmoe.adapters.reading import import_adapter
from ktmoe.adapters.writing import export_adapter

__all__ = ["export_adapter", "import_adapter"]
