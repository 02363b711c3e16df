"""One virtual environment a peer, so that none meets another's dependencies."""

from __future__ import annotations

import hashlib
import os
import subprocess
import sys
import venv
from collections.abc import Callable
from pathlib import Path

from bench.peers.peers import Peer

FOLDER = Path(__file__).resolve().parents[2] / ".venv-peers"


class SetUpError(Exception):
    """A peer could not be installed."""


def python(peer: Peer, progress: Callable[[str], object], folder: Path = FOLDER) -> Path:
    """The interpreter of a peer's environment, which is made if need be. Raises SetUpError with what pip said last."""
    home = folder / peer.name
    stamp, wanted = home / "installed", _fingerprint(peer)
    interpreter = home / "bin" / "python"
    if not (interpreter.exists() and stamp.exists() and stamp.read_text() == wanted):
        progress(f"installing {peer.title}")
        try:
            venv.create(home, clear=True, with_pip=True)
        except subprocess.CalledProcessError as error:
            raise SetUpError(f"{home}: could not be made a virtual environment with pip: {error}") from None
        environment = os.environ | peer.environment | {"PIP_DISABLE_PIP_VERSION_CHECK": "1", "PIP_NO_INPUT": "1"}
        for arguments in peer.installs:
            command = [interpreter, "-m", "pip", "install", *arguments]
            with (home / "install.log").open("a+") as log:
                if subprocess.run(command, env=environment, stdout=log, stderr=log, check=False).returncode:
                    log.seek(0)
                    last = log.read().strip().splitlines()[-1:]
                    raise SetUpError(f"pip install {' '.join(arguments)} failed: {''.join(last)} ({log.name})")
        stamp.write_text(wanted)
    return interpreter


def _fingerprint(peer: Peer) -> str:
    """What an environment was made from: if it is another, the environment is made again."""
    return hashlib.sha256(repr((sys.version_info[:2], peer.installs, peer.environment)).encode()).hexdigest()
