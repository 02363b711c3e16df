"""The version of the installed distribution."""

from importlib import metadata


def installed_version() -> str:
    """Looked up when it is asked for, since a tree that is not installed has none."""
    return metadata.version("ktmoe")
