"""The measurement of whole models: tokens a second of ktmoe in transformers and of llama.cpp on the same numbers, or file."""

from __future__ import annotations

from argparse import Namespace
from collections.abc import Callable, Iterator
from pathlib import Path

import numpy as np

from bench import machine
from bench.engines import published_gguf, session
from bench.engines.session import Call, Participant
from bench.engines.shapes import Engine
from bench.engines.ways import OF_GGUF, SAME_BYTES, whole_fits

#: Of a text or several: 16 texts have short prompts, since theirs are as long as all together.
CALLS = (Call(1, 128, 33), Call(4, 128, 17), Call(16, 32, 17))
#: What is asked for first in the round for warming up, and nothing after it.
WARM_CALLS = CALLS[:1]
#: Tokens that are written after a long text.
AFTER_CONTEXT = 17
#: Layers of the model whose logits are compared. Random models' routers have many near ties: after eight layers one rounding or
#: another has sent most tokens elsewhere, and the median token differs by 20 %.
CHECKED_LAYERS = 2
#: The file of a run of one GGUF file.
FILE = "model.gguf"
NO_GGUF = "llama.cpp: the bench writes no GGUF file of this architecture"


def calls(comparison: str, options: Namespace) -> tuple[Call, ...]:
    """options: prompts, contexts: numbers of tokens."""
    if comparison == "contexts":
        return tuple(Call(1, context, AFTER_CONTEXT) for context in options.contexts)
    return (*CALLS, *(Call(1, prompt, 1) for prompt in options.prompts))


def compare(
    engine: Engine,
    comparison: str,
    options: Namespace,
    python: Callable[[str], Path],
    folder: Path,
    progress: Callable[[str], object],
) -> dict:
    """One model in all ways. options: of `run`, see __main__.py. python: the interpreter of an owner. folder: a new one's name.

    Processes have their turns in the same rounds where all fit into memory; else they follow each other. Failures of
    participants are part of the result. Raises ValueError if one alone does not fit, WorkerError if nothing could be written.
    """
    layers = engine.experts.layers if options.layers == "all" else options.layers
    taking_part, layers, by_turns = whole_fits(
        engine, comparison, machine.usable_bytes(session.SHARE_OF_MEMORY), layers, options.dense
    )
    kind = _RunOfFile if comparison == OF_GGUF else _Run
    run = kind(engine, layers, python, folder, lambda text: progress(f"{engine.name}, {layers} layers: {text}"))
    participants = [Participant(process) for process in taking_part]
    checked = folder.with_name("checked")
    _check(
        kind(engine, CHECKED_LAYERS, python, checked, lambda text: progress(f"{engine.name}, checking: {text}")), participants
    )
    run.write()
    made = calls(comparison, options)
    warm = () if comparison == "contexts" else WARM_CALLS
    try:
        groups = [participants] if by_turns else [[participant] for participant in participants]
        rounds = [record for group in groups for record in run.rounds(group, options.rounds, warm, made)]
    finally:
        for participant in participants:
            participant.close()
    return {
        "model": engine.name,
        "comparison": comparison,
        **({"file": published_gguf.TYPES[engine.kind]} if comparison == OF_GGUF else {}),
        "layers": layers,
        "of_layers": engine.experts.layers,
        "vocabulary": engine.vocabulary_of(layers),
        "by_turns": by_turns,
        "ways": {p.process.name: _described(p) | {"expert_bytes": run.expert_bytes()} for p in participants},
        "cache_bytes": {str(call.prompt): engine.cache_bytes(layers, call.prompt + call.new // 2) for call in made},
        "notes": [] if engine.as_gguf else [NO_GGUF],
        "rounds": rounds,
    }


def _described(participant: Participant) -> dict:
    process = participant.process
    found = session.described(participant, process.name)
    return found | {"owner": process.owner, "beside": SAME_BYTES.get(process.name)}


class _Run:
    """A model with so many layers, as a checkpoint and as GGUF files."""

    def __init__(
        self, engine: Engine, layers: int, python: Callable[[str], Path], folder: Path, progress: Callable[[str], object]
    ):
        self._engine, self._layers, self._python, self._folder, self._progress = engine, layers, python, folder, progress
        self._config = engine.config(layers)

    @property
    def folder(self) -> Path:
        return self._folder

    def expert_bytes(self) -> list[int]:
        """Bytes of an expert of each layer."""
        return [self._engine.expert_bytes("MXFP4")] * self._layers

    def write(self) -> None:
        self._progress("writing")
        session.write(self._python("ktmoe"), self._folder, self._config, self._engine.published_dense)

    def load(self, participant: Participant) -> None:
        """Start a participant's process. A GGUF file is there while its process is."""
        process = participant.process
        self._progress(f"loading {process.name}")
        if process.owner != "llama.cpp":
            session.load(participant, self._python(process.owner), self._folder, self._config)
            return
        file = f"{process.dense}.gguf"
        writer = session.start(self._python("ktmoe"), self._folder, "write", {})
        try:
            nbytes = writer.ask(do="write_gguf", into=file, dense=process.dense, patience=session.PATIENCE)
        finally:
            writer.close()
        python = self._python(process.owner)
        participant.worker = session.start(python, self._folder, process.name, process.environment, "worker_llama")
        found = participant.ask("", do="load", file=file, patience=session.PATIENCE)
        (self._folder / file).unlink()  # what is mapped stays until the process ends
        participant.loaded = found | {"bytes": nbytes} if found else {}

    def rounds(
        self, participants: list[Participant], count: int, warm: tuple[Call, ...], made: tuple[Call, ...]
    ) -> Iterator[dict]:
        """Each round's calls, and the read bandwidth before each turn. A round before them is for warming up."""
        for participant in participants:
            if participant.ways:
                self.load(participant)
        if not any(participant.ways for participant in participants):
            return
        with session.reading(self._engine) as limits:
            for number in range(count + 1):
                record = {"number": number, "reads": {}, "read_streams": limits.streams, "ways": {}}
                for participant in participants[:: -1 if number % 2 else 1]:
                    for way in participant.ways:
                        self._progress(f"round {number} of {count}, {way}")
                        record["reads"][way] = limits.read(session.LIMIT_SECONDS)  # a round takes minutes
                        if found := session.turn(participant, way, number, made if number else warm):
                            record["ways"][way] = found
                if number:
                    yield record
        for participant in participants:
            participant.close()


class _RunOfFile(_Run):
    """A GGUF file with so many layers, which all load."""

    def expert_bytes(self) -> list[int]:
        return published_gguf.expert_bytes(self._engine, self._layers)

    def write(self) -> None:
        self._progress("writing")
        self._folder.mkdir()
        published_gguf.write(self._engine, self._layers, self._folder / FILE)

    def load(self, participant: Participant) -> None:
        process = participant.process
        self._progress(f"loading {process.name}")
        theirs = process.owner == "llama.cpp"
        fields = {} if theirs else {"owner": process.owner, "weights": process.weights}
        python, worker = self._python(process.owner), "worker_llama" if theirs else "worker"
        participant.worker = session.start(python, self._folder, process.name, process.environment, worker)
        found = participant.ask("", do="load", file=FILE, patience=session.PATIENCE, **fields)
        nbytes = published_gguf.parts(published_gguf.tensors(self._engine, self._layers))
        participant.loaded = found | {"bytes": nbytes} if found else {}


def _check(run: _Run, participants: list[Participant]) -> None:
    """Whoever's logits differ from the first's is out: of a model of few layers, which each loads by itself."""
    run.write()
    expected = None
    for participant in participants:
        tried = Participant(participant.process)
        try:
            logits = _logits(run, tried, run.folder / "logits.npy")
        finally:
            tried.close()
        participant.failures |= tried.failures
        if logits is None:
            continue
        if expected is None:
            expected = logits
            continue
        error = participant.errors[participant.process.name] = session.median_error(logits, expected)
        if not error <= session.MOST_ERROR:
            participant.failures[participant.process.name] = session.wrong(error)


def _logits(run: _Run, participant: Participant, file: Path) -> np.ndarray | None:
    run.load(participant)
    process = participant.process
    fields = {"implementation": "ktmoe"} if process.owner == "ktmoe" else {}
    if not participant.ways:
        return None
    answer = participant.ask(process.name, do="logits", tokens=session.CHECKED_TOKENS, into=file.name, **fields)
    return None if answer is None else np.load(file)
