"""Accuracy of the two estimators in bf16 on a real pretrained model, through the real engine.

The reference is the derivative of the plain Hugging Face model in fp64 along the direction that the engine holds, so
that the estimator alone is compared; for full parameters also along the exact model's probe gradient, which adds the
error of the engine's bf16 probe. fp64 is slow, so it checks, on one sequence and the first layers, the sharded model
computed in fp32 (`forward_mode(..., precision)`, also the reference of `vcore-ds fidelity`); that model checks the
estimators on all sequences, with all parameters also on all layers.
A tiny model on one and two ranks, in bf16 and in fp32, is checked in the same way. `pytest -s` prints the table.

The remaining difference between forward mode and the reference is the bf16 model itself, whose losses differ as well.
It was worst for adapters just off B = 0, whose output was lost when it was added to a base output that was already
rounded: a correlation of 0.986 and 0.14 nats of mean loss after one step at 1e-3 (0.988 after three at 3e-4, no other
fault). One token whose utility is far off costs 0.003 in the 371 tokens of the other settings, so this is measured on
742.

The error of such tokens is a matter of the last bit: one of 1,487 had an error of 0.2 to 1.7 with the matrix
multiplications of four kinds of CPUs, up to 72% of the sum of squares, and with it the relative error of all tokens was
0.030 to 0.064. That of 99% of the tokens was 0.020 to 0.023, and 0.18 and 0.20 with the adapter's output lost. So the
error of those 99% is bounded; the correlation is over all tokens.
"""

import copy
import ctypes
import random
from dataclasses import dataclass
from pathlib import Path

import pytest
import torch
from peft import LoraConfig, get_peft_model
from scipy.stats import spearmanr
from torch import Tensor, nn
from transformers import AutoModelForCausalLM, PreTrainedTokenizerBase

from tests.helpers import step_runs, tiny
from tests.helpers.conversations import tokenize
from tests.helpers.ranks import run_ranks
from tests.helpers.setups import prepare_pretrained_model, write_first_layers
from tests.helpers.soak import IS_SOAK, soak_only
from vcore_ds.config.load import load_recipe
from vcore_ds.data.batches import IGNORED_LABEL, Batch, collate
from vcore_ds.data.tokenization import load_tokenizer
from vcore_ds.engine.zero3 import Engine
from vcore_ds.models.causal_lm import TokenLossModel
from vcore_ds.planning.batch_plan import plan_batch
from vcore_ds.planning.deepspeed_json import deepspeed_config
from vcore_ds.planning.known_models import QWEN3_32B
from vcore_ds.planning.settings import derive_plan_settings
from vcore_ds.training.setup import build_engine
from vcore_ds.utility.derivative_check import Derivatives, compare_derivatives
from vcore_ds.utility.direction import Direction
from vcore_ds.utility.estimators import FiniteDifference, compute_jvp_utilities
from vcore_ds.utility.forward_mode import compute_losses_and_utilities, forward_mode

pytestmark = pytest.mark.dist

REPOSITORY = Path(__file__).resolve().parents[2]
EPSILONS = (1e-2, 1e-4) if IS_SOAK else (1e-4,)
"""Full fine-tuning is measured with both. README's table comes from `make soak`."""
NUM_LAYERS = 8
"""Layers of the fp64 model and of the model with adapters, of 30. The estimators with all parameters take all layers,
since the gradient of the first layers alone is so large that a finite difference of 1e-4 is not all rounding; `make
soak` takes them everywhere."""
NUM_SEQUENCES = 4 if IS_SOAK else 2
"""Of the main batch, of the probe and of each training step."""
LORA = LoraConfig(r=8, lora_alpha=16, target_modules="all-linear", task_type="CAUSAL_LM")
HIGHER_PRECISION = {"bf16": torch.float32, "fp32": torch.float64}
EXACT_FULL = "full" if IS_SOAK else "full, first layers"
WITH_EXACT = (EXACT_FULL, *(["lora at init"] if IS_SOAK else []), "lora after 3 steps")
"""Settings that are compared with the fp64 model."""
SETTINGS = tuple(dict.fromkeys(["full", *WITH_EXACT]))
OFF_ZERO_RATE = 1e-3
"""Learning rate of the one AdamW step that takes adapters just off B = 0."""


@dataclass
class Fidelity:
    """Accuracy of both estimators in one setting; correlations are Spearman's, over the tokens of the batch. None where
    a number was not computed."""

    exact_spread: float  # standard deviation of the exact utilities
    jvp: float
    jvp_relative_error: float
    with_fp8_tangents: float
    upcast_relative_error: float | None
    """Error, against fp64, of the fp32 reference that the other fields compare with; over the tokens of the first
    sequence."""
    jvp_along_exact_gradient: float | None  # with the utilities along the reference's probe gradient
    finite_difference: dict[float, float]  # by epsilon
    derivatives: list[Derivatives]  # of the start and the end of a short sequence, as a run checks them


@pytest.fixture(scope="module")
def on_one_rank(tmp_path_factory: pytest.TempPathFactory) -> list[tuple[dict[str, "Fidelity"], dict[str, "Upcast"]]]:
    first_layers = None if IS_SOAK else write_first_layers(tmp_path_factory.mktemp("model"), NUM_LAYERS)
    return run_ranks(measure_all, 1, str(prepare_pretrained_model()), first_layers and str(first_layers))


@pytest.fixture(scope="module")
def fidelity(on_one_rank: list[tuple[dict[str, "Fidelity"], dict[str, "Upcast"]]]) -> dict[str, Fidelity]:
    ((measured, _),) = on_one_rank
    print("", *measured.items(), sep="\n")
    return measured


@soak_only
def test_an_adapter_just_off_zero_is_not_lost_in_rounding() -> None:
    (result,) = run_ranks(measure_off_zero, 1, str(prepare_pretrained_model()), timeout_seconds=500)
    print(result)
    assert result["jvp"] >= 0.996
    assert result["jvp_relative_error"] < 0.03
    assert abs(result["loss"] - result["exact_loss"]) < 0.01


@pytest.mark.parametrize("setting", SETTINGS)
def test_forward_mode_orders_tokens_as_the_exact_derivative_does(fidelity: dict[str, Fidelity], setting: str) -> None:
    measured = fidelity[setting]
    assert measured.exact_spread > 0 and measured.jvp >= 0.99 and measured.with_fp8_tangents >= 0.98


@pytest.mark.parametrize("setting", SETTINGS)
def test_a_right_model_in_bf16_passes_the_check_of_both_modes(fidelity: dict[str, Fidelity], setting: str) -> None:
    assert all(derivatives.agree for derivatives in fidelity[setting].derivatives), fidelity[setting].derivatives


def test_utilities_along_the_bf16_probe_gradient_agree_with_those_along_the_exact_one(
    fidelity: dict[str, Fidelity],
) -> None:
    along_exact_gradient = fidelity[EXACT_FULL].jvp_along_exact_gradient
    assert along_exact_gradient is not None and along_exact_gradient >= 0.99


@pytest.mark.parametrize("setting", [setting for setting in SETTINGS if setting != "full, first layers"])
def test_a_finite_difference_at_the_papers_epsilon_is_mostly_rounding(
    fidelity: dict[str, Fidelity], setting: str
) -> None:
    assert abs(fidelity[setting].finite_difference[1e-4]) < 0.5


def test_a_finite_difference_with_a_large_epsilon_is_accurate(fidelity: dict[str, Fidelity]) -> None:
    # Without this, the test above would pass for a perturbation that never reaches the model.
    assert fidelity["full"].finite_difference[1e-2] > 0.85


@pytest.mark.parametrize("setting", WITH_EXACT)
def test_the_fp32_reference_is_the_exact_derivative(fidelity: dict[str, Fidelity], setting: str) -> None:
    error = fidelity[setting].upcast_relative_error
    assert error is not None and error < 2e-5


def test_the_higher_precision_reference_is_exact_on_one_and_two_ranks(
    on_one_rank: list[tuple[dict[str, "Fidelity"], dict[str, "Upcast"]]],
) -> None:
    (_, single), *double = on_one_rank[0], *run_ranks(measure_upcasts, 2)
    for result in (single, *double):
        for setting, upcast in result.items():
            assert upcast.dtype == HIGHER_PRECISION[setting.split()[0]]
            # Hugging Face's norms compute in fp32, also in the fp64 model that is compared with.
            assert upcast.loss_error < 1e-5 and upcast.relative_error < 2e-6, (setting, upcast)
            assert upcast.relative_error_without > (1e-3 if "bf16" in setting else 0), (setting, upcast)
            assert upcast.leaves_nothing_behind, setting


# ---- on the rank ---------------------------------------------------------------------------------------------------


def measure_all(model: str, first_layers: str | None) -> tuple[dict[str, Fidelity], dict[str, "Upcast"]]:
    """`first_layers`: folder of the model's first layers, which alone are computed in fp64; None: all layers are."""
    keep_freed_memory()
    tokenizer = load_tokenizer(model)
    measured = {}
    if first_layers is not None:
        engine = make_engine(model, lora=False)
        measured["full"] = measure(engine, Direction(engine), None, tokenizer, (1e-2, 1e-4))
        engine.close()
    for lora in (False, True):
        engine = make_engine(first_layers or model, lora)
        direction = Direction(engine)
        reference = load_exact_model(first_layers or model, lora)
        if not lora:
            measured[EXACT_FULL] = measure(engine, direction, reference, tokenizer, (1e-2, 1e-4) if IS_SOAK else ())
        if lora and "lora at init" in SETTINGS:
            measured["lora at init"] = measure(engine, direction, reference, tokenizer)
        if lora:
            take_steps(engine, direction, tokenizer, num_steps=3, learning_rate=2e-3)
            measured["lora after 3 steps"] = measure(engine, direction, reference, tokenizer)
        engine.close()
    return measured, measure_upcasts()


def keep_freed_memory() -> None:
    """Make glibc keep freed memory. It would return that of large tensors at once, and page faults in new memory took a
    fifth of the time."""
    libc, trim_threshold, mmap_max = ctypes.CDLL(None), -1, -4
    assert libc.mallopt(mmap_max, 0) and libc.mallopt(trim_threshold, 2**31 - 1)


def measure_off_zero(model_folder: str) -> dict[str, float]:
    """Forward mode in bf16 against the fp32 reference, just off B = 0; its relative error over the 99% of the tokens
    with the smallest errors, and the mean loss of the training forward."""
    tokenizer = load_tokenizer(model_folder)
    probe = make_problems(tokenizer, range(100, 108))
    mains = [make_problems(tokenizer, range(start, start + 4)) for start in range(0, 8, 4)]
    engine = make_engine(model_folder, lora=True)
    direction = Direction(engine)
    take_steps(engine, direction, tokenizer, num_steps=1, learning_rate=OFF_ZERO_RATE)
    direction.compute([probe], normalization="sequence", clip=None)
    jvp = torch.cat(compute_jvp_utilities(engine, direction, mains))
    with torch.no_grad():
        losses = torch.cat([engine.token_losses(main) for main in mains])
    with forward_mode(engine, direction, precision=torch.float32):
        exact_losses, exact = map(
            torch.cat, zip(*(compute_losses_and_utilities(engine, main) for main in mains), strict=True)
        )
    engine.close()
    kept = (jvp - exact).abs().argsort()[: len(exact) - len(exact) // 100]
    return {
        "jvp": compute_spearman(jvp, exact),
        "jvp_relative_error": step_runs.relative_error(jvp[kept], exact[kept]),
        "loss": float(losses.mean()),
        "exact_loss": float(exact_losses.mean()),
    }


def make_engine(model_folder: str, lora: bool) -> Engine:
    quickstart = REPOSITORY / "launch_scripts" / "recipes" / "quickstart.yaml"
    adapters = "{rank: 8, alpha: 16}" if lora else "null"
    recipe = load_recipe(quickstart, [f"model.path={model_folder}", f"lora={adapters}"])
    settings = derive_plan_settings(recipe)
    config = deepspeed_config(settings, plan_batch(settings, 1, QWEN3_32B))
    return build_engine(derive_plan_settings(recipe), config)


def take_steps(
    engine: Engine, direction: Direction, tokenizer: PreTrainedTokenizerBase, *, num_steps: int, learning_rate: float
) -> None:
    """Train for some steps, so that adapters leave B = 0, where A has no gradient."""
    for step in range(num_steps):
        first = 200 + NUM_SEQUENCES * step
        batch = make_problems(tokenizer, range(first, first + NUM_SEQUENCES))
        direction.compute([batch], normalization="sequence", clip=None)
        engine.step(learning_rate=learning_rate)


def measure(
    engine: Engine,
    direction: Direction,
    reference: nn.Module | None,
    tokenizer: PreTrainedTokenizerBase,
    epsilons: tuple[float, ...] = EPSILONS,
) -> Fidelity:
    probe, main = (
        make_problems(tokenizer, range(100, 100 + NUM_SEQUENCES)),
        make_problems(tokenizer, range(NUM_SEQUENCES)),
    )
    direction.compute([probe], normalization="sequence", clip=None)
    (jvp,) = compute_jvp_utilities(engine, direction, [main], 1)
    (with_fp8_tangents,) = compute_jvp_utilities(engine, direction.with_rank(None, fp8_tangents=True), [main], 1)
    assert not torch.equal(jvp, with_fp8_tangents)
    with forward_mode(engine, direction, precision=torch.float32):
        upcast = compute_losses_and_utilities(engine, main)[1]
    differences = {}
    for epsilon in epsilons:
        forward = FiniteDifference(engine, direction, epsilon=epsilon).begin([main])
        with torch.no_grad():
            differences[epsilon] = forward.run(0).utilities

    upcast_relative_error = along_exact_gradient = None
    if reference is not None:
        copy_trained_parameters(engine, reference)
        first = tiny.take_rows(main, [0])
        exact = compute_exact_utilities(reference, gather_direction(engine, direction), first)
        upcast_relative_error = step_runs.relative_error(upcast[: len(exact)], exact)
        if not hasattr(reference, "peft_config"):  # one setting is enough
            along_exact_gradient = compute_spearman(jvp, compute_utilities_along_exact_gradient(reference, probe, main))
    return Fidelity(
        exact_spread=float(upcast.std()),
        jvp=compute_spearman(jvp, upcast),
        jvp_relative_error=step_runs.relative_error(jvp, upcast),
        with_fp8_tangents=compute_spearman(with_fp8_tangents, upcast),
        upcast_relative_error=upcast_relative_error,
        jvp_along_exact_gradient=along_exact_gradient,
        finite_difference={
            epsilon: compute_spearman(difference, upcast) for epsilon, difference in differences.items()
        },
        derivatives=[compare_derivatives(engine, *batches) for batches in make_short_batches(tokenizer)],
    )


def make_short_batches(tokenizer: PreTrainedTokenizerBase) -> list[list[Batch]]:
    """The first and the last 32 tokens of a conversation, each with the same text without its first token."""
    messages = [{"role": "user", "content": "what is 0 plus 0?"}, {"role": "assistant", "content": "0 and 0 is 0."}]
    ids = torch.tensor([tokenizer(str(tokenizer.apply_chat_template(messages, tokenize=False))).input_ids])
    return [[Batch([0], part, part) for part in (end, end[:, 1:])] for end in (ids[:, :32], ids[:, -32:])]


@dataclass
class Upcast:
    """Forward mode in the next higher precision against the exact derivative, for a tiny model and one rank's packs."""

    dtype: torch.dtype
    loss_error: float  # largest, nats
    relative_error: float
    relative_error_without: float  # in the parameters' precision
    leaves_nothing_behind: bool


def measure_upcasts() -> dict[str, Upcast]:
    """Measure every precision, with adapters and without."""
    return {
        f"{precision} {'lora' if lora else 'full'}": measure_upcast(precision, lora)
        for precision in HIGHER_PRECISION
        for lora in (False, True)
    }


def measure_upcast(precision: str, lora: bool) -> Upcast:
    dtype = torch.bfloat16 if precision == "bf16" else torch.float32
    model = tiny.with_lora(tiny.qwen3(tied=lora)) if lora else tiny.qwen3(tied=lora)
    model = model.to(dtype)  # DeepSpeed converts adapters and buffers too
    recipe = step_runs.make_recipe(model={"path": "none", "precision": precision})
    reference = step_runs.make_reference(model, recipe).model.double().eval()
    # peft's hook there asks for gradients in place, which torch.func refuses; no value depends on it.
    reference.get_input_embeddings()._forward_hooks.clear()
    engine = step_runs.make_engine(TokenLossModel(model), recipe)
    direction = Direction(engine)
    direction.compute(step_runs.deal(tiny.make_batch(3, seed=5), 2), normalization="sequence", clip=None)
    exact_direction = gather_direction(engine, direction)
    batches = step_runs.deal(tiny.make_batch(4), 1)

    before = torch.cat(compute_jvp_utilities(engine, direction, batches, 1))
    with forward_mode(engine, direction, HIGHER_PRECISION[precision]):
        losses, utilities = map(
            torch.cat, zip(*(compute_losses_and_utilities(engine, batch) for batch in batches), strict=True)
        )
    after = torch.cat(compute_jvp_utilities(engine, direction, batches, 1))
    parameters = {name: parameter.detach() for name, parameter in trained(reference).items()}
    expected_losses = torch.cat([compute_exact_losses(reference, parameters, batch) for batch in batches]).detach()
    expected = torch.cat([compute_exact_utilities(reference, exact_direction, batch) for batch in batches])
    engine.close()
    return Upcast(
        dtype=losses.dtype if losses.dtype == utilities.dtype else torch.float16,
        loss_error=float((losses - expected_losses).abs().max()),
        relative_error=step_runs.relative_error(utilities, expected),
        relative_error_without=step_runs.relative_error(before, expected),
        leaves_nothing_behind=torch.equal(before, after),
    )


def compute_spearman(left: Tensor, right: Tensor) -> float:
    return float(spearmanr(left, right).statistic)


def make_problems(tokenizer: PreTrainedTokenizerBase, seeds: range) -> Batch:
    """Write out one word problem per seed."""
    conversations = []
    for seed in seeds:
        a, b, c = random.Random(seed).choices(range(3, 61), k=3)
        question = f"Tom has {a} apples. He buys {b} bags with {c} apples each. How many apples does he have?"
        answer = (
            f"Let me think. First, the bags: {b} bags with {c} apples each give {b}*{c} = {b * c} apples. Wait, let me "
            f"check: {b}*{c} is {b * c}. Yes. Then add the {a} apples that he had: {b * c} + {a} = {a + b * c}. "
            f"So the answer is \\boxed{{{a + b * c}}}."
        )
        conversations.append([{"role": "user", "content": question}, {"role": "assistant", "content": answer}])
    # transformers 5.17 reads this tokenizer without a padding token.
    pad_token_id = tokenizer.pad_token_id or tokenizer.eos_token_id
    return collate(tokenize(conversations, tokenizer), pad_token_id=pad_token_id)


# ---- the reference: Hugging Face's model alone, in fp64 ------------------------------------------------------------


def load_exact_model(model_folder: str, lora: bool) -> nn.Module:
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


def gather_direction(engine: Engine, direction: Direction) -> dict[str, Tensor]:
    gathered = {}
    for group in range(len(direction.groups)):
        gathered.update(direction.finish_gather(direction.start_gather(group)))
    return {name.removeprefix("causal_lm."): gathered[id(parameter)] for name, parameter in engine.trainable}


def compute_exact_losses(model: nn.Module, parameters: dict[str, Tensor], batch: Batch) -> Tensor:
    call = dict(input_ids=batch.input_ids, use_cache=False)
    logits = torch.func.functional_call(model, parameters, (), call, tie_weights=True).logits[:, :-1]
    targets = batch.labels[:, 1:]
    supervised = targets != IGNORED_LABEL
    return nn.functional.cross_entropy(logits[supervised], targets[supervised], reduction="none")


def compute_exact_utilities(model: nn.Module, direction: dict[str, Tensor], batch: Batch) -> Tensor:
    parameters = {name: parameter.detach() for name, parameter in trained(model).items()}
    tangents = {name: direction[name].to(parameter.dtype) for name, parameter in parameters.items()}
    losses, utilities = torch.func.jvp(lambda p: compute_exact_losses(model, p, batch), (parameters,), (tangents,))
    assert losses.dtype == next(iter(parameters.values())).dtype
    return utilities.detach()


def compute_utilities_along_exact_gradient(model: nn.Module, probe: Batch, main: Batch) -> Tensor:
    """Utilities along the gradient of the mean over sequences of the mean token loss; in fp32, which is exact
    enough for a comparison with bf16, and faster."""
    model = copy.deepcopy(model).float()
    parameters = trained(model)
    losses, index = compute_exact_losses(model, dict(parameters), probe), probe.sequence_index()
    loss = (losses / probe.num_supervised_tokens()[index]).sum() / probe.num_sequences
    gradient = torch.autograd.grad(loss, list(parameters.values()))
    return compute_exact_utilities(model, dict(zip(parameters, gradient, strict=True)), main)
