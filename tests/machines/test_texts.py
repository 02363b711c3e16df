"""The same text on two machines as on one: of two processes, a sum is the same by whatever way its parts come."""

from __future__ import annotations

import re
from dataclasses import replace

import models
import pytest
import whole_models
from model_hosts import NEW, Hosts, Text, serving

from bench.engines import byte_tokenizer
from bench.namespaces import Machines

#: Tokens that a server's tokenizer has, too.
VOCABULARY = 192
#: Of which a half of each matrix has whole scales, too.
FP8 = {"moe_intermediate_size": 256, "num_key_value_heads": 4}
EXPERTS = "--enable-expert-parallel"
#: Of vLLM's log: it lets two processes of one machine share memory. On two machines it must not.
NO_SHARED_MEMORY = "CPU SHM communicator disabled for group tp:0"
#: Two roundings of a model's bfloat16 differ in log-probabilities by less, as on one machine.
CLOSE = 0.06
#: Steps that may differ more, since a router chose another expert at a near tie.
REROUTED = 4


@pytest.fixture(scope="module")
def folders(tmp_path_factory):
    """{a name: the folder of a model with a tokenizer}."""
    folder = tmp_path_factory.mktemp("models")
    vocabulary = {"vocab_size": VOCABULARY}
    fp8, mxfp4 = (whole_models.MODELS[name] for name in ("Qwen3-MoE FP8", "gpt-oss MXFP4"))
    made = {
        "BF16": models.write("qwen3_moe", folder / "bf16", **vocabulary),
        "FP8": whole_models.write(replace(fp8, sizes=FP8 | vocabulary), folder / "fp8"),
        "MXFP4": whole_models.write(replace(mxfp4, sizes=vocabulary), folder / "mxfp4"),
    }
    for each in made.values():
        byte_tokenizer.write(each, VOCABULARY)
    return made


def check_log(hosts: Hosts, layers: int, dense: int) -> None:
    """Each host says that ktmoe computes all of its layers."""
    for host in hosts.all:
        [line] = host.lines("ktmoe computes ")
        assert line.startswith(f"ktmoe computes the experts of {layers} layers (")
        assert f", and {dense} dense layers (" in line


@pytest.mark.parametrize(
    ("name", "options", "rate", "layers", "dense"),
    [
        pytest.param("BF16", [], None, 3, 7, marks=pytest.mark.smoke("all"), id="BF16-tensors"),
        pytest.param("FP8", [EXPERTS], "1gbit", 2, 4, id="FP8-experts-1gbit"),
        pytest.param("MXFP4", [], None, 2, 5, id="MXFP4-tensors"),
    ],
)
def test_two_machines(folders, tmp_path, name, options, rate, layers, dense):
    (tmp_path / "one").mkdir()
    with serving(1, folders[name], tmp_path / "one", *options) as host:
        expected = host.texts()
        assert not host.all[0].lines(NO_SHARED_MEMORY)
    (tmp_path / "two").mkdir()
    with serving(2, folders[name], tmp_path / "two", *options, rate=rate) as hosts:
        assert hosts.texts() == expected
        assert all(host.lines(NO_SHARED_MEMORY) for host in hosts.all)
        check_log(hosts, layers, dense)


def test_data_parallel_experts(folders, tmp_path):
    """Each host has half of the experts, and computes them for its own tokens and the other's, which are more or fewer."""
    prompts = [list(range(60, 60 + length)) for length in (3, 17, 30, 5)]
    with Machines(1) as machines:
        (tmp_path / "one").mkdir()
        host = Hosts(machines, folders["BF16"], tmp_path / "one")
        host.start()
        host.wait()
        expected = [Text.of(host.begin(prompt)) for prompt in prompts]
    with Machines(2) as machines:
        hosts = Hosts(machines, folders["BF16"], tmp_path)
        count = ["--data-parallel-size", "2", "--data-parallel-size-local", "1", EXPERTS]
        where = ["--data-parallel-address", machines.addresses[0], "--data-parallel-rpc-port", "29550"]
        hosts.start(*count, *where, "--api-server-count", "1")
        hosts.start(*count, *where, "--data-parallel-start-rank", "1", "--headless")
        hosts.wait()
        texts = [Text.of(request) for request in [hosts.begin(prompt) for prompt in prompts]]
        with hosts.ask("/metrics") as request:
            metrics = request.stdout.read()
        check_log(hosts, 3, 7)
    apart = [step for found, wanted in zip(texts, expected, strict=True) for step in compared(found, wanted)]
    assert len(apart) >= len(prompts) * NEW // 2  # or it would be no test
    assert sum(difference >= CLOSE for difference in apart) <= REROUTED, apart
    counts = re.findall(r'^vllm:generation_tokens_total\{engine="(\d)".*\} (\S+)$', metrics, re.MULTILINE)
    assert {rank for rank, count in counts if float(count)} == {"0", "1"}


def compared(found: Text, expected: Text) -> list[float]:
    """The largest difference of log-probabilities at each step, until two tokens were as likely but for rounding: what follows
    is another text."""
    apart = []
    for step, (ours, theirs) in enumerate(zip(found.logprobs, expected.logprobs, strict=True)):
        apart.append(max(abs(ours[token] - theirs[token]) for token in ours.keys() & theirs.keys()))
        if found.tokens[step] != expected.tokens[step]:
            likeliest = sorted(theirs.values())
            assert likeliest[-1] - likeliest[-2] < CLOSE, step
            break
    return apart
