"""`python -m bench.distributed.worker JOB`: one rank. What to measure is in the JSON file JOB; what came of it goes beside it.

JOB: {"communicator": "gloo", "model": {...}, "layers": 2, "cpus": [[0], [1]], "points": [["same", 1, 3], ...], "rounds": 15,
      "sizes": [512, ...], "exchanges": 3, "shards": 8}.       A point: whose tokens, how many, calls of it in a round.
rank-R.json: {"nbytes": of its packed weights, "points": [[call, ...], ...], "exchange": {"512": [[began, end], ...]}}. A call:
{"edges": [0, when an exchange began, when it ended, ..., the end], "replayed": the same without other ranks, "experts": seconds
of it in kernels, "sent": [[bytes to each rank], ...], "alone": seconds of one process}. Times count from a common start.
Raises AssertionError where ranks do not give the bits that one process gives.
"""

from __future__ import annotations

import itertools
import json
import os
import sys
import time
from pathlib import Path

import numpy as np

from bench.distributed.recorder import Recorder
from bench.models import Model
from ktmoe import measuring
from ktmoe.distributed import Communicator, DistributedLayer, Distribution

#: From when ranks agree on a start until it, in seconds. All have to hear of it before.
AHEAD = 0.003
#: Before the start, from when on a rank looks at the clock without sleeping.
AWAKE = 0.0003


class Timed:
    """A layer's forward(), and the seconds that it took since they were last set to 0."""

    def __init__(self, layer):
        self.seconds = 0.0
        self._forward, layer.forward = layer.forward, self._timed

    def _timed(self, *arguments, **options):
        start = time.monotonic()
        y = self._forward(*arguments, **options)
        self.seconds += time.monotonic() - start
        return y


class Rank:
    """Layers that take turns, this rank's part of each; on rank 0 whole ones, too, for what one process does."""

    def __init__(self, job: dict, communicator: Communicator):
        self._job, self._communicator = job, communicator
        self._model = Model(**job["model"])
        self._recorder = Recorder(communicator)
        experts = self._model.make(self._model.experts)
        shards, count = job["shards"], job["layers"]
        self._layers = {
            tokens: [DistributedLayer(experts, Distribution(self._recorder, shards, tokens=tokens)) for _ in range(count)]
            for tokens in dict.fromkeys(tokens for tokens, *_ in job["points"])
        }
        self._experts = {tokens: [Timed(layer.layers[0]) for layer in of] for tokens, of in self._layers.items()}
        self._whole = []
        if communicator.rank == 0:
            self._whole = [DistributedLayer(experts, Distribution(shards=shards)) for _ in range(count)]
        self._turn = itertools.count()
        held = next(iter(self._layers.values()))[0].layers[0].num_experts
        self._own = measuring.random_batches(1, self._model.top_k, held, self._model.hidden)

    def run(self) -> dict:
        job = self._job
        size = self._communicator.size
        made = [batches(self._model, tokens, count, size, seed) for seed, (tokens, count, _) in enumerate(job["points"])]
        found = [[] for _ in made]
        exchange = {nbytes: [] for nbytes in job["sizes"]} if size > 1 else {}
        for number in range(job["rounds"] + 1):  # the first is for warming up
            for at, (tokens, _, calls) in list(enumerate(job["points"]))[:: -1 if number % 2 else 1]:
                for _ in range(calls):
                    call = self._call(tokens, next(made[at]), check=not number)
                    if number:
                        found[at].append(call)
            for nbytes, seconds in exchange.items():
                for _ in range(job["exchanges"]):
                    took = self._exchange(nbytes)
                    if number:
                        seconds.append(took)
        packed = max(layer.nbytes for of in self._layers.values() for layer in of)
        return {"nbytes": packed, "points": found, "exchange": exchange}

    def _call(self, tokens: str, batch: measuring.MeasuredBatch, check: bool) -> dict:
        """One call of all ranks, the same with the messages of before, and one process' call of all tokens."""
        arguments = batch.x, batch.ids, batch.weights
        own = slice(*ends(len(batch.x), self._communicator.size)[self._communicator.rank :][:2])
        mine = arguments if tokens == "same" else [array[own] for array in arguments]
        turn = next(self._turn)
        found = {"alone": self._alone(arguments, turn) if turn % 2 else None}
        y, found["edges"] = self._timed(self._recorder.live, tokens, turn + 1, mine)
        found["sent"] = self._recorder.sent
        _, found["replayed"] = self._timed(self._recorder.replay, tokens, turn + 2, mine)
        found["experts"] = self._experts[tokens][(turn + 2) % self._job["layers"]].seconds
        found["alone"] = found["alone"] or self._alone(arguments, turn + 3)
        if check and self._whole:
            expected = self._whole[0].forward(*arguments)[slice(None) if tokens == "same" else own]
            assert y.tobytes() == expected.tobytes(), f"{len(mine[0])} tokens, {tokens}: ranks give other bits than one process"
        self._recorder.live()  # lets go of the messages
        return found

    def _alone(self, arguments, turn: int) -> float | None:
        """Seconds of MoELayer.forward with all experts."""
        if not self._whole:
            return None
        (layer,) = self._whole[turn % self._job["layers"]].layers
        start = time.monotonic()
        layer.forward(*arguments)
        return time.monotonic() - start

    def _timed(self, way, tokens: str, turn: int, arguments) -> tuple[np.ndarray, list[float]]:
        """(y, edges) of a call."""
        turn %= self._job["layers"]
        self._experts[tokens][turn].seconds = 0.0
        way()
        start = self._meet()
        y = self._layers[tokens][turn].forward(*arguments)
        end = time.monotonic()
        return y, [0.0, *(at - start for at in (*self._recorder.times, end))]

    def _exchange(self, nbytes: int) -> tuple[float, float]:
        """When an exchange of messages of one size began and ended, since the common start.

        A token is computed before it, as before every exchange of a call: that takes out of the caches what sends messages.
        """
        messages = [np.zeros(nbytes, np.uint8) for _ in range(self._communicator.size)]
        layer, token = (
            self._layers[self._job["points"][0][0]][next(self._turn) % self._job["layers"]].layers[0],
            next(self._own),
        )
        start = self._meet()
        layer.forward(token.x, token.ids, token.weights)
        began = time.monotonic()
        self._communicator.exchange(messages, [nbytes] * self._communicator.size)
        return began - start, time.monotonic() - start

    def _meet(self) -> float:
        """Wait for a moment that all ranks know, and return it."""
        start = np.array([time.monotonic() + AHEAD])
        told = self._communicator.exchange([start.view(np.uint8)] * self._communicator.size, [8] * self._communicator.size)
        (start,) = told[0].view(np.float64)
        time.sleep(max(0.0, start - AWAKE - time.monotonic()))
        while time.monotonic() < start:
            pass
        return float(start)


def batches(model: Model, tokens: str, count: int, ranks: int, seed: int):
    """Endless: the tokens of all ranks. count: of a call, with "own" of each rank's."""
    return measuring.random_batches(
        count if tokens == "same" else count * ranks, model.top_k, model.experts, model.hidden, seed=seed
    )


def ends(tokens: int, ranks: int) -> list[int]:
    """Where each rank's own tokens begin and end."""
    return [tokens // ranks * rank for rank in range(ranks + 1)]


def _communicator(kind: str) -> Communicator:
    if kind == "mpi":
        from ktmoe.distributed.mpi import MpiCommunicator

        return MpiCommunicator()
    from ktmoe.distributed.gloo import GlooCommunicator

    return GlooCommunicator()


def main(file: Path) -> None:
    job = json.loads(file.read_text())
    rank = int(os.environ["PMI_RANK" if job["communicator"] == "mpi" else "RANK"])
    os.sched_setaffinity(0, job["cpus"][rank])  # before anything has threads
    communicator = _communicator(job["communicator"])
    try:
        found = Rank(job, communicator).run()
    finally:
        communicator.close()
    file.with_name(f"rank-{rank}.json").write_text(json.dumps(found))


if __name__ == "__main__":
    main(Path(sys.argv[1]))
