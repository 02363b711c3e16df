"""LoRA on packed experts in models of transformers: a plain loop, Trainer, and beside peft's; as eager PyTorch trains it."""

from __future__ import annotations

import engine_models
import peft
import pytest
import torch
import transformers
from engine_models import experts, prompts
from serving import eager, eager_float32, packed, switched
from training_runs import RANK, STEPS, by_ktmoe, by_pytorch, loaded, texts, train

import ktmoe.transformers as served
from ktmoe.errors import InputError, UnavailableError
from ktmoe.torch import DenseLinear, MoEExperts, add_lora, loras

#: Checkpoints in formats that people have, and in bfloat16.
CHECKPOINTS = ("DeepSeek-V4 FP4", "qwen3_moe", "gpt-oss MXFP4")


@pytest.fixture(autouse=True)
def one_thread():
    """torch uses one thread: these tensors are small."""
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    with torch.enable_grad():
        yield
    torch.set_num_threads(before)


@pytest.mark.smoke("one")
@pytest.mark.parametrize("name", CHECKPOINTS)
def test_a_plain_loop(checkpoint, name):
    """20 steps. Beside PyTorch on dequantised weights that rounds where ktmoe does; and not farther from PyTorch in float32
    than PyTorch's own experts in bfloat16 are."""
    folder = checkpoint(name)
    found = train(by_ktmoe(folder, dense="torch"))
    assert len(found.losses) == STEPS
    assert found.losses[-1] < 0.8 * found.losses[0]
    rounded = train(by_pytorch(folder, torch.float64, rounded=True))
    off_losses, off_changes = found.difference(rounded)
    assert off_losses < 2**-7  # an h or a gradient here and there is another bfloat16 neighbour, which 20 steps make larger
    assert off_changes < 2**-5
    exact, bfloat16 = (train(by_pytorch(folder, dtype, rounded=False)) for dtype in (torch.float32, torch.bfloat16))
    for own, other in zip(found.difference(exact), bfloat16.difference(exact), strict=True):
        assert own < 1.5 * other


@pytest.mark.smoke
def test_trainer(checkpoint, tmp_path):
    """transformers' Trainer, with AdamW, its own loop, clipping and gradient accumulation."""

    def trained(model):
        names = [name for name, parameter in model.named_parameters() if parameter.requires_grad]
        before = {name: model.get_parameter(name).detach().clone() for name in names}
        arguments = transformers.TrainingArguments(
            tmp_path / "out",
            max_steps=3,
            per_device_train_batch_size=1,
            gradient_accumulation_steps=2,
            learning_rate=1e-3,
            lr_scheduler_type="constant",
            save_strategy="no",
            logging_steps=1,
            report_to="none",
            disable_tqdm=True,
            use_cpu=True,
            seed=1,
        )
        data = [{"input_ids": ids, "labels": ids} for ids in texts().flatten(0, 1)]
        trainer = transformers.Trainer(model, arguments, train_dataset=data)
        trainer.train()
        losses = [entry["loss"] for entry in trainer.state.log_history if "loss" in entry]
        return losses, {name: model.get_parameter(name).detach() - before[name] for name in names}

    folder = checkpoint("qwen3_moe")
    losses, changes = trained(by_ktmoe(folder))
    expected, of_pytorch = trained(by_pytorch(folder, torch.float64, rounded=True))
    assert len(losses) == 3
    assert losses == pytest.approx(expected, rel=2**-9)
    assert changes.keys() == of_pytorch.keys()
    for name, change in of_pytorch.items():
        # AdamW's steps are as large for gradients that roundings decide
        assert torch.nn.functional.cosine_similarity(change.flatten(), changes[name].flatten(), dim=0) > 0.95, name


ATTENTION = {"r": 2, "lora_alpha": 4, "target_modules": ["q_proj", "v_proj"]}


def with_peft(model):
    """LoRA on attention, the same each time, whose B is not zero."""
    torch.manual_seed(12)
    model = peft.get_peft_model(model, peft.LoraConfig(**ATTENTION))
    for name, parameter in model.named_parameters():
        if "lora_B" in name:
            torch.nn.init.normal_(parameter, std=0.1)
    return model


def test_beside_peft(checkpoint, tmp_path):
    """LoRA on attention by peft and on experts by ktmoe, trained together. peft saves its own."""
    folder = checkpoint("qwen3_moe")
    model = with_peft(loaded(folder))
    first = add_lora(model, RANK, 16, seed=4)
    assert len(first) == 3 * 2 * engine_models.LAYERS
    adapters = loras(model)
    assert list(adapters) == list(range(engine_models.LAYERS))
    found = train(model.train())
    of_attention = [name for name in found.changes if "self_attn" in name]
    assert len(of_attention) == 2 * 2 * engine_models.LAYERS
    assert len(found.changes) == len(of_attention) + len(first)
    assert all(change.any() for change in found.changes.values())
    assert found.losses[-1] < 0.8 * found.losses[0]
    model.save_pretrained(tmp_path)
    assert {file.name for file in tmp_path.iterdir()} >= {"adapter_model.safetensors", "adapter_config.json"}


def test_attention_alone(checkpoint):
    """Experts without adapters are differentiable as they were loaded; as in PyTorch."""
    folder = checkpoint("qwen3_moe")
    found = train(with_peft(loaded(folder, dense="torch")).train())
    expected = train(with_peft(by_pytorch(folder, torch.float64, rounded=True, adapted=False)).train())
    assert found.losses[-1] < found.losses[0]
    off_losses, off_changes = found.difference(expected)
    assert off_losses < 2**-9
    assert off_changes < 2**-6


def test_attention_of_packed_matrices(checkpoint, tmp_path):
    """Their gradients go on to the layers before them, as near to PyTorch in float32 as those of PyTorch in bfloat16. What peft
    saves is loaded onto packed matrices again."""
    folder = checkpoint("qwen3_moe")
    model, again = with_peft(loaded(folder)), loaded(folder)
    assert all(isinstance(module, DenseLinear) for name, module in again.named_modules() if name.endswith("_proj"))
    found = train(model.train())
    assert len(found.changes) == 2 * 2 * engine_models.LAYERS
    assert found.losses[-1] < found.losses[0]
    exact, bfloat16 = (train(with_peft(model).train()) for model in (eager_float32(folder), eager(folder)))
    for own, other in zip(found.difference(exact), bfloat16.difference(exact), strict=True):
        assert own < 1.5 * other
    model.save_pretrained(tmp_path)
    ids = prompts()
    assert not torch.equal(engine_models.logits(again.eval(), ids), engine_models.logits(model.eval(), ids))
    again = peft.PeftModel.from_pretrained(again, tmp_path).eval()
    assert torch.equal(engine_models.logits(again, ids), engine_models.logits(model, ids))


@pytest.mark.parametrize("reentrant", [False, True])
def test_gradient_checkpointing(checkpoint, reentrant):
    folder = checkpoint("qwen3_moe")
    expected, model = train(by_ktmoe(folder), steps=2), by_ktmoe(folder)
    model.gradient_checkpointing_enable({"use_reentrant": reentrant})
    model.enable_input_require_grads()
    assert train(model, steps=2).difference(expected) == (0, 0)


def test_text_after_training(checkpoint):
    """The model generates as before, and its adapters put into a fresh one give the same logits."""
    folder = checkpoint("gpt-oss MXFP4")
    model = by_ktmoe(folder)
    train(model, steps=2)
    other = loaded(folder)
    plain = engine_models.logits(other.eval(), prompts())
    add_lora(other, given=loras(model))
    found = engine_models.logits(model.eval(), prompts())
    assert torch.equal(engine_models.logits(other.eval(), prompts()), found)
    assert not torch.equal(plain, found)
    with torch.inference_mode():
        text = model.generate(prompts(), max_new_tokens=4, do_sample=False)
    assert text.shape == (2, 28)


def test_a_new_adapter_changes_nothing(checkpoint):
    """Its B is zero."""
    model = served.load(checkpoint("qwen3_moe"), activations="bf16").eval()
    before = engine_models.logits(model, prompts())
    parameters = add_lora(model, 2, 4, iter(["gate", "down"]), dtype=torch.bfloat16, recompute=True)
    assert torch.equal(engine_models.logits(model, prompts()), before)
    assert {parameter.dtype for parameter in parameters} == {torch.bfloat16}
    modules = [module for module in model.modules() if isinstance(module, MoEExperts)]
    assert {module.projections for module in modules} == {("gate", "down")}
    assert all(module.passes.recompute and not module.training for module in modules)
    first, second = (adapter.pairs["gate"][0] for adapter in list(loras(model).values())[:2])
    assert (first != second).any()


def test_what_is_refused(checkpoint):
    folder = checkpoint("qwen3_moe")
    with pytest.raises(UnavailableError, match="expected a model with packed experts, found none; load it with"):
        add_lora(engine_models.make("qwen3_moe"))
    with pytest.raises(InputError, match="found 'mxfp8', which rounds more"):
        add_lora(served.load(folder, activations="mxfp8"))
    with pytest.raises(UnavailableError, match=r"layers\.0\.mlp\.experts: .* found some on a GPU"):
        add_lora(served.load(folder, activations="bf16", gpu_experts=1))
    model = served.load(folder, activations="bf16")
    for options, error, message in (
        ({"rank": 0}, InputError, "rank must be an integer from 1 to 256, found 0"),
        ({"projections": ["router"]}, InputError, "found .*'router'"),
        ({"dtype": torch.float16}, InputError, r"dtype must be torch\.float32 or torch\.bfloat16, found torch\.float16"),
        ({"given": {7: None}}, InputError, r"expected layers of \[0, 1, 2\], found 7"),
        ({"given": {1: {}}}, InputError, r"lora must be a ktmoe\.training\.Lora or None, found dict"),
    ):
        with pytest.raises(error, match=message):
            add_lora(model, **options)
    assert not loras(model)
    add_lora(model)
    with pytest.raises(UnavailableError, match="found none; it has adapters already"):
        add_lora(model)


def test_models_without_experts_are_not_saved(checkpoint, tmp_path):
    """A checkpoint would have none. Their adapters can be."""
    folder = checkpoint("qwen3_moe")
    for model, error in ((packed(folder, activations="bf16"), UnavailableError), (loaded(folder), ValueError)):
        add_lora(model)
        with pytest.raises(error, match=r"expected to be saved before it was packed|not serializable"):
            model.save_pretrained(tmp_path)
        assert not list(tmp_path.glob("*.safetensors"))
        module = next(module for module in model.modules() if isinstance(module, MoEExperts))
        assert len(module.state_dict()) == 6


def test_models_are_frozen(checkpoint):
    """Those of pack() and load(). set_experts_implementation() freezes nothing, and gradients flow."""
    folder, ids = checkpoint("qwen3_moe"), prompts()
    for make in (packed, served.load):
        model = make(folder)
        assert not any(parameter.requires_grad for parameter in model.parameters())
        assert not model(input_ids=ids).logits.requires_grad


def test_a_model_that_is_not_frozen(checkpoint, monkeypatch):
    monkeypatch.setenv("KTMOE_BACKEND", "fp32_lut")  # whose "auto" is bf16
    model, ids = switched(checkpoint("qwen3_moe")), prompts()
    loss = model(input_ids=ids, labels=ids).loss
    loss.backward()
    assert all(parameter.grad is not None for parameter in model.parameters())
    assert torch.equal(loss, model.requires_grad_(False)(input_ids=ids, labels=ids).loss)


def test_a_mode_that_rounds_has_no_gradients(checkpoint):
    (_, module), *_ = experts(packed(checkpoint("qwen3_moe"), activations="mxfp4"))
    x, ids, weights = torch.zeros(1, 64).bfloat16(), torch.zeros(1, 1, dtype=torch.long), torch.ones(1, 1)
    with pytest.raises(InputError, match="training needs activations='bf16', found 'mxfp4'"):
        module(x, ids, weights.requires_grad_())
