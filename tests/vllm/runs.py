"""Runs of vLLM in processes of their own, each with several models: importing vLLM takes longer than they do.

runs.py JOBS RESULTS: what such a process does. JOBS: a JSON file of Jobs' fields. RESULTS: where those of Results go to.
"""

from __future__ import annotations

import gc
import json
import os
import subprocess
import sys
from dataclasses import asdict, dataclass, field
from pathlib import Path

from bench.peers import environments

ROOT = Path(__file__).resolve().parents[2]
#: Seconds that a process may take.
PATIENCE = 300
#: New tokens of each prompt, and the tokens of the prompts.
NEW, PROMPTS = 16, ([5, 9, 40, 33, 7, 12, 101, 66, 2], list(range(60, 90)))
#: What begins the output of each job.
NEXT = "-- the next model"
#: What a model is loaded with. A tiny model needs no compiled graph, and has no tokenizer.
OPTIONS = {"skip_tokenizer_init": True, "enforce_eager": True, "dtype": "bfloat16", "max_model_len": 128}


@dataclass(frozen=True)
class Job:
    """folder: of a model. options: of vllm.LLM besides OPTIONS."""

    folder: str
    options: dict = field(default_factory=dict)


@dataclass(frozen=True)
class Result:
    """tokens: greedy, [prompts, NEW]. logprobs: of each of them {token: logprob} for the likeliest few.

    calls: {a MoELayer's name: how many calls of its forward() there were in the second of two runs}; in one process only.
    left: bytes of the experts' parameters after loading; in one process only. anonymous: bytes of the process's memory then.
    log: what the plug-in said. error: what was raised, instead of all this.
    """

    tokens: list[list[int]] = field(default_factory=list)
    logprobs: list[list[dict[int, float]]] = field(default_factory=list)
    calls: dict[str, int] = field(default_factory=dict)
    left: int = 0
    anonymous: int = 0
    log: list[str] = field(default_factory=list)
    error: str = ""


def prepared(folder: Path) -> dict[str, str]:
    """Make a folder with ktmoe's entry points; the environment variables of a process that is to find them."""
    folder.mkdir()
    environments.describe_ktmoe(folder)
    return os.environ | {
        "PYTHONPATH": os.pathsep.join((str(folder), str(ROOT))),
        "HF_HUB_OFFLINE": "1",
        "VLLM_NO_USAGE_STATS": "1",
        "VLLM_CPU_KVCACHE_SPACE": "1",
        "TORCHDYNAMO_DISABLE": "1",  # compiling the sampler would take longer than all the rest
    }


def start(jobs: list[Job], folder: Path, **variables: str) -> list[Result]:
    """Run jobs one after the other in one process, in which vLLM finds the plug-in as an installed one. variables: of it."""
    environment = prepared(folder) | {"VLLM_ENABLE_V1_MULTIPROCESSING": "0"}
    (folder / "jobs").write_text(json.dumps([asdict(job) for job in jobs]))
    command = [sys.executable, __file__, str(folder / "jobs"), str(folder / "results")]
    with (folder / "output").open("w+") as output:
        done = subprocess.run(
            command, env=environment | variables, stdout=output, stderr=output, check=False, timeout=PATIENCE, cwd=folder
        )
        output.seek(0)
        text = output.read()
    assert done.returncode == 0, text[-5000:]
    results = json.loads((folder / "results").read_text())
    said = [[line.partition("] ")[2] for line in part.splitlines() if "] ktmoe " in line] for part in text.split(NEXT)[1:]]
    return [Result(**result | {"log": log}) for result, log in zip(results, said, strict=True)]


def main(jobs: str, results: str) -> None:
    found = []
    for job in json.loads(Path(jobs).read_text()):
        print(NEXT, flush=True)
        found.append(asdict(run(Job(**job))))
    Path(results).write_text(json.dumps(found))


def run(job: Job) -> Result:
    from vllm import LLM, SamplingParams
    from vllm.distributed import cleanup_dist_env_and_memory

    llm = None
    try:
        llm = LLM(job.folder, **OPTIONS | job.options)
        left = sum(llm.apply_model(bytes_of_experts)) if os.environ["VLLM_ENABLE_V1_MULTIPROCESSING"] == "0" else 0
        anonymous = own_memory()
        prompts = [{"prompt_token_ids": prompt} for prompt in PROMPTS]
        sampling = SamplingParams(temperature=0, max_tokens=NEW, logprobs=4, ignore_eos=True)
        llm.generate(prompts, sampling, use_tqdm=False)
        calls = count_calls()
        outputs = [request.outputs[0] for request in llm.generate(prompts, sampling, use_tqdm=False)]
        return Result(
            [list(output.token_ids) for output in outputs],
            [[{token: found.logprob for token, found in each.items()} for each in output.logprobs] for output in outputs],
            dict(calls),
            left,
            anonymous,
        )
    except Exception as error:
        return Result(error=f"{type(error).__name__}: {error}")
    finally:
        del llm
        gc.collect()
        cleanup_dist_env_and_memory()


def bytes_of_experts(model) -> int:
    named = model.named_parameters()
    return sum(parameter.nbytes for name, parameter in named if name.rpartition(".")[2].startswith(("w13_", "w2_")))


def own_memory() -> int:
    """RssAnon of this process: mapped files are not in it."""
    [line] = [line for line in Path("/proc/self/status").read_text().splitlines() if line.startswith("RssAnon:")]
    return 1024 * int(line.split()[1])


def count_calls() -> dict[str, int]:
    """Filled from now on."""
    counts: dict[str, int] = {}
    if "ktmoe.layer" in sys.modules:
        kind = sys.modules["ktmoe.layer"].MoELayer
        forward = getattr(kind, "uncounted", kind.forward)

        def counted(self, *arguments, **options):
            counts[self.name] = counts.get(self.name, 0) + 1
            return forward(self, *arguments, **options)

        kind.uncounted, kind.forward = forward, counted
    return counts


if __name__ == "__main__":
    main(*sys.argv[1:])
