"""Packed caches: a folder with a checkpoint's experts as they lie in memory, which a layer maps in place of packing them."""
