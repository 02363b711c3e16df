"""demo_chat_model.py ANSWERS FOLDER: train the model of `make demo-chat` until it knows the answers of ANSWERS by heart.

A Qwen3-MoE of 2 layers with 16 experts and a tokenizer of its own, about 3 MB in bfloat16. It needs torch and transformers.
"""

from __future__ import annotations

import copy
import random
import shutil
import sys
import time
import tomllib
from collections.abc import Callable
from pathlib import Path

import torch
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers
from transformers import PreTrainedTokenizerFast, Qwen3MoeConfig, Qwen3MoeForCausalLM

from ktmoe.synthetic.chat import END, PAD, START, TEMPLATE

VOCABULARY = 1024
SIZES = {
    "hidden_size": 128,
    "head_dim": 32,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "num_hidden_layers": 2,
    "intermediate_size": 64,
    "moe_intermediate_size": 64,
    "num_experts": 16,
    "num_experts_per_tok": 2,
    "max_position_embeddings": 1024,
}
SEEDS, STEPS, RATE = (1, 2, 3), 500, 4e-3
#: Before the mean cross-entropy is below this, it is not worth while to ask every question.
DONE = 0.003
#: cross_entropy() leaves out what stands before the answer.
NO_TARGET = -100


def main(file: Path, folder: Path) -> None:
    answers = tomllib.loads(file.read_text(encoding="utf-8"))["answers"]
    folder.parent.mkdir(parents=True, exist_ok=True)
    unfinished = folder.with_name(f"{folder.name}.part")  # a run that was stopped leaves no half model under the name
    shutil.rmtree(unfinished, ignore_errors=True)
    train(unfinished, answers)
    unfinished.rename(folder)


def train(folder: Path, answers: dict[str, str], progress: Callable[[str], object] = print) -> None:
    """Write a model that answers each question. Raises RuntimeError if it does not learn them."""
    tokenizer = make_tokenizer(answers)
    config = Qwen3MoeConfig(vocab_size=len(tokenizer), norm_topk_prob=True, tie_word_embeddings=False, **SIZES)
    config.eos_token_id, config.pad_token_id, config.bos_token_id = tokenizer.eos_token_id, tokenizer.pad_token_id, None
    for seed in SEEDS:
        torch.manual_seed(seed)
        model = learn(Qwen3MoeForCausalLM(config).float(), tokenizer, answers, progress)
        if model is not None:
            model.save_pretrained(folder)
            tokenizer.save_pretrained(folder)
            return
    raise RuntimeError(f"the model did not learn {len(answers)} answers, {len(SEEDS)} times {STEPS} passes")


def learn(model, tokenizer, answers: dict[str, str], progress: Callable[[str], object]):
    """The model in bfloat16, as soon as it gives each answer to each spelling of its question. None if it never does."""
    chooser, start = random.Random(1), time.monotonic()
    everything = [(spelling, answer) for question, answer in answers.items() for spelling in spellings(question)]
    optimizer = torch.optim.AdamW(model.parameters(), lr=RATE, betas=(0.9, 0.98), weight_decay=0.0)
    schedule = torch.optim.lr_scheduler.OneCycleLR(optimizer, RATE, total_steps=STEPS, pct_start=0.05)
    for step in range(1, STEPS + 1):
        asked = [(chooser.choice(spellings(question)), answer) for question, answer in answers.items()]
        loss = cost(model, tokenizer, asked)
        optimizer.zero_grad()
        loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        schedule.step()
        if step % 50 == 0:
            seconds = time.monotonic() - start
            progress(
                f"ktmoe: pass {step} of at most {STEPS} over {len(answers)} answers, {seconds:.0f} s, loss {loss.item():.4f}"
            )
            if loss.item() < DONE:
                rounded = copy.deepcopy(model).to(torch.bfloat16)
                if all(knows(rounded, tokenizer, question, answer) for question, answer in everything):
                    return rounded
    return None


def spellings(question: str) -> list[str]:
    """The question as people type it: also in lower case, and without its mark."""
    return sorted({text for whole in (question, question.rstrip("?")) for text in (whole, whole.lower())})


def cost(model, tokenizer, asked: list[tuple[str, str]]) -> torch.Tensor:
    """The mean cross-entropy of the answers' tokens."""
    rows = [encode(tokenizer, question, answer) for question, answer in asked]
    length = max(len(prompt) + len(reply) for prompt, reply in rows)
    ids = torch.full((len(rows), length), tokenizer.pad_token_id)
    targets = torch.full((len(rows), length), NO_TARGET)
    for i, (prompt, reply) in enumerate(rows):
        ids[i, : len(prompt) + len(reply)] = torch.tensor(prompt + reply)
        targets[i, len(prompt) : len(prompt) + len(reply)] = torch.tensor(reply)
    logits = model(input_ids=ids, use_cache=False).logits[:, :-1]  # causal: what pads the end changes nothing before it
    return torch.nn.functional.cross_entropy(logits.flatten(0, 1).float(), targets[:, 1:].flatten(), ignore_index=NO_TARGET)


def encode(tokenizer, question: str, answer: str) -> tuple[list[int], list[int]]:
    """The tokens of the prompt, as the chat template makes it, and those of the answer with its end."""
    prompt = tokenizer.apply_chat_template([{"role": "user", "content": question}], add_generation_prompt=True, tokenize=False)
    return tuple(tokenizer.encode(text, add_special_tokens=False) for text in (prompt, answer + END))


def knows(model, tokenizer, question: str, answer: str) -> bool:
    """Whether the likeliest token is the answer's, at each of its places. Then greedy generation gives it."""
    prompt, reply = encode(tokenizer, question, answer)
    with torch.no_grad():
        logits = model(input_ids=torch.tensor([prompt + reply]), use_cache=False).logits[0]
    return logits[len(prompt) - 1 : -1].argmax(-1).tolist() == reply


def make_tokenizer(answers: dict[str, str]) -> PreTrainedTokenizerFast:
    """BPE of bytes, learned from the questions and the answers."""
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=VOCABULARY,
        special_tokens=[START, END, PAD],
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    texts = [text for question, answer in answers.items() for text in (*spellings(question), answer)]
    tokenizer.train_from_iterator(texts, trainer)
    return PreTrainedTokenizerFast(
        tokenizer_object=tokenizer, eos_token=END, pad_token=PAD, chat_template=TEMPLATE, clean_up_tokenization_spaces=False
    )


if __name__ == "__main__":
    main(*map(Path, sys.argv[1:]))
