"""Runs of vLLM in processes of their own, each with several models: importing vLLM takes longer than they do.

runs.py JOBS RESULTS: what such a process does. JOBS: a JSON file of Jobs' fields. RESULTS: where those of Results go to.
"""

from __future__ import annotations

import gc
import json
import os
import subprocess
import sys
import traceback
from dataclasses import asdict, dataclass, field
from pathlib import Path

import deepseek_v4_on_cpus

from bench.peers import environments

ROOT = Path(__file__).resolve().parents[2]
#: Seconds that a process may take, and more for each of its models. An emulated machine needs more, see tools/avx2_guest.py.
PATIENCE, MORE = int(os.environ.get("KTMOE_TEST_PATIENCE", "300")), 20
#: New tokens of each prompt, and the tokens of the prompts.
NEW, PROMPTS = 16, ([5, 9, 40, 33, 7, 12, 101, 66, 2], list(range(60, 90)))
#: What begins the output of each job.
NEXT = "-- the next model"
#: What a model is loaded with. A tiny model needs no compiled graph, and has no tokenizer.
OPTIONS = {"skip_tokenizer_init": True, "enforce_eager": True, "dtype": "bfloat16", "max_model_len": 128}


@dataclass(frozen=True)
class Job:
    """folder: of a model. options: of vllm.LLM besides OPTIONS.

    prompts: in the place of PROMPTS, one after the other, and judged() runs them. plugin: whether ktmoe's plug-in is there.
    Those without come first.
    """

    folder: str
    options: dict = field(default_factory=dict)
    prompts: list[list[int]] = field(default_factory=list)
    plugin: bool = True


@dataclass(frozen=True)
class Result:
    """tokens: greedy, [prompts, NEW]. logprobs: of each of them {token: logprob} for the likeliest few.

    calls: {a MoELayer's name: how many calls of its forward() there were in the second of two runs}; in one process only.
    left: bytes of parameters of experts, and of dense layers that ktmoe computes, after loading; in one process only.
    anonymous: bytes of the process's memory then.
    log: what the plug-in said. error: what was raised, instead of all this.
    dense: how many dense layers ktmoe computes; in one process only.
    routing: of a Job with prompts, {a layer's number: the experts of each position}; one for each prompt. Its logprobs are
    those of all positions, of the prompt's but the first too.
    """

    tokens: list[list[int]] = field(default_factory=list)
    logprobs: list[list[dict[int, float]]] = field(default_factory=list)
    calls: dict[str, int] = field(default_factory=dict)
    left: int = 0
    anonymous: int = 0
    log: list[str] = field(default_factory=list)
    error: str = ""
    dense: int = 0
    routing: list[dict[int, list[list[int]]]] = field(default_factory=list)


def prepared(folder: Path) -> dict[str, str]:
    """Make a folder with ktmoe's entry points; the environment variables of a process that is to find them."""
    folder.mkdir()
    environments.describe_ktmoe(folder)
    return os.environ | {
        "PYTHONPATH": os.pathsep.join((str(folder), str(ROOT))),
        "HF_HUB_OFFLINE": "1",
        "VLLM_NO_USAGE_STATS": "1",
        "VLLM_CPU_KVCACHE_SPACE": "1",
        "OMP_WAIT_POLICY": "passive",  # as docs/vllm.md recommends: idle threads leave the CPUs to others
        "TORCHDYNAMO_DISABLE": "1",  # compiling the sampler would take longer than all the rest
    }


def start(jobs: list[Job], folder: Path, **variables: str) -> list[Result]:
    """Run jobs one after the other in one process, in which vLLM finds the plug-in as an installed one. variables: of it."""
    environment = prepared(folder) | {"VLLM_ENABLE_V1_MULTIPROCESSING": "0"}
    if not jobs[0].plugin:
        environment["KTMOE_VLLM"] = "0"
    (folder / "jobs").write_text(json.dumps([asdict(job) for job in jobs]))
    command = [sys.executable, __file__, str(folder / "jobs"), str(folder / "results")]
    with (folder / "output").open("w+") as output:
        done = subprocess.run(
            command,
            env=environment | variables,
            stdout=output,
            stderr=output,
            check=False,
            timeout=PATIENCE + MORE * len(jobs),
            cwd=folder,
        )
        output.seek(0)
        text = output.read()
    assert done.returncode == 0, text[-5000:]
    results = json.loads((folder / "results").read_text())
    said = [[line.partition("] ")[2] for line in part.splitlines() if "] ktmoe " in line] for part in text.split(NEXT)[1:]]
    return [Result(**result | {"log": log}) for result, log in zip(results, said, strict=True)]


def main(jobs: str, results: str) -> None:
    found, plugin = [], True
    for job in [Job(**each) for each in json.loads(Path(jobs).read_text())]:
        print(NEXT, flush=True)
        if job.plugin and not plugin:
            switch_on()
        plugin = job.plugin
        found.append(asdict(run(job)))
    Path(results).write_text(json.dumps(found))


def switch_on() -> None:
    """Let vLLM look for plug-ins again, in a process that had ktmoe's switched off."""
    import vllm.plugins

    del os.environ["KTMOE_VLLM"]
    vllm.plugins.plugins_loaded = False


def run(job: Job) -> Result:
    from vllm import LLM, SamplingParams
    from vllm.distributed import cleanup_dist_env_and_memory

    llm = None
    try:
        llm = LLM(job.folder, **OPTIONS | job.options)
        left = sum(llm.apply_model(bytes_of_experts)) if os.environ["VLLM_ENABLE_V1_MULTIPROCESSING"] == "0" else 0
        anonymous = own_memory()
        if job.prompts:
            return judged(llm, job.prompts, left)
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
        traceback.print_exc()
        return Result(error=f"{type(error).__name__}: {error}")
    finally:
        del llm
        gc.collect()
        cleanup_dist_env_and_memory()


def judged(llm, prompts: list[list[int]], left: int) -> Result:
    """Each prompt by itself, so that a row of a layer's input is a position."""
    from vllm import SamplingParams

    deepseek_v4_on_cpus.complete()
    calls, tokens, logprobs, routing = count_calls(), [], [], []
    sampling = SamplingParams(temperature=0, max_tokens=NEW, logprobs=8, prompt_logprobs=8, ignore_eos=True)
    for prompt in prompts:
        _rows.clear()
        llm.apply_model(record_routing)
        [request] = llm.generate([{"prompt_token_ids": prompt}], sampling, use_tqdm=False)
        [output] = request.outputs
        given = [*request.prompt_logprobs[1:], *output.logprobs]
        tokens.append(list(output.token_ids))
        logprobs.append([{token: found.logprob for token, found in each.items()} for each in given])
        routing.append({layer: rows[: len(given)] for layer, rows in _rows.items()})
    [dense] = llm.apply_model(count_dense)
    return Result(tokens, logprobs, dict(calls), left, dense=dense, routing=routing)


#: {a layer's number: the experts of each position}
_rows: dict[int, list[list[int]]] = {}


def record_routing(model) -> None:
    """Let the routers of a model's layers fill _rows.

    vLLM's router for CPUs has no sigmoid without groups, which MiniMax-M2 asks for, and fails: one group is the same choice.
    """
    from vllm.model_executor.layers.fused_moe.layer import MoERunner

    for module in model.modules():
        if isinstance(module, MoERunner):
            router, rows = module.router, _rows.setdefault(module.layer_id, [])
            router.set_capture_fn(lambda ids, rows=rows: rows.extend(ids.tolist()))
            if router.scoring_func == "sigmoid" and not router.use_grouped_topk:
                router.use_grouped_topk, router.num_expert_group, router.topk_group = True, 1, 1


def bytes_of_experts(model) -> int:
    """And of dense layers that ktmoe computes, but for biases, which vLLM may need."""
    named = model.named_parameters()
    found = sum(parameter.nbytes for name, parameter in named if name.rpartition(".")[2].startswith(("w13_", "w2_")))
    for module in dense_layers(model):
        if getattr(module, "_cpu_skip_gemm_dispatch", False):  # MLA's kv_b_proj, whose parameters vLLM reads itself
            continue
        found += sum(parameter.nbytes for name, parameter in module.named_parameters(recurse=False) if name != "bias")
    return found


def dense_layers(model) -> list:
    """The modules of dense layers that ktmoe computes."""
    return [module for module in model.modules() if hasattr(module, "ktmoe") and not hasattr(module, "moe_config")]


def count_dense(model) -> int:
    return len(dense_layers(model))


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
