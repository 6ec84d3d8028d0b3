"""How true the two estimators are in bf16 on a real pretrained model, through the real engine.

The reference is the derivative of the plain Hugging Face model in fp64 along the direction that the engine holds, so
that the estimator alone is compared; for full parameters also along the exact model's own probe gradient, which adds
the error of the engine's bf16 probe. `pytest -s` prints the table.

What is left between forward mode and the reference is the bf16 model itself, whose losses differ as well. That is worst
for adapters just off B = 0: peft adds their output to a base output that is already rounded, so what is below half an
ulp of it is lost, always in the same direction. At B of 1e-3 this costs 0.15 nats of mean loss and leaves 0.985 of the
correlation (a bf16 model without our code agrees to 0.999); rounded once, after the sum, it would be 0.9998.
"""

import copy
import random
from dataclasses import dataclass
from pathlib import Path

import pytest
import torch
from peft import LoraConfig, get_peft_model
from scipy.stats import spearmanr
from torch import Tensor, nn
from transformers import AutoModelForCausalLM, PreTrainedTokenizerBase

from tests.helpers.ranks import run_ranks
from vcore_ds.config import deepspeed_config, load_recipe, plan_batch
from vcore_ds.data import IGNORED_LABEL, Batch, Conversation, collate, tokenize_conversations
from vcore_ds.engine import Direction, Engine, finite_difference_utilities, jvp_utilities, probe_direction
from vcore_ds.models import load_tokenizer
from vcore_ds.quickstart_data import prepare_quickstart_data
from vcore_ds.run import build_engine

pytestmark = pytest.mark.dist

REPOSITORY = Path(__file__).resolve().parents[2]
EPSILONS = (1e-2, 1e-4)
LORA = LoraConfig(r=8, lora_alpha=16, target_modules="all-linear", task_type="CAUSAL_LM")
SETTINGS = ("full", "lora at init", "lora after 3 steps")


@dataclass
class Fidelity:
    """Correlations are Spearman's, over the tokens of the batch."""

    num_tokens: int
    exact_spread: float
    """Standard deviation of the exact utilities."""
    jvp: float
    jvp_relative_error: float
    jvp_along_exact_gradient: float | None
    """With the utilities along the reference's own probe gradient; None where it was not computed."""
    finite_difference: dict[float, float]
    """By epsilon."""
    changed_fraction: dict[float, float]
    """By epsilon: share of the trainable parameters that the perturbation changed."""


@pytest.fixture(scope="session")
def model_folder() -> Path:
    folder = REPOSITORY / "runs" / "quickstart_data"
    model = folder / "SmolLM2-135M-Instruct"
    return model if (model / "config.json").is_file() else prepare_quickstart_data(folder)[0]


@pytest.fixture(scope="session")
def fidelity(model_folder: Path) -> dict[str, Fidelity]:
    (measured,) = run_ranks(measure_all, 1, str(model_folder), timeout_seconds=500)
    print(f"\n{'Spearman with the exact utilities':34s}{'jvp':>8s}" + "".join(f"{f'eps {e:g}':>18s}" for e in EPSILONS))
    for setting, found in measured.items():
        differences = [f"{found.finite_difference[e]:.3f} ({found.changed_fraction[e]:.2%})" for e in EPSILONS]
        print(f"{setting:34s}{found.jvp:8.4f}" + "".join(f"{difference:>18s}" for difference in differences))
        print(
            f"    {found.num_tokens} tokens, spread {found.exact_spread:.3g}, relative error of jvp "
            f"{found.jvp_relative_error:.3f}, jvp along the exact gradient {found.jvp_along_exact_gradient}"
        )
    print("in brackets: share of the trainable parameters that the perturbation changed")
    return measured


@pytest.mark.parametrize("setting", SETTINGS)
def test_forward_mode_orders_tokens_as_the_exact_derivative_does(fidelity: dict[str, Fidelity], setting: str) -> None:
    assert fidelity[setting].exact_spread > 0
    assert fidelity[setting].jvp >= 0.99


def test_the_bf16_probe_gradient_is_as_good_as_the_exact_one(fidelity: dict[str, Fidelity]) -> None:
    along_exact_gradient = fidelity["full"].jvp_along_exact_gradient
    assert along_exact_gradient is not None and along_exact_gradient >= 0.99


@pytest.mark.parametrize("setting", SETTINGS)
def test_a_finite_difference_at_the_papers_epsilon_is_rounding(fidelity: dict[str, Fidelity], setting: str) -> None:
    assert abs(fidelity[setting].finite_difference[1e-4]) < 0.5


def test_a_finite_difference_that_stands_clear_of_rounding_is_right(fidelity: dict[str, Fidelity]) -> None:
    # Without this, the test above would pass for a perturbation that never reaches the model.
    assert fidelity["full"].finite_difference[1e-2] > 0.85


# ---- on the rank ---------------------------------------------------------------------------------------------------


def measure_all(model_folder: str) -> dict[str, Fidelity]:
    tokenizer = load_tokenizer(model_folder)
    measured = {}
    for lora in (False, True):
        adapters = "{rank: 8, alpha: 16}" if lora else "null"
        quickstart = REPOSITORY / "launch_scripts" / "recipes" / "quickstart.yaml"
        recipe = load_recipe(quickstart, [f"model.path={model_folder}", f"lora={adapters}"])
        engine = build_engine(recipe, deepspeed_config(recipe, plan_batch(recipe, 1)))
        direction = Direction(engine)
        reference = exact_model(model_folder, lora)
        measured["lora at init" if lora else "full"] = measure(engine, direction, reference, tokenizer)
        if lora:
            # Off B = 0, where A has no gradient, and clear of the adapters that are lost in rounding (see above).
            for step in range(3):
                batch = arithmetic(tokenizer, range(200 + 4 * step, 204 + 4 * step))
                probe_direction(engine, [batch], direction, normalization="sequence", clip=None)
                engine.step(learning_rate=2e-3)
            measured["lora after 3 steps"] = measure(engine, direction, reference, tokenizer)
        engine.close()
    return measured


def measure(engine: Engine, direction: Direction, reference: nn.Module, tokenizer: PreTrainedTokenizerBase) -> Fidelity:
    probe, main = arithmetic(tokenizer, range(100, 108)), arithmetic(tokenizer, range(4))
    probe_direction(engine, [probe], direction, normalization="sequence", clip=None)
    (jvp,) = jvp_utilities(engine, direction, [main], 1).utilities
    with torch.no_grad():
        losses = engine.token_losses(main)
    differences, changed = {}, {}
    for epsilon in EPSILONS:
        estimate = finite_difference_utilities(engine, direction, [main], 1, epsilon=epsilon, measure_noise=False)
        differences[epsilon], changed[epsilon] = estimate.of(0, losses), estimate.changed_fraction

    copy_trained_parameters(engine, reference)
    exact = exact_utilities(reference, whole_direction(engine, direction), main)
    along_exact_gradient = None
    if not hasattr(reference, "peft_config"):  # one setting is enough, it costs as much as all the rest
        along_exact_gradient = spearman(jvp, exact_utilities(reference, exact_gradient(reference, probe), main))
    return Fidelity(
        num_tokens=len(exact),
        exact_spread=float(exact.std()),
        jvp=spearman(jvp, exact),
        jvp_relative_error=float((jvp - exact).norm() / exact.norm()),
        jvp_along_exact_gradient=along_exact_gradient,
        finite_difference={epsilon: spearman(found, exact) for epsilon, found in differences.items()},
        changed_fraction=changed,
    )


def spearman(left: Tensor, right: Tensor) -> float:
    return float(spearmanr(left, right).statistic)


def arithmetic(tokenizer: PreTrainedTokenizerBase, seeds: range) -> Batch:
    """One written-out word problem a seed."""
    conversations = []
    for row, seed in enumerate(seeds, start=1):
        a, b, c = random.Random(seed).choices(range(3, 61), k=3)
        question = f"Tom has {a} apples. He buys {b} bags with {c} apples each. How many apples does he have?"
        answer = (
            f"Let me think. First, the bags: {b} bags with {c} apples each give {b}*{c} = {b * c} apples. Wait, let me "
            f"check: {b}*{c} is {b * c}. Yes. Then add the {a} apples that he had: {b * c} + {a} = {a + b * c}. "
            f"So the answer is \\boxed{{{a + b * c}}}."
        )
        turns = [{"role": "user", "content": question}, {"role": "assistant", "content": answer}]
        conversations.append(Conversation(row, turns))
    dataset = tokenize_conversations(conversations, tokenizer, cutoff_length=512, overlong="drop")
    assert len(dataset.sequences) == len(seeds)
    return collate(dataset.sequences, pad_token_id=tokenizer.pad_token_id)


# ---- the reference: Hugging Face's model alone, in fp64 ------------------------------------------------------------


def exact_model(model_folder: str, lora: bool) -> nn.Module:
    model = AutoModelForCausalLM.from_pretrained(model_folder, dtype=torch.float64, attn_implementation="eager")
    return (get_peft_model(model, LORA) if lora else model).double().eval()


def trained(model: nn.Module) -> dict[str, nn.Parameter]:
    return {name: parameter for name, parameter in model.named_parameters() if parameter.requires_grad}


def copy_trained_parameters(engine: Engine, reference: nn.Module) -> None:
    """The values that the engine's forward reads: rounded to the parameter dtype, not the fp32 master."""
    parameters = trained(reference)
    assert [name.removeprefix("causal_lm.") for name, _ in engine.trainable] == list(parameters)
    with torch.no_grad():
        for (_, sharded), parameter in zip(engine.trainable, parameters.values(), strict=True):
            parameter.copy_(sharded.ds_tensor[: parameter.numel()].view_as(parameter))


def whole_direction(engine: Engine, direction: Direction) -> dict[str, Tensor]:
    whole = {}
    for group in range(len(direction.groups)):
        whole.update(direction.finish_gather(group, *direction.start_gather(group)))
    return {name.removeprefix("causal_lm."): whole[id(parameter)] for name, parameter in engine.trainable}


def exact_losses(model: nn.Module, parameters: dict[str, Tensor], batch: Batch) -> Tensor:
    call = dict(input_ids=batch.input_ids, use_cache=False)
    logits = torch.func.functional_call(model, parameters, (), call, tie_weights=True).logits[:, :-1]
    targets = batch.labels[:, 1:]
    supervised = targets != IGNORED_LABEL
    return nn.functional.cross_entropy(logits[supervised], targets[supervised], reduction="none")


def exact_utilities(model: nn.Module, direction: dict[str, Tensor], batch: Batch) -> Tensor:
    parameters = {name: parameter.detach() for name, parameter in trained(model).items()}
    tangents = {name: direction[name].double() for name in parameters}
    losses, utilities = torch.func.jvp(lambda p: exact_losses(model, p, batch), (parameters,), (tangents,))
    assert losses.dtype == torch.float64
    return utilities.detach()


def exact_gradient(model: nn.Module, batch: Batch) -> dict[str, Tensor]:
    """Of the mean over sequences of the mean token loss; in fp32, which is exact enough beside bf16 and sooner done."""
    model = copy.deepcopy(model).float()
    parameters = trained(model)
    losses, index = exact_losses(model, dict(parameters), batch), batch.sequence_index()
    loss = (losses / batch.num_supervised_tokens()[index]).sum() / batch.num_rows
    return dict(zip(parameters, torch.autograd.grad(loss, list(parameters.values())), strict=True))
