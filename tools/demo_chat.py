"""demo_chat.py [--model DIR] [--prompt TEXT]: a model answers through `ktmoe chat`, for which transformers is first installed.

Without a model it is a tiny one with random weights, whose answer means nothing; its speed is that of Python around it.
"""

import argparse
import os
import subprocess
import sys
import tempfile
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
sys.path.insert(0, str(ROOT))

from bench.peers import environments  # noqa: E402
from ktmoe import synthetic  # noqa: E402


def main(arguments: list[str]) -> int:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--model", metavar="DIR", help="a checkpoint's folder, or an id of the Hugging Face Hub")
    parser.add_argument("--prompt", metavar="TEXT", default="What do you do all day?")
    chosen = parser.parse_args(arguments)
    try:
        interpreter = environments.python(environments.ENGINES, say)
    except environments.SetUpError as error:
        say(f"transformers cannot be installed: {error}")
        return 1
    if chosen.model:
        return chat(interpreter, chosen.model, chosen.prompt)
    with tempfile.TemporaryDirectory(prefix="ktmoe-demo-") as folder:
        model = Path(folder) / "tiny"
        synthetic.write_chat_model(model, num_experts=32, hidden=256, intermediate=128, layers=4, top_k=4)
        say("a tiny Qwen3-MoE with random weights: 4 layers of 32 experts; it makes up letters")
        return chat(interpreter, model, chosen.prompt, "--greedy", "--max-new-tokens", "200")


def chat(interpreter: Path, model: str | Path, prompt: str, *options: str) -> int:
    """Its exit status. ktmoe is not installed in that environment, but is found in this folder."""
    print(f"> {prompt}", flush=True)
    variables = {"PYTHONPATH": str(ROOT), "TOKENIZERS_PARALLELISM": "false"}
    command = [interpreter, "-m", "ktmoe", "chat", model, prompt, *options]
    return subprocess.run(command, env=os.environ | variables, check=False).returncode


def say(text: str) -> None:
    print(f"ktmoe: {text}", flush=True)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
