"""The start of torch and transformers, for commands that generate text."""

from __future__ import annotations

import os
import sys
from logging import ERROR, getLogger


def start(*, server: bool = False) -> None:
    """Import torch and transformers, without the latter's progress bars: the experts' bytes are nearly all, and have our bar.

    The Hub's bars of downloads, and those of other packages, stay where stderr is a terminal.
    server: they must be able to serve, too. Raises UnavailableError, which says how to install what is missing.
    """
    # torch's idle threads would spin on the CPUs of ktmoe's; OpenMP reads this when torch is imported
    os.environ.setdefault("OMP_WAIT_POLICY", "passive")
    if not sys.stderr.isatty():
        # seconds before tqdm first draws a bar; it reads this when it is imported. Some packages overrule TQDM_DISABLE
        os.environ.setdefault("TQDM_DELAY", str(10**9))
    import ktmoe.transformers  # noqa: F401

    if server:
        from ktmoe.transformers.serving import check_packages

        check_packages()
    # it says that it cannot match the experts, which ktmoe has taken out of the model
    getLogger("compressed_tensors").setLevel(ERROR)
    from huggingface_hub.utils import are_progress_bars_disabled, enable_progress_bars
    from transformers.utils import logging

    wanted = sys.stderr.isatty() and not are_progress_bars_disabled()
    logging.disable_progress_bar()  # the Hub's, too
    if wanted:
        enable_progress_bars()
