"""demo_chat.py [--model DIR] [--prompt TEXT]: a model answers through `ktmoe chat`, for which transformers is first installed.

Without a model it is a small Mixture-of-Experts model that is trained here, in about a minute on two cores, until it knows the
hundred answers of demo_chat.toml by heart. It is kept in build/demo-chat, 3 MB.
"""

import argparse
import hashlib
import os
import subprocess
import sys
import tomllib
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
sys.path.insert(0, str(ROOT))

from bench.peers import environments  # noqa: E402

TRAINER = ROOT / "tools" / "demo_chat_model.py"
ANSWERS = ROOT / "tools" / "demo_chat.toml"
MODELS = ROOT / "build" / "demo-chat"
PROMPTS = ("What is ktmoe?", "Is it faster than llama.cpp?")


def main(arguments: list[str]) -> int:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--model", metavar="DIR", help="a checkpoint's folder, a .gguf file, or an id of the Hugging Face Hub")
    parser.add_argument("--prompt", metavar="TEXT", help=f"a question; by default {' and '.join(PROMPTS)}")
    parser.add_argument("--answers", metavar="FILE", type=Path, default=ANSWERS, help="a TOML file: [answers] to learn")
    chosen = parser.parse_args(arguments)
    try:
        interpreter = environments.python(environments.ENGINES, say)
    except environments.SetUpError as error:
        say(f"transformers cannot be installed: {error}")
        return 1
    if chosen.model:
        return chat(interpreter, chosen.model, [chosen.prompt or "What do you do all day?"])
    known = len(tomllib.loads(chosen.answers.read_text(encoding="utf-8"))["answers"])
    model = MODELS / hashlib.sha256(TRAINER.read_bytes() + chosen.answers.read_bytes()).hexdigest()[:12]
    if not model.exists():
        say(f"training a model of 1.2 million weights on {known} questions: a minute on 2 idle cores, longer beside other work")
        status = run(interpreter, [TRAINER, chosen.answers, model])
        if status:
            return status
    status = chat(interpreter, model, [chosen.prompt] if chosen.prompt else PROMPTS, "--greedy")
    say(f'it knows {known} answers by heart: make demo-chat PROMPT="..." with a question of {os.path.relpath(chosen.answers)}')
    return status


def chat(interpreter: Path, model: str | Path, prompts: list[str] | tuple[str, ...], *options: str) -> int:
    """The exit status of the last. ktmoe is not installed in that environment, but is found in this folder."""
    status = 0
    for prompt in prompts:
        print(f"> {prompt}", flush=True)
        status = run(interpreter, ["-m", "ktmoe", "chat", model, prompt, *options])
    return status


def run(interpreter: Path, arguments: list[str | Path]) -> int:
    variables = {"PYTHONPATH": str(ROOT), "TOKENIZERS_PARALLELISM": "false"}
    return subprocess.run([interpreter, *arguments], env=os.environ | variables, check=False).returncode


def say(text: str) -> None:
    print(f"ktmoe: {text}", flush=True)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
