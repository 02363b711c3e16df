"""ktmoe accuracy: perplexity beside transformers' own, divergence, standard errors, and the error of each layer."""

from __future__ import annotations

import json
import weakref
from collections import namedtuple
from contextlib import nullcontext
from pathlib import Path
from types import SimpleNamespace

import characters
import numpy as np
import pytest
import torch
import ways
from layer_checks import check_layers
from transformers import AutoModelForCausalLM, AutoTokenizer

from ktmoe import cli, reference
from ktmoe.errors import CheckpointError, InputError, KtmoeError, OutOfSpaceError, UnavailableError
from ktmoe.transformers import accuracy as module
from ktmoe.transformers import load, perplexity
from ktmoe.transformers.accuracy import RunMode, accuracy
from ktmoe.transformers.perplexity import Logits, Scores, score, windows

CONTEXT, TEXT = 64, characters.text(500)
MXFP4, PLAIN = "gpt-oss MXFP4", "qwen3_moe"


def step(description, total=None):
    return nullcontext(lambda done, total: None)


@pytest.fixture(scope="module")
def folder(checkpoint, tmp_path_factory):
    """The name of a checkpoint -> a folder that has it and a tokenizer."""
    made = {}

    def find(name: str) -> Path:
        if name not in made:
            made[name] = characters.with_tokenizer(checkpoint(name), tmp_path_factory.mktemp("with-tokenizer"))
        return made[name]

    return find


@pytest.fixture(scope="module")
def found(folder):
    """gpt-oss in MXFP4: exactly, and with 8-bit integers."""
    return accuracy(folder(MXFP4), TEXT, activations=["int8"], context=CONTEXT, step=step)


def tokens_of(folder) -> torch.Tensor:
    return AutoTokenizer.from_pretrained(folder)(TEXT, return_tensors="pt").input_ids[0]


def losses(model, tokens: torch.Tensor) -> torch.Tensor:
    """The negative log-likelihood of each token but the first, float64, as transformers' page on perplexity has it: labels
    of -100 are not scored. All windows of full length are one batch, and the last one is another."""
    stride = CONTEXT // 2
    ends = [*range(CONTEXT, len(tokens), stride), len(tokens)]
    rows, labels, before = [], [], 0
    for number, end in enumerate(ends):
        row = tokens[number * stride : end]
        label = row.clone()
        label[: len(row) - (end - before)] = -100
        rows.append(row)
        labels.append(label)
        before = end
    parts = []
    for chosen in (slice(0, -1), slice(-1, None)):
        with torch.no_grad():
            logits = model(torch.stack(rows[chosen])).logits.double()
        of = torch.stack(labels[chosen])[:, 1:].reshape(-1)
        loss = torch.nn.functional.cross_entropy(logits[:, :-1].reshape(len(of), -1), of, ignore_index=-100, reduction="none")
        parts.append(loss[of != -100])
    return torch.cat(parts)


def test_windows():
    for count, context in ((65, 64), (500, 64), (96, 64), (97, 64), (30, 7), (5, 2)):
        cut = windows(count, context)
        scored = [token for window in cut for token in range(window.last - window.scored, window.last)]
        assert scored == list(range(1, count))
        assert all(window.last - window.first <= context for window in cut)
        assert all(window.last - window.scored - window.first >= context // 2 for window in cut[1:])
        assert len(cut) > 1


@pytest.mark.parametrize("count", [0, 1, 64])
def test_a_text_of_one_window(count):
    with pytest.raises(InputError, match=f"more tokens than one window of 64, found {count}"):
        windows(count, 64)


@pytest.mark.smoke
def test_perplexity_beside_transformers(folder):
    """Where experts are bfloat16, so that transformers has the same weights, and windows in batches.

    ktmoe is nearer to float32 than 1.2 times eager bfloat16 is, and the error of a mean is at most the mean error.
    """
    path = folder(PLAIN)
    found = accuracy(path, TEXT, activations=["bf16"], context=CONTEXT, layers=False, step=step)
    assert [run.mode for run in found.runs] == [RunMode("bf16")]
    tokens = tokens_of(path)
    expected, eager = (
        losses(AutoModelForCausalLM.from_pretrained(path, dtype=dtype, experts_implementation="eager").eval(), tokens)
        for dtype in (torch.float32, torch.bfloat16)
    )
    assert len(expected) == found.runs[0].scores.tokens.sum() == len(tokens) - 1
    perplexity = found.runs[0].scores.perplexity.value
    assert abs(np.log(perplexity) - expected.mean().item()) <= 1.2 * (eager - expected).abs().mean().item()
    assert perplexity != pytest.approx(eager.mean().exp().item(), rel=1e-9)  # or it would be no test of ktmoe


def test_a_run_beside_itself(folder, tmp_path):
    """The logits come back from the file bit for bit: no divergence at all."""
    model, tokens = load(folder(MXFP4), activations="bf16"), tokens_of(folder(MXFP4))
    cut = windows(len(tokens), CONTEXT)
    with open(tmp_path / "logits", "w+b") as file:
        first = score(model, tokens, cut, keep=Logits(file))
        again = score(model, tokens, cut, against=Logits(file))
    assert (again.kl == 0).all()
    assert (again.same_top == again.tokens).all()
    assert (again.nll == first.nll).all()


def test_divergence(folder, found):
    """Beside torch's own functions, on logits of models that are loaded anew."""
    path, tokens = folder(MXFP4), tokens_of(folder(MXFP4))
    logs = []
    for mode in ("bf16", "int8"):
        model, rows = load(path, activations=mode), []
        for window in found.windows:
            with torch.no_grad():
                logits = model(tokens[None, window.first : window.last]).logits[0, :-1]
            rows.append(logits[-window.scored :].double())
        logs.append(torch.cat(rows).log_softmax(-1))
    exact, rounded = logs
    count, run = len(tokens) - 1, found.runs[1]
    kl = torch.nn.functional.kl_div(rounded, exact, reduction="sum", log_target=True).item() / count
    assert run.scores.mean(run.scores.kl).value == pytest.approx(kl, rel=1e-9)
    assert kl > 0
    nll = [torch.nn.functional.nll_loss(each, tokens[1:]).item() for each in logs]
    assert found.lost(run).value == pytest.approx(nll[1] - nll[0], rel=1e-9)
    assert [each.scores.perplexity.value for each in found.runs] == pytest.approx(np.exp(nll), rel=1e-12)
    same = (exact.argmax(-1) == rounded.argmax(-1)).double().mean().item()
    assert run.scores.mean(run.scores.same_top).value == pytest.approx(same, rel=1e-12)


class Fixed(torch.nn.Module):
    """Gives these logits, [tokens, vocabulary], whatever it reads."""

    device = torch.device("cpu")

    def __init__(self, logits: torch.Tensor):
        super().__init__()
        self.logits = logits

    def forward(self, ids, use_cache, logits_to_keep):
        return SimpleNamespace(logits=self.logits[None, : ids.shape[1]][:, -logits_to_keep:])


@pytest.mark.parametrize("at_once", [1, 10, 2**21])
def test_rows_at_once(tmp_path, monkeypatch, at_once):
    """They change nothing. A token that one run excludes counts 0 where the exact run excludes it, and else infinity."""
    monkeypatch.setattr(perplexity, "AT_ONCE", at_once)
    tokens = torch.tensor([0, 1, 0, 1, 0])
    exact, other = torch.randn((2, 4, 3), generator=torch.Generator().manual_seed(1), dtype=torch.float64)
    exact[:, 2] = other[0, 2] = -torch.inf
    impossible = other.clone()
    impossible[1, 1] = -torch.inf
    cut = windows(len(tokens), 4)  # the first window scores by rows 0 to 2, the second by row 1
    with open(tmp_path / "logits", "w+b") as file:
        score(Fixed(exact), tokens, cut, keep=Logits(file))
        kl, infinite = (score(Fixed(model), tokens, cut, against=Logits(file)).kl for model in (other, impossible))
    p, q = exact.softmax(-1)[:, :2], other.softmax(-1)[:, :2]
    expected = (p * (p / q).log()).sum(-1)
    assert kl.tolist() == pytest.approx([expected[:3].sum().item(), expected[1].item()], rel=1e-12)
    assert np.isinf(infinite).all()


def test_standard_errors():
    """Of equally long windows it is that of a mean of their means; perplexity's is by exp's derivative."""
    sums = np.random.default_rng(0).standard_normal(20) + 3
    scores = Scores(np.full(20, 8.0), sums)
    expected = np.std(sums / 8, ddof=1) / np.sqrt(20)
    assert scores.mean(sums).error == pytest.approx(expected, rel=1e-12)
    assert scores.perplexity.error == pytest.approx(expected * np.exp((sums / 8).mean()), rel=1e-12)
    twice = Scores(np.tile(scores.tokens, 4), np.tile(sums, 4))
    assert twice.mean(twice.nll).error == pytest.approx(expected / 2 * np.sqrt(19 / 20 * 80 / 79), rel=1e-12)


def test_layers_beside_the_reference(folder, found):
    check_layers(folder(MXFP4), found, activations="int8")
    assert all(len(layer.sample.x) == 64 for layer in found.layers)


def test_folded(folder, emulator_folder):
    """Weights with bfloat16 scales, which amx rounds if it may."""
    path = folder("Kimi INT4")
    with ways.prepared("amx", emulator_folder):
        found = accuracy(path, TEXT[:80], backend="amx", activations=[], rounding="folded", context=CONTEXT, step=step)
    assert [run.mode for run in found.runs] == [RunMode("bf16"), RunMode("bf16", "folded")]
    assert found.runs[1].scores.kl.sum() > 0
    check_layers(path, found, rounding="folded")


def test_what_enters_the_layers(folder, found):
    """The sampled rows are rows that an exact model's experts get, with the ids and the router weights that belong to them."""
    model, tokens = load(folder(MXFP4), activations="bf16"), tokens_of(folder(MXFP4))
    name, sample = found.layers[1].name, found.layers[1].sample
    seen = []
    model.get_submodule(name).register_forward_pre_hook(lambda _, arguments: seen.append(arguments))
    for window in found.windows:
        with torch.no_grad():
            model(tokens[None, window.first : window.last])
    x, ids, weights = (torch.cat(parts) for parts in zip(*seen, strict=True))
    for row, of_row, weights_of_row in zip(sample.x, sample.ids, sample.weights, strict=True):
        at = (x == row).all(-1).nonzero()[0]
        assert torch.equal(ids[at[0]], of_row)
        assert torch.equal(weights[at[0]].float(), weights_of_row)


def test_one_model_at_a_time(folder, monkeypatch):
    """When the next model is loaded, the one before is garbage, and its layers are closed."""
    models, layers = [], []

    def load_and_look(*arguments, **options):
        assert all(model() is None for model in models)
        assert all(layer.packed is None for layer in layers)
        model = load(*arguments, **options)
        models.append(weakref.ref(model))
        layers.extend(each.ktmoe_layer for each in model.modules() if hasattr(each, "ktmoe_layer"))
        return model

    monkeypatch.setattr(module, "load", load_and_look)
    found = accuracy(folder(MXFP4), TEXT[:100], backend="avx2", context=CONTEXT, step=step)
    assert len(models) == 5
    assert [run.mode.activations for run in found.runs] == ["bf16", "int16", "int8", "mxfp8", "mxfp4"]  # all that avx2 has
    assert all(run.backends == ["avx2"] for run in found.runs)
    int16, int8, mxfp8, mxfp4 = (run.layers[0].relative for run in found.runs[1:])
    assert 0 < int16 < int8 < mxfp8 < mxfp4


@pytest.mark.parametrize(
    ("name", "message"),
    [(MXFP4, "transformers cannot load the tokenizer of"), (PLAIN, "expected a tokenizer, found none")],
)
def test_without_a_tokenizer(checkpoint, name, message):
    with pytest.raises(KtmoeError, match=message):
        accuracy(checkpoint(name), TEXT, context=CONTEXT, step=step)


def test_tokens_that_the_model_does_not_have(folder, tmp_path):
    for file in folder(PLAIN).iterdir():
        (tmp_path / file.name).symlink_to(file)
    config = json.loads((tmp_path / "config.json").read_text())
    (tmp_path / "config.json").unlink()
    (tmp_path / "config.json").write_text(json.dumps(config | {"vocab_size": 100}))
    with pytest.raises(CheckpointError, match=r"the model has 100 tokens, but its tokenizer made token 12[0-2] of the text"):
        accuracy(tmp_path, TEXT, context=CONTEXT, step=step)


@pytest.mark.parametrize(
    ("options", "error", "message"),
    [
        ({"context": 257}, InputError, "context must be at most 256 tokens"),
        ({"tokens": 64}, InputError, "more tokens than one window of 64, found 64"),
        ({"activations": ["int8"]}, UnavailableError, "it has no activation mode 'int8' for these weights"),
        ({"rounding": "folded"}, UnavailableError, "rounding 'folded': backend .* rounds none of these weights"),
    ],
)
def test_errors(folder, monkeypatch, options, error, message):
    monkeypatch.setattr(module, "score", None)  # all of these come before the text is run
    with pytest.raises(error, match=message):
        accuracy(folder(PLAIN), TEXT, **{"context": CONTEXT} | options, step=step)


def test_no_space_for_logits(folder, monkeypatch):
    usage = namedtuple("usage", "total used free")
    needed = 499 * 128 * 2  # scored tokens, vocabulary, bfloat16
    monkeypatch.setattr("shutil.disk_usage", lambda _: usage(1, 1, needed - 1))
    with pytest.raises(OutOfSpaceError, match="take fewer tokens, or set TMPDIR"):
        accuracy(folder(MXFP4), TEXT, context=CONTEXT, step=step)
    monkeypatch.setattr("shutil.disk_usage", lambda _: usage(1, 1, needed))
    assert len(accuracy(folder(MXFP4), TEXT, context=CONTEXT, layers=False, step=step).runs) > 1


@pytest.fixture
def file(tmp_path):
    path = tmp_path / "text"
    path.write_text(TEXT)
    return str(path)


@pytest.mark.smoke
def test_json(folder, file, capsys, found):
    path = str(folder(MXFP4))
    assert cli.main(["accuracy", path, "--text", file, "--context", str(CONTEXT), "--activations", "int8", "--json"]) == 0
    data = json.loads(capsys.readouterr().out)
    assert (data["path"], data["text"], data["tokens"], data["scored_tokens"]) == (path, file, 500, 499)
    assert (data["windows"], data["context"], data["stride"]) == (len(found.windows), CONTEXT, CONTEXT // 2)
    for run, expected in zip(data["runs"], found.runs, strict=True):
        assert run["activations"] == expected.mode.activations
        assert run["perplexity"]["mean"] == expected.scores.perplexity.value
    assert data["runs"][0]["kl"] is None
    assert data["runs"][1]["ln_ratio"]["standard_error"] == found.lost(found.runs[1]).error
    for layer, expected, difference in zip(data["layers"], found.layers, found.runs[1].layers, strict=True):
        assert (layer["name"], layer["exact"]["relative_error"]) == (expected.name, expected.relative)
        assert [run["largest_relative_error"] for run in layer["runs"]] == [difference.largest]


def test_tables(folder, file, capsys):
    arguments = ["accuracy", str(folder(MXFP4)), "--text", file, "--context", str(CONTEXT), "--tokens", "200"]
    assert cli.main(arguments) == 0
    printed = capsys.readouterr().out
    assert "text: 200 tokens, 199 of them scored; 6 windows of 64, a new one every 32" in printed
    assert "layers 0-2: E2M1 with ue8m0 scales per 1x32" in printed
    assert cli.main([*arguments, "--no-layers"]) == 0
    shorter = capsys.readouterr().out
    assert "layers" not in shorter
    assert "±" in shorter


def test_a_wrong_layer(folder, file, capsys, monkeypatch):
    right = reference.forward

    def wrong(*arguments, **options):
        found = right(*arguments, **options)
        return reference.Reference(found.y + 3 * found.bound, found.bound)

    monkeypatch.setattr(reference, "forward", wrong)
    assert cli.main(["accuracy", str(folder(PLAIN)), "--text", file, "--context", str(CONTEXT)]) == 1
    assert "WRONG: model.layers.0.mlp.experts" in capsys.readouterr().out
