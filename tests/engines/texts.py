"""What a model says by transformers' generate() alone: the oracle of the commands."""

from __future__ import annotations

from pathlib import Path

import torch
from transformers import AutoTokenizer

import ktmoe.transformers

PROMPT, TOKENS = "Hello there", 40
GREEDY = {"do_sample": False}


class Oracle:
    """A checkpoint's model and tokenizer, in this process. options: of load()."""

    def __init__(self, folder: Path, **options):
        self.tokenizer = AutoTokenizer.from_pretrained(folder)
        self.model = ktmoe.transformers.load(folder, **options)

    def answer(self, *messages: tuple[str, str], **options) -> str:
        """The answer to a conversation of (role, content). options: of generate()."""
        asked = [{"role": role, "content": content} for role, content in messages]
        ids = self.tokenizer.apply_chat_template(asked, add_generation_prompt=True, return_tensors="pt", return_dict=True)
        return self._text(ids["input_ids"], options)

    def continuation(self, text: str, **options) -> str:
        return self._text(self.tokenizer(text, return_tensors="pt")["input_ids"], options)

    def _text(self, ids: torch.Tensor, options: dict) -> str:
        options = {"max_new_tokens": TOKENS, **GREEDY, **options}
        found = self.model.generate(ids, attention_mask=torch.ones_like(ids), **options)
        return self.tokenizer.decode(found[0, ids.shape[1] :], skip_special_tokens=True)
