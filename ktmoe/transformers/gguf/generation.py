"""generation_config.json of a GGUF file: which tokens end an answer, and how the next one is chosen."""

from __future__ import annotations

import math
from collections.abc import Mapping

from ktmoe.errors import CheckpointError
from ktmoe.messages import show
from ktmoe.transformers.gguf.known_tokens import CONTROL_ENDS, ENDS, FILL_ENDS
from ktmoe.transformers.gguf.vocabulary import CONTROL, Vocabulary, read_vocabulary, token_id

#: What transformers calls the keys of general.sampling, and their least and greatest values. It has none for the others.
_SAMPLING = {
    "temp": ("temperature", 0.0, math.inf),
    "top_k": ("top_k", 0, 2**31 - 1),
    "top_p": ("top_p", 0.0, 1.0),
    "min_p": ("min_p", 0.0, 1.0),
    "penalty_repeat": ("repetition_penalty", 0.0, math.inf),
}


def generation_config(metadata: Mapping[str, object], name: str) -> dict[str, object]:
    """The ids of the first token, of all that end an answer, and of padding; what general.sampling says, where the file has it.

    metadata: of read_metadata(). name: the file, for messages. Raises CheckpointError.
    """
    vocabulary = read_vocabulary(metadata, name)
    found: dict[str, object] = {}
    if "bos_token" in vocabulary.special:
        found["bos_token_id"] = vocabulary.special["bos_token"]
    if ends := _ends(metadata, vocabulary):
        found["eos_token_id"] = ends
    if "pad_token" in vocabulary.special:
        found["pad_token_id"] = vocabulary.special["pad_token"]
    return found | _sampling(metadata, name)


def _ends(metadata: Mapping[str, object], vocabulary: Vocabulary) -> list[int]:
    """The ids of the tokens that end an answer, first the one that the file calls so."""
    ids, count = vocabulary.ids, len(vocabulary.tokens)
    found = [vocabulary.special["eos_token"]] if "eos_token" in vocabulary.special else []
    for key in ("eot_token_id", "eom_token_id", "fim_pad_token_id", "fim_rep_token_id", "fim_sep_token_id"):
        if (id := token_id(metadata, key, count, vocabulary.name)) is not None:
            found.append(id)
    found += sorted(ids[text] for text in ENDS | FILL_ENDS if text in ids)
    found += [ids[text] for text in CONTROL_ENDS if text in ids and vocabulary.types[ids[text]] == CONTROL]
    stated = found[:1]
    # gpt-oss and Solar Open write several messages in an answer, each with <|end|> behind it
    several = ("<|return|>" in ids or "<|flush|>" in ids) and ("<|call|>" in ids or "<|calls|>" in ids)
    if several and "<|end|>" in ids:
        found = [id for id in found if id != ids["<|end|>"]]
    return list(dict.fromkeys(found)) or stated


def _sampling(metadata: Mapping[str, object], name: str) -> dict[str, object]:
    found: dict[str, object] = {}
    for short, (to, least, most) in _SAMPLING.items():
        key = f"general.sampling.{short}"
        if key not in metadata:
            continue
        value = metadata[key]
        kinds = (int,) if isinstance(least, int) else (int, float)
        if type(value) not in kinds or not least <= value <= most or math.isinf(value):
            kind = "an integer" if isinstance(least, int) else "a number"
            bounds = f"from {least} to {most}" if most < math.inf else f"of at least {least}"
            raise CheckpointError(f"{name}: {key}: expected {kind} {bounds}, found {show(value)}")
        found[to] = value
    if found.get("temperature") == 0:
        return {"do_sample": False}
    return {"do_sample": True, **found} if found else {}
