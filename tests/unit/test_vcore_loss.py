"""`vcore_ds.probe_direction`, `token_utilities` and `gibbs_weights` against plain transformers and `torch.func.jvp`."""

import copy
import io
import math
import subprocess
import sys
from collections.abc import Callable
from contextlib import nullcontext
from functools import partial
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import torch.autograd.forward_ad as forward_ad
from peft import LoraConfig, PeftModel, PrefixTuningConfig, PromptTuningConfig, get_peft_model
from torch import Tensor, nn
from torch.func import functional_call, jvp
from torch.nn.functional import cross_entropy
from torch.nn.utils.parametrizations import weight_norm
from transformers import PreTrainedModel

import vcore_ds
from tests.helpers import tiny
from tests.helpers.oracle import differentiate_padding
from tests.unit.test_estimators import make_exact_rms_norm

KINDS = ["full", "tied", "lora", "moe", "dropout"]


Model = PreTrainedModel | PeftModel


def find_base(model: Model) -> PreTrainedModel:
    base = model.get_base_model() if isinstance(model, PeftModel) else model
    assert isinstance(base, PreTrainedModel)
    return base


def make_model(kind: str) -> Model:
    """A tiny model in fp64, in training mode; `lora` is peft's, `dropout` peft's with dropout of adapters."""
    base = tiny.moe_model(dtype=torch.float64) if kind == "moe" else tiny.qwen3(tied=kind == "tied")
    base.set_experts_implementation("eager")  # transformers' grouped GEMM takes no fp64
    model: Model = base
    if kind in ("lora", "dropout"):
        config = LoraConfig(r=4, lora_dropout=0.5 if kind == "dropout" else 0.0, target_modules="all-linear")
        adapted = get_peft_model(base, config)
        assert isinstance(adapted, PeftModel)
        model = adapted
        for name, parameter in model.named_parameters():
            if "lora_B" in name:
                nn.init.normal_(parameter, std=0.05)
        for module in model.modules():
            if type(module) is nn.Dropout:  # its hook stays, though the model's own dropout is replaced
                module.register_forward_hook(lambda module, inputs, output: 1.5 * output)
    for module in model.double().modules():
        if type(module).__name__.endswith("RMSNorm"):  # Hugging Face's computes in fp32 whatever the dtype is
            module.forward = make_exact_rms_norm(module)
    return model.train()


def make_batches() -> list[dict[str, Tensor]]:
    return [
        {"input_ids": rows.input_ids, "labels": rows.labels}
        for rows in (tiny.make_batch(3), tiny.make_batch(2, seed=5))
    ]


def make_reference(model: Model) -> tuple[Model, dict[str, Tensor]]:
    """A copy of the model for plain transformers, without dropout, and its trained parameters."""
    plain = differentiate_padding(copy.deepcopy(model).eval())
    find_base(plain).set_attn_implementation("eager")
    for module, copied in zip(model.modules(), plain.modules(), strict=True):
        if "forward" in module.__dict__:
            copied.forward = make_exact_rms_norm(copied)
    return plain, {name: p.detach() for name, p in plain.named_parameters() if p.requires_grad}


def compute_losses(model: nn.Module, parameters: dict[str, Tensor], batch: dict[str, Tensor]) -> Tensor:
    """Losses `[b, T]` from plain logits, 0 where not supervised."""
    logits = functional_call(model, parameters, kwargs={"input_ids": batch["input_ids"], "use_cache": False}).logits
    losses = cross_entropy(logits[:, :-1].transpose(1, 2), batch["labels"][:, 1:], reduction="none")
    return nn.functional.pad(losses, (1, 0))


def compute_mean_loss(
    model: nn.Module, parameters: dict[str, Tensor], batches: list[dict[str, Tensor]], by: str
) -> Tensor:
    """Mean over sequences of the mean over tokens, or the mean over all tokens."""
    losses = [compute_losses(model, parameters, batch).sum(1) for batch in batches]
    counts = [(batch["labels"][:, 1:] != -100).sum(1) for batch in batches]
    if by == "token":
        return torch.cat(losses).sum() / torch.cat(counts).sum()
    return (torch.cat(losses) / torch.cat(counts)).mean()


@pytest.mark.parametrize("kind", KINDS)
def test_utilities_are_the_derivatives_of_plain_losses(kind: str) -> None:
    model, batches = make_model(kind), make_batches()
    plain, parameters = make_reference(model)
    for by in ("sequence", "token"):
        wanted = {name: p.clone().requires_grad_() for name, p in parameters.items()}
        loss = compute_mean_loss(plain, wanted, batches, by)
        gradient = dict(zip(wanted, torch.autograd.grad(loss, list(wanted.values()), allow_unused=True), strict=True))
        gradient = {name: torch.zeros_like(parameters[name]) if g is None else g for name, g in gradient.items()}
        probe = vcore_ds.probe_direction(model, batches, normalization=by)
        assert probe.gradient.keys() == gradient.keys() == {n for n, p in model.named_parameters() if p.requires_grad}
        assert probe.loss == pytest.approx(float(loss.detach()), rel=1e-6)  # the losses of a run are fp32
        norm = math.sqrt(sum(float(g.square().sum()) for g in gradient.values()))
        assert probe.gradient_norm == pytest.approx(norm, rel=1e-6)
        for name, expected in gradient.items():
            torch.testing.assert_close(probe.gradient[name], expected, rtol=1e-5, atol=1e-7)
    utilities = vcore_ds.token_utilities(model, batches[0], gradient)
    _, exact = jvp(lambda p: compute_losses(plain, p, batches[0]), (parameters,), (gradient,))
    error = float((utilities - exact).abs().max() / exact.abs().max())
    print(f"{kind}: largest error {error:.1e} of the largest utility")
    assert error < 2e-6
    assert torch.equal(
        utilities[batches[0]["labels"] == -100], torch.zeros_like(utilities)[batches[0]["labels"] == -100]
    )


@pytest.mark.parametrize("kind", KINDS)
def test_the_model_is_left_as_it_was(kind: str) -> None:
    model, batches = make_model(kind), make_batches()
    first = next(p for p in model.parameters() if p.requires_grad)
    first.grad = torch.ones_like(first)
    base = find_base(model)

    def describe_state() -> object:
        config = base.config.get_text_config()
        modules = [(name, type(m), *(dict(part) for part in (m.__dict__, m._modules, m._buffers, m._forward_hooks)))
                   for name, m in model.named_modules()]  # fmt: skip
        gradients = [(name, p.grad is None, p.requires_grad) for name, p in model.named_parameters()]
        return modules, gradients, config._attn_implementation, config._experts_implementation

    before, logits = describe_state(), copy.deepcopy(model).eval()(batches[0]["input_ids"]).logits
    vcore_ds.token_utilities(model, batches[0], vcore_ds.probe_direction(model, batches))
    assert describe_state() == before
    assert first.grad is not None and torch.equal(first.grad, torch.ones_like(first))
    assert torch.equal(model.eval()(batches[0]["input_ids"]).logits, logits)
    model.train()
    bad = {"lm_head.weight": torch.full_like(next(model.parameters()), math.nan)}
    with pytest.raises((vcore_ds.UserError, RuntimeError)):
        vcore_ds.token_utilities(model, {**batches[0], "labels": batches[0]["labels"][:, :5]}, bad)
    assert describe_state() == before


def test_the_model_can_be_saved_and_differentiated_afterwards() -> None:
    model, batches = tiny.qwen3(tied=True), make_batches()
    vcore_ds.token_utilities(model, batches[0], vcore_ds.probe_direction(model, batches))
    torch.save(model, io.BytesIO())  # pickles the classes by their names
    parameters = dict(model.named_parameters())
    derivative = torch.func.grad(lambda p: compute_losses(model, p, batches[0]).sum())(parameters)
    assert all(map(torch.any, derivative.values()))


def test_the_callers_autocast_and_grad_mode_change_nothing() -> None:
    """A Trainer with bf16=True computes its loss under autocast; inference mode alone allows no gradient."""
    model, (batch, _) = tiny.qwen3(), make_batches()
    probe = vcore_ds.probe_direction(model, [batch])
    utilities = vcore_ds.token_utilities(model, batch, probe)
    with torch.inference_mode():
        with pytest.raises(vcore_ds.UserError, match="inference_mode"):
            vcore_ds.probe_direction(model, [batch])
        with pytest.raises(vcore_ds.UserError, match="inference_mode"):
            vcore_ds.token_utilities(model, batch, probe)
        batch = {name: tensor.clone() for name, tensor in batch.items()}
        frozen = copy.deepcopy(model)
    with pytest.raises(vcore_ds.UserError, match="inference_mode"):
        vcore_ds.probe_direction(frozen, [batch])
    for context in (nullcontext(), torch.autocast("cpu", torch.bfloat16), torch.no_grad()):
        with context:
            again = vcore_ds.probe_direction(model, [batch])
            assert again.loss == probe.loss
            assert torch.equal(vcore_ds.token_utilities(model, batch, again), utilities)


def test_padding_changes_no_utility() -> None:
    model, (batch, _) = make_model("full"), make_batches()
    probe = vcore_ds.probe_direction(model, [batch])
    padded = {
        "input_ids": nn.functional.pad(batch["input_ids"], (0, 7)),
        "labels": nn.functional.pad(batch["labels"], (0, 7), value=-100),
        "attention_mask": nn.functional.pad(torch.ones_like(batch["labels"]), (0, 7)),
    }
    utilities = vcore_ds.token_utilities(model, batch, probe)
    torch.testing.assert_close(vcore_ds.token_utilities(model, padded, probe)[:, :-7], utilities, rtol=1e-6, atol=1e-7)


def test_weights_have_the_budget_and_the_order_of_utilities() -> None:
    model, (batch, _) = make_model("full"), make_batches()
    labels = batch["labels"]
    utilities = vcore_ds.token_utilities(model, batch, vcore_ds.probe_direction(model, [batch]))
    weights = vcore_ds.gibbs_weights(utilities, labels, kl_budget=0.05)
    for q, s, row in zip(weights, utilities, labels, strict=True):
        q, s = q[row != -100], s[row != -100]
        assert float(q.sum()) == pytest.approx(1.0)
        assert float((q * (q * len(q)).log()).sum()) == pytest.approx(0.05, abs=1e-6)
        assert torch.equal(q.argsort(), s.argsort())
    assert float(weights[labels == -100].abs().sum()) == 0
    by_hand = torch.where(labels == -100, -math.inf, 3.0 * utilities).softmax(1)
    torch.testing.assert_close(vcore_ds.gibbs_weights(utilities, labels, temperature=3.0), by_hand)


BATCH = make_batches()[0]
NAN = {"lm_head.weight": torch.full((128, 32), math.nan)}
ZEROS = torch.zeros(1, 2)


def find_utilities(direction: dict[str, Tensor]) -> None:
    vcore_ds.token_utilities(make_model("full"), BATCH, direction)


def make_prompted(prompts: type) -> Model:
    return get_peft_model(tiny.qwen3(), prompts(task_type="CAUSAL_LM", num_virtual_tokens=2))


def make_bidirectional() -> Model:
    model = tiny.qwen3(is_causal=False)
    model.get_output_embeddings().weight.data.mul_(20)  # logits as large as trained ones
    return model


class ScaledLinear(nn.Linear):
    def forward(self, input: Tensor) -> Tensor:
        return 2 * super().forward(input)


def change_head(change: Callable[[Any], object]) -> Model:
    """A model whose head computes other logits than a linear layer of its weight."""
    model = make_model("full")
    change(model.get_output_embeddings())
    return model


def override_forward(head: Any) -> None:
    head.forward = lambda hidden: 2 * nn.Linear.forward(head, hidden)


def make_partial() -> Model:
    """Its second layer drops tangents."""
    model = tiny.qwen3()
    model.model.layers[1].register_forward_hook(lambda module, _, output: forward_ad.unpack_dual(output).primal)
    return model


HEAD_CHANGES: list[Callable[[Any], object]] = [
    lambda head: head.register_forward_hook(lambda module, inputs, output: 2 * output),
    lambda head: head.register_forward_pre_hook(lambda module, inputs: 2 * inputs[0]),
    lambda head: head.register_full_backward_hook(lambda module, inputs, outputs: inputs),
    lambda head: setattr(head, "__class__", ScaledLinear),
    override_forward,
    weight_norm,
]


def find_direction(model: nn.Module, *batches: dict[str, Tensor]) -> None:
    vcore_ds.probe_direction(model, batches or [BATCH])


def make_quantized() -> Model:
    model: Any = make_model("full")
    model.hf_quantizer = SimpleNamespace(quantization_config=SimpleNamespace(quant_method="bitsandbytes"))
    return model


@pytest.mark.parametrize(
    ("call", "message"),
    [
        (lambda: find_direction(make_model("full"), {"input_ids": BATCH["input_ids"]}), "batch: found no labels"),
        (
            lambda: find_direction(make_model("full"), {**BATCH, "labels": BATCH["labels"][:, 1:]}),
            "batch: found input_ids and labels of shapes",
        ),
        (
            lambda: find_direction(make_model("full"), {**BATCH, "labels": torch.full_like(BATCH["labels"], -100)}),
            "batch: found no supervised token",
        ),
        (
            lambda: find_direction(
                make_model("full"), BATCH | {"attention_mask": (torch.arange(24) > 2).expand(3, 24)}
            ),
            "batch: found an attention_mask",
        ),
        (
            lambda: find_direction(make_model("full"), BATCH | {"position_ids": (torch.arange(24) % 12).expand(3, 24)}),
            "batch: found position_ids",
        ),
        (lambda: vcore_ds.probe_direction(make_model("full"), []), "batches: found none"),
        (lambda: find_direction(nn.Linear(2, 2)), "model: found a Linear"),
        (lambda: find_utilities({"head.weight": torch.zeros(1)}), "direction: found head.weight"),
        (lambda: find_utilities({"lm_head.weight": torch.zeros(1)}), r"direction: found lm_head.weight of shape \[1\]"),
        (lambda: find_utilities(NAN), "inf or NaN"),
        (lambda: vcore_ds.gibbs_weights(ZEROS, ZEROS), "kl_budget, temperature: found both or none"),
        (lambda: vcore_ds.gibbs_weights(ZEROS, ZEROS, kl_budget=-1), "kl_budget: found -1"),
        (lambda: vcore_ds.gibbs_weights(ZEROS * math.nan, ZEROS, kl_budget=0.1), "utilities: found inf or NaN"),
        (lambda: vcore_ds.gibbs_weights(ZEROS, torch.zeros(1, 3), kl_budget=0.1), r"shapes \[1, 2\] and \[1, 3\]"),
        (lambda: find_direction(make_prompted(PromptTuningConfig)), r"model: found PROMPT_TUNING.* virtual tokens"),
        (lambda: find_direction(make_prompted(PrefixTuningConfig)), r"model: found PREFIX_TUNING.* virtual tokens"),
        (lambda: find_direction(make_bidirectional()), "model: found a Qwen3ForCausalLM, whose own forward"),
        (lambda: vcore_ds.token_utilities(make_bidirectional(), BATCH, {}), "whose own forward"),
        *((partial(find_direction, change_head(change)), "the output embedding is") for change in HEAD_CHANGES),
        (lambda: find_direction(make_partial()), "forward and reverse mode disagree"),
        (lambda: find_direction(make_quantized()), "model: found quantized weights .*bitsandbytes"),
        (lambda: find_direction(make_model("full").requires_grad_(False)), "found no parameter that requires"),
    ],
)
def test_a_mistake_has_one_message(call: Callable[[], object], message: str) -> None:
    with pytest.raises(vcore_ds.UserError, match=message):
        call()


def test_every_public_name_exists_and_train_fails_twice_alike() -> None:
    code = (
        "import vcore_ds\n"
        "for _ in range(2):\n"
        "    try: vcore_ds.train('no_recipe.yaml')\n"
        "    except vcore_ds.UserError as error: print(str(error)[:40])\n"
        "import vcore_ds.training.run as run; print(run.__name__)\n"
        "print([getattr(vcore_ds, name).__name__.split('.')[-1] for name in vcore_ds.__all__])"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True)
    message, again, module, names = done.stdout.splitlines()
    assert "no_recipe.yaml" in message and message == again and module == "vcore_ds.training.run", done.stderr
    assert names == str(vcore_ds.__all__)
    assert set(vcore_ds.__all__) <= set(dir(vcore_ds))
    with pytest.raises(AttributeError, match="no attribute 'probe'"):
        vcore_ds.probe  # noqa: B018
