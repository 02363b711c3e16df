"""The start of torch and transformers, for commands that generate text."""

from __future__ import annotations

import os
import sys


def start(*, server: bool = False) -> None:
    """Import them, without the progress bars of transformers: the experts' bytes are nearly all, and have a bar of ours.

    The Hub's bars of downloads stay where stderr is a terminal.
    server: they must be able to serve, too. Raises UnavailableError, which says how to install what is missing.
    """
    # torch's idle threads would spin on the CPUs of ktmoe's; OpenMP reads this when torch is imported
    os.environ.setdefault("OMP_WAIT_POLICY", "passive")
    import ktmoe.transformers  # noqa: F401

    if server:
        from ktmoe.transformers.serving import check_packages

        check_packages()
    from huggingface_hub.utils import are_progress_bars_disabled, enable_progress_bars
    from transformers.utils import logging

    wanted = sys.stderr.isatty() and not are_progress_bars_disabled()
    logging.disable_progress_bar()  # the Hub's, too
    if wanted:
        enable_progress_bars()
