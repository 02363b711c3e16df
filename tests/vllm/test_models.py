"""The same text with the plug-in and without it: vLLM's own experts in bfloat16 are the oracle."""

from __future__ import annotations

from dataclasses import replace

import models
import pytest
import runs

#: model_type -> its layers with routed experts.
LAYERS = {
    "qwen3_moe": 3,
    "qwen2_moe": 3,  # a shared expert with a gate
    "mixtral": 3,
    "olmoe": 3,
    "glm4_moe": 2,  # a dense layer, shared experts, a scaled sum
    "gpt_oss": 3,  # biases, gate and up interleaved, SwiGLU with limits
    "deepseek_v2": 3,
    "deepseek_v3": 3,  # groups of experts
    "llama4_text": 3,  # router weights on the experts' input
}
#: Two roundings of the same bfloat16 model differ in log-likelihoods by less. The models that one sees have 0.02 at most.
CLOSE = 0.06
LARGE = {"hidden_size": 512, "moe_intermediate_size": 512, "num_experts": 32, "num_local_experts": 32}
#: Bytes of the large model's experts.
SIZE = 3 * 32 * 3 * 512 * 512 * 2


@pytest.fixture(scope="module")
def folders(tmp_path_factory):
    folder = tmp_path_factory.mktemp("models")
    made = {name: models.write(name, folder / name) for name in LAYERS}
    return made | {"large": models.write("qwen3_moe", folder / "large", **LARGE)}


@pytest.fixture(scope="module")
def jobs(folders):
    found = {name: runs.Job(str(folder)) for name, folder in folders.items()}
    return found | {"float32": runs.Job(str(folders["qwen3_moe"]), {"dtype": "float32"})}


@pytest.fixture(scope="module")
def served(jobs, tmp_path_factory):
    """{a job's name: Result} with the plug-in."""
    return dict(zip(jobs, runs.start(list(jobs.values()), tmp_path_factory.mktemp("served") / "run"), strict=True))


@pytest.fixture(scope="module")
def plain(jobs, tmp_path_factory):
    """The same without it, by its own switch."""
    folder = tmp_path_factory.mktemp("plain") / "run"
    return dict(zip(jobs, runs.start(list(jobs.values()), folder, KTMOE_VLLM="0"), strict=True))


def check_same_text(found: runs.Result, expected: runs.Result, rerouted: int = 0) -> None:
    """Token by token, until two of them were as likely but for rounding: what follows is another text.

    rerouted: steps that may differ more, since a router chose another expert at a near tie. So may the token after which
    texts part.
    """
    assert (found.error, expected.error) == ("", "")
    differences, compared = [], 0
    for row in range(len(runs.PROMPTS)):
        for step in range(runs.NEW):
            ours, theirs = found.logprobs[row][step], expected.logprobs[row][step]
            chosen, other = (str(result.tokens[row][step]) for result in (found, expected))
            if other in ours:
                differences.append(abs(ours[other] - theirs[other]))
            if chosen != other:
                assert rerouted or ours[chosen] - ours[other] < CLOSE, (row, step)
                break
            compared += 1
    assert sum(difference >= CLOSE for difference in differences) <= rerouted, differences
    assert compared >= runs.NEW  # or it would be no test


@pytest.mark.parametrize("name", LAYERS)
def test_text(served, plain, name):
    check_same_text(served[name], plain[name])


@pytest.mark.parametrize("name", LAYERS)
def test_ktmoe_computes_each_layer_once_a_step(served, name):
    calls = served[name].calls
    assert list(calls.values()) == [runs.NEW] * LAYERS[name]
    assert [line.split(" (")[0] for line in served[name].log] == [f"ktmoe computes the experts of {LAYERS[name]} layers"]


def test_no_call_without(plain):
    for result in plain.values():
        assert (result.calls, result.log) == ({}, [])


def test_parameters_are_freed(served, plain):
    """What vLLM has loaded is gone, and the memory is given back: as much is in use as vLLM itself uses for its own layout."""
    assert plain["large"].left == SIZE
    assert served["large"].left == 0
    ours, theirs = served["large"].anonymous, plain["large"].anonymous
    assert ours - theirs < 0.5 * SIZE, (ours, theirs, SIZE)


def test_left_to_vllm(served, plain):
    """A model whose dtype ktmoe does not take: vLLM's own experts, and one line for all of its layers."""
    assert served["float32"].calls == {}
    assert served["float32"].tokens == plain["float32"].tokens
    [line] = served["float32"].log
    assert line.startswith(
        "ktmoe leaves the experts of 3 layers to vLLM (UnquantizedFusedMoEMethod): expected bfloat16 weights,"
    )
    assert all(f"model.layers.{layer}.mlp.experts" in line for layer in range(3))


def test_other_processes(jobs, plain, tmp_path):
    """vLLM's usual way: the model is in a process of its own, in which vLLM registers the plug-in again."""
    [found] = runs.start([jobs["qwen3_moe"]], tmp_path / "run", VLLM_ENABLE_V1_MULTIPROCESSING="1")
    check_same_text(found, plain["qwen3_moe"])
    assert [line.split(" (")[0] for line in found.log] == ["ktmoe computes the experts of 3 layers"]


def test_compiled_graphs(folders, plain, tmp_path):
    """vLLM's default: torch.compile takes the experts as one operator, and does not look into it."""
    job = runs.Job(str(folders["qwen3_moe"]), {"enforce_eager": False, "compilation_config": {"mode": 3}})
    [found] = runs.start([job], tmp_path / "run", TORCHDYNAMO_DISABLE="0")
    check_same_text(found, plain["qwen3_moe"])
    assert list(found.calls.values()) == [runs.NEW] * LAYERS["qwen3_moe"]


@pytest.mark.parametrize("options", [{}, {"enable_expert_parallel": True}], ids=["tensors", "experts"])
def test_two_ranks(jobs, plain, tmp_path, options):
    """Two processes with half of each expert, or with half of the experts, whose rounded outputs vLLM adds."""
    parallel = [replace(jobs[name], options={"tensor_parallel_size": 2, **options}) for name in ("gpt_oss", "glm4_moe")]
    variables = {"VLLM_ENABLE_V1_MULTIPROCESSING": "1", "VLLM_CPU_OMP_THREADS_BIND": "0|1"}
    for name, found in zip(("gpt_oss", "glm4_moe"), runs.start(parallel, tmp_path / "run", **variables), strict=True):
        check_same_text(found, plain[name], rerouted=4)
        said = [line.split(" (")[0] for line in found.log]
        assert said == [f"ktmoe computes the experts of {LAYERS[name]} layers"] * 2


def test_not_among_vllms_plugins(jobs, plain, tmp_path):
    [found] = runs.start([jobs["qwen3_moe"]], tmp_path / "run", VLLM_PLUGINS="another")
    assert (found.calls, found.log) == ({}, [])
    assert found.tokens == plain["qwen3_moe"].tokens
