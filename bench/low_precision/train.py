"""Trains a tiny Qwen3-MoE on English text that every Python has, in a few minutes; rounds its experts to MXFP4.

python -m bench.low_precision.train FOLDER makes FOLDER/model in bfloat16, FOLDER/mxfp4, and FOLDER/text, which it did not see.
It needs torch and transformers. The text is that of the Python reference manual, as `help()` has it.
"""

from __future__ import annotations

import sys
from pathlib import Path
from pydoc_data.topics import topics

import torch
from transformers import AutoModelForCausalLM

from ktmoe import synthetic
from ktmoe.conversion import convert

SHAPE = {"num_experts": 16, "hidden": 256, "intermediate": 128, "layers": 4, "top_k": 4}
#: Bytes of the text that the model is tested with; its tokens are bytes.
HELD_OUT = 20_000
STEPS, BATCH, CONTEXT, RATE = 500, 16, 128, 2e-3


def main(folder: Path) -> None:
    text = "\n".join(topics[name] for name in sorted(topics)).encode("ascii", "ignore")
    (folder / "text").write_bytes(text[-HELD_OUT:])
    synthetic.write_chat_model(folder / "random", **SHAPE)
    model = trained(AutoModelForCausalLM.from_pretrained(folder / "random", dtype=torch.float32), text[:-HELD_OUT])
    model.to(torch.bfloat16).save_pretrained(folder / "model")
    for file in (folder / "random").glob("*token*.json"):
        (folder / "model" / file.name).write_bytes(file.read_bytes())
    convert(folder / "model", folder / "mxfp4", to="mxfp4")


def trained(model: torch.nn.Module, text: bytes) -> torch.nn.Module:
    """AdamW with a warm-up and a cosine decay; the router's load is balanced as the model's own loss has it."""
    torch.manual_seed(0)
    for name, parameter in model.named_parameters():
        if name == "lm_head.weight":  # those of write_chat_model know few letters
            torch.nn.init.normal_(parameter, std=0.02)
    data = torch.frombuffer(bytearray(text), dtype=torch.uint8).long()
    optimizer = torch.optim.AdamW(model.parameters(), RATE, weight_decay=0.01)
    schedule = torch.optim.lr_scheduler.OneCycleLR(optimizer, RATE, total_steps=STEPS, pct_start=0.1)
    model.train()
    for step in range(STEPS):
        starts = torch.randint(len(data) - CONTEXT, (BATCH,))
        batch = torch.stack([data[start : start + CONTEXT] for start in starts])
        loss = model(input_ids=batch, labels=batch, output_router_logits=True).loss
        loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad()
        schedule.step()
        if step % 50 == 0 or step == STEPS - 1:
            print(f"step {step}: loss {loss.item():.3f}", flush=True)
    return model.eval()


if __name__ == "__main__":
    main(Path(sys.argv[1]))
