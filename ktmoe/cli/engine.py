"""The start of torch and transformers, for commands that generate text."""

from __future__ import annotations

import os


def start(*, server: bool = False) -> None:
    """Import them, without the progress bars of transformers: the experts' bytes are nearly all, and have a bar of ours.

    server: they must be able to serve, too. Raises UnavailableError, which says how to install what is missing.
    """
    # torch's idle threads would spin on the CPUs of ktmoe's; OpenMP reads this when torch is imported
    os.environ.setdefault("OMP_WAIT_POLICY", "passive")
    import ktmoe.transformers  # noqa: F401

    if server:
        from ktmoe.transformers.serving import check_packages

        check_packages()
    from transformers.utils import logging

    logging.disable_progress_bar()
