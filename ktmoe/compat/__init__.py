"""ktmoe under the interfaces of other packages, for callers written against those. Nothing in ktmoe depends on this package."""
