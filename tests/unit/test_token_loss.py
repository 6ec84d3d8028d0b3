"""The token loss against PyTorch's cross-entropy in fp64, in reverse and forward mode, and what it allocates."""

import importlib
import os

import pytest
import torch
import torch.autograd.forward_ad as forward_ad
from torch import Tensor
from torch.nn.functional import cross_entropy, linear

from tests.helpers.allocations import Allocations
from vcore_ds.models.token_loss import PLAIN, LogitTransform, loss_and_statistic, token_loss
from vcore_ds.planning.settings import LossMemory

# The package exports a function of the module's name, which hides the module from an ordinary import.
module = importlib.import_module("vcore_ds.models.token_loss")

NUM_TOKENS, HIDDEN, VOCABULARY = 23, 7, 11
IS_INTERPRETED = os.environ.get("TRITON_INTERPRET") == "1"


@pytest.fixture(params=[23, 8, 1], ids=lambda size: f"{size} tokens a block")
def block(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> int:
    """One block for all tokens, several blocks of which the last is smaller, or a block per token."""
    set_block(monkeypatch, request.param, VOCABULARY)
    return request.param


def set_block(monkeypatch: pytest.MonkeyPatch, num_tokens: int, vocabulary: int) -> None:
    monkeypatch.setattr(module, "DEFAULT_LOSS_MEMORY", LossMemory(4 * vocabulary * num_tokens + 3))


def draw_inputs(seed: int = 0, num_tokens: int = NUM_TOKENS, vocabulary: int = VOCABULARY, hidden: int = HIDDEN):
    """(hidden, weight, targets) in fp64."""
    generator = torch.Generator().manual_seed(seed)

    def normal(*shape: int) -> Tensor:
        return torch.randn(shape, generator=generator, dtype=torch.float64)

    targets = torch.randint(0, vocabulary, (num_tokens,), generator=generator)
    return normal(num_tokens, hidden), normal(vocabulary, hidden), targets


def compute_reference(hidden: Tensor, weight: Tensor, targets: Tensor) -> Tensor:
    return cross_entropy(linear(hidden, weight), targets, reduction="none")


def measure_entropy(hidden: Tensor, weight: Tensor, **options: LogitTransform) -> Tensor:
    targets = torch.zeros(len(hidden), dtype=torch.int64)
    return loss_and_statistic(hidden, weight, targets, "entropy", **options)[1]


def draw_upstream(kind: str) -> Tensor:
    gradient = torch.randn(NUM_TOKENS, generator=torch.Generator().manual_seed(9), dtype=torch.float64)
    return {
        "both signs, some zero": torch.where(torch.arange(NUM_TOKENS) % 3 == 0, 0.0, gradient),
        "negative": -gradient.abs(),
        "one token": torch.zeros(NUM_TOKENS, dtype=torch.float64).index_fill_(0, torch.tensor([NUM_TOKENS - 2]), 5.0),
        "zero": torch.zeros(NUM_TOKENS, dtype=torch.float64),
    }[kind]


# ---- reverse mode --------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("kind", ["both signs, some zero", "negative", "one token", "zero"])
def test_losses_and_gradients_for_any_gradient_of_each_token(block: int, kind: str) -> None:
    *tensors, targets = draw_inputs()
    tensors = [t.requires_grad_() for t in tensors]
    losses, expected = token_loss(*tensors, targets), compute_reference(*tensors, targets)
    torch.testing.assert_close(losses, expected, rtol=1e-13, atol=1e-13)
    gradients = torch.autograd.grad(losses, tensors, draw_upstream(kind))
    for gradient, right in zip(gradients, torch.autograd.grad(expected, tensors, draw_upstream(kind)), strict=True):
        torch.testing.assert_close(gradient, right, rtol=1e-12, atol=1e-12)


def test_gradients_against_differences_of_losses(block: int) -> None:
    *tensors, targets = draw_inputs()
    assert torch.autograd.gradcheck(lambda h, w: token_loss(h, w, targets), [t.requires_grad_() for t in tensors])


def test_huge_logits_stay_finite(block: int) -> None:
    hidden, weight, targets = draw_inputs()
    hidden = (hidden * 1e4).requires_grad_()
    losses = token_loss(hidden, weight, targets)
    torch.testing.assert_close(losses, compute_reference(hidden, weight, targets))
    losses.sum().backward()
    assert losses.isfinite().all() and hidden.grad.isfinite().all()


@pytest.mark.parametrize("frozen", ["hidden", "weight"])
def test_frozen_inputs_cost_no_gradient(frozen: str) -> None:
    # Few tokens, so that a tensor shaped like the weight can be nothing but its gradient.
    hidden, weight, targets = draw_inputs(num_tokens=5)
    named = {"hidden": hidden, "weight": weight}
    for name, tensor in named.items():
        tensor.requires_grad_(name != frozen)
    losses = token_loss(hidden, weight, targets)
    with Allocations() as backward:
        losses.sum().backward()
    for name, tensor in named.items():
        assert (tensor.grad is None) == (name == frozen)
        assert (tuple(tensor.shape) in backward.shapes) == (name != frozen)


def test_no_tokens_give_no_losses_and_zero_gradients(block: int) -> None:
    *tensors, targets = draw_inputs(num_tokens=0)
    losses = token_loss(*(t.requires_grad_() for t in tensors), targets)
    assert losses.shape == (0,)
    losses.sum().backward()
    assert [t.grad.shape for t in tensors] == [t.shape for t in tensors]
    assert not any(t.grad.any() for t in tensors)


# ---- forward mode --------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("num_tokens", [NUM_TOKENS, 0])
@pytest.mark.parametrize("moving", ["hidden", "weight", "hidden weight"])
def test_tangents_are_those_of_jvp(block: int, moving: str, num_tokens: int) -> None:
    *tensors, targets = draw_inputs(num_tokens=num_tokens)
    directions = draw_inputs(seed=1, num_tokens=num_tokens)[:2]
    moves = [name in moving.split() for name in ("hidden", "weight")]
    with torch.no_grad(), forward_ad.dual_level():
        duals = [
            forward_ad.make_dual(t, d) if moved else t for t, d, moved in zip(tensors, directions, moves, strict=True)
        ]
        losses, tangents = forward_ad.unpack_dual(token_loss(*duals, targets))
    full = tuple(d if moved else torch.zeros_like(d) for d, moved in zip(directions, moves, strict=True))
    expected = torch.func.jvp(lambda h, w: compute_reference(h, w, targets), tuple(tensors), full)
    torch.testing.assert_close(losses, expected[0], rtol=1e-13, atol=1e-13)
    torch.testing.assert_close(tangents, expected[1], rtol=1e-12, atol=1e-12)


def test_plain_inputs_in_forward_mode_give_a_plain_result() -> None:
    hidden, weight, targets = draw_inputs()
    with torch.no_grad(), forward_ad.dual_level():
        losses, tangents = forward_ad.unpack_dual(token_loss(hidden, weight, targets))
    assert tangents is None
    torch.testing.assert_close(losses, compute_reference(hidden, weight, targets))


# ---- scaled and capped logits ---------------------------------------------------------------------------------------

TRANSFORMS = {
    "scale": LogitTransform(scale=0.0625),
    "softcap": LogitTransform(softcap=3.0),
    "scale and softcap": LogitTransform(scale=-1.7, softcap=5.0),
}


def transform_logits(hidden: Tensor, weight: Tensor, transform: LogitTransform) -> Tensor:
    logits = linear(hidden, weight) * transform.scale
    return logits if transform.softcap is None else transform.softcap * torch.tanh(logits / transform.softcap)


@pytest.mark.parametrize(("dtype", "tolerance"), [(torch.float64, 1e-12), (torch.float32, 1e-6)], ids=["fp64", "fp32"])
@pytest.mark.parametrize("name", TRANSFORMS)
def test_losses_gradients_tangents_and_entropies_of_transformed_logits(
    block: int, name: str, dtype: torch.dtype, tolerance: float
) -> None:
    transform = TRANSFORMS[name]
    *values, targets = draw_inputs()
    values, directions = [t.to(dtype) for t in values], [t.to(dtype) for t in draw_inputs(seed=1)[:2]]

    def ours(hidden: Tensor, weight: Tensor) -> Tensor:
        return token_loss(hidden, weight, targets, transform=transform)

    def plain(hidden: Tensor, weight: Tensor) -> Tensor:
        return cross_entropy(transform_logits(hidden, weight, transform), targets, reduction="none")

    def errors(computed: list[Tensor], expected: list[Tensor]) -> list[float]:
        return [float((f - e).norm() / e.norm()) for f, e in zip(computed, expected, strict=True)]

    exact = [v.double() for v in values]
    leaves, exact_leaves = ([t.clone().requires_grad_() for t in tensors] for tensors in (values, exact))
    losses, expected = ours(*leaves), plain(*exact_leaves)
    gradients = torch.autograd.grad(losses, leaves, draw_upstream("both signs, some zero").to(dtype))
    right = torch.autograd.grad(expected, exact_leaves, draw_upstream("both signs, some zero").to(dtype).double())
    with torch.no_grad(), forward_ad.dual_level():
        duals = [forward_ad.make_dual(v, d) for v, d in zip(values, directions, strict=True)]
        tangents = forward_ad.unpack_dual(ours(*duals)).tangent
    moved = torch.func.jvp(plain, tuple(exact), tuple(d.double() for d in directions))[1]
    log_probabilities = transform_logits(*exact, transform).log_softmax(-1)
    entropies = measure_entropy(*values, transform=transform)
    computed = [losses.detach(), *gradients, tangents, entropies]
    worst = errors(computed, [expected.detach(), *right, moved, -(log_probabilities.exp() * log_probabilities).sum(-1)])
    print(f"{name}, {dtype}: relative errors {', '.join(f'{e:.1e}' for e in worst)}")
    assert max(worst) < tolerance


# ---- entropy -------------------------------------------------------------------------------------------------------


def compute_entropy(hidden: Tensor, weight: Tensor) -> Tensor:
    log_probabilities = linear(hidden, weight).log_softmax(-1)
    return -(log_probabilities.exp() * log_probabilities).sum(-1)


def test_entropies_are_those_of_plain_pytorch(block: int) -> None:
    hidden, weight, _ = draw_inputs()
    entropies = measure_entropy(hidden.requires_grad_(), weight)
    assert not entropies.requires_grad
    torch.testing.assert_close(entropies, compute_entropy(hidden, weight).detach(), rtol=1e-12, atol=1e-12)
    in_fp32 = measure_entropy(hidden.float(), weight.float())
    assert in_fp32.dtype == torch.float32
    assert float((in_fp32 - entropies).abs().max()) < 1e-5


def test_entropy_of_sure_and_of_uniform_predictions(block: int) -> None:
    hidden, weight, _ = draw_inputs()
    entropies = measure_entropy(hidden.float() * 1e4, weight.float())
    assert entropies.isfinite().all() and (entropies >= 0).all() and float(entropies.median()) < 1e-6
    uniform = measure_entropy(torch.zeros(NUM_TOKENS, HIDDEN), weight.float())
    torch.testing.assert_close(uniform, torch.full((NUM_TOKENS,), VOCABULARY).log())
    # Of a sure prediction, the normalizer and the mean logit agree in all digits: their difference would be wrong by
    # an ulp of the logit, 6e-5.
    sure, out = torch.tensor([[1.0]]), torch.tensor([[1000.0], [985.0]])
    expected = compute_entropy(sure.double(), out.double()).float()
    torch.testing.assert_close(measure_entropy(sure, out), expected, rtol=0, atol=1e-6)
    assert measure_entropy(hidden[:0], weight).shape == (0,)


def test_entropy_in_bf16_and_by_blocks(monkeypatch: pytest.MonkeyPatch) -> None:
    block_tokens, vocabulary = 8, 2000
    set_block(monkeypatch, block_tokens, vocabulary)
    hidden, weight = (t.bfloat16() for t in draw_inputs(num_tokens=64, vocabulary=vocabulary, hidden=16)[:2])
    with Allocations() as allocations:
        entropies = measure_entropy(hidden, weight)
    assert allocations.largest_numel == block_tokens * vocabulary
    assert float((entropies - compute_entropy(hidden.double(), weight.double())).abs().max()) < 0.05


# ---- half precision ------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("keeps", [False, True], ids=["", "logit gradients kept"])
def test_half_precision_losses_gradients_and_tangents_are_within_its_rounding(
    keeps: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """By PyTorch's operations, and by the kernel where `test_flash_tangent.py` runs this in Triton's interpreter."""
    if IS_INTERPRETED:
        kernel = importlib.import_module("vcore_ds.models.token_loss_kernel")
        monkeypatch.setattr(kernel, "MAX_COLUMNS", 128)  # three passes of the loop, of which the last is not full
    memory = LossMemory(4 * 300 * 10 + 3, keeps_logit_gradients=keeps)
    exact = draw_inputs(num_tokens=24, vocabulary=300, hidden=16)
    directions = draw_inputs(seed=1, num_tokens=24, vocabulary=300, hidden=16)[:2]
    hidden, weight = (t.bfloat16().requires_grad_() for t in exact[:2])
    targets, gradient = exact[2], torch.randn(24, generator=torch.Generator().manual_seed(2))
    saved: list[tuple[int, ...]] = []
    with torch.autograd.graph.saved_tensors_hooks(lambda t: saved.append(tuple(t.shape)) or t, lambda t: t):
        losses = token_loss(hidden, weight, targets, memory=memory)
    assert losses.dtype == torch.float32 and ((24, 300) in saved) == (keeps and IS_INTERPRETED)
    losses.backward(gradient)
    assert (hidden.grad.dtype, weight.grad.dtype) == (torch.bfloat16, torch.bfloat16)
    leaves = [t.detach().clone().requires_grad_() for t in (hidden, weight)]
    with forward_ad.dual_level():
        duals = [forward_ad.make_dual(t, d.bfloat16()) for t, d in zip(leaves, directions, strict=True)]
        fused_losses, tangents = forward_ad.unpack_dual(token_loss(*duals, targets, memory=memory))
        assert torch.equal(fused_losses, losses) and tangents.dtype == torch.float32 and not tangents.requires_grad
        fused_losses.backward(gradient)
    assert all(torch.equal(a.grad, b.grad) for a, b in zip(leaves, (hidden, weight), strict=True))
    with torch.no_grad():
        assert torch.equal(token_loss(hidden, weight, targets, memory=memory), losses)

    same = [t.detach().double().requires_grad_() for t in (hidden, weight)]  # what bf16 holds, in fp64
    expected = compute_reference(*same, targets)
    expected.backward(gradient.double())
    primals, same_directions = tuple(t.detach() for t in same), tuple(d.bfloat16().double() for d in directions)
    moved = torch.func.jvp(lambda h, w: compute_reference(h, w, targets), primals, same_directions)[1]
    # Where bf16 matrix multiplications do not return fp32, two logits are rounded by half an ulp.
    largest_logit = float((primals[0] @ primals[1].t()).abs().max())
    assert float((losses - expected).detach().abs().max()) < 2 * 2**-9 * largest_logit
    for computed, right in [(hidden.grad, same[0].grad), (weight.grad, same[1].grad), (tangents, moved)]:
        assert float((computed - right).norm() / right.norm()) < 0.01


def test_the_bf16_gradient_of_the_weight_is_summed_over_blocks_in_fp32(monkeypatch: pytest.MonkeyPatch) -> None:
    # 600 equal addends, one a block: a bf16 sum stops growing at 256 times the addend.
    set_block(monkeypatch, 1, 2)
    hidden, weight = torch.ones(600, 1, dtype=torch.bfloat16), torch.zeros(2, 1, dtype=torch.bfloat16).requires_grad_()
    token_loss(hidden, weight, torch.zeros(600, dtype=torch.int64)).sum().backward()
    assert weight.grad.flatten().tolist() == [-300.0, 300.0]


# ---- memory --------------------------------------------------------------------------------------------------------


def measure_allocations(num_tokens: int, vocabulary: int, transform: LogitTransform) -> tuple[Allocations, Allocations]:
    """Memory of forward + backward, and of the tangent pass, everything moving."""
    tensors = [t.float() for t in draw_inputs(num_tokens=num_tokens, vocabulary=vocabulary, hidden=4)[:2]]
    targets = torch.zeros(num_tokens, dtype=torch.int64)
    leaves = [t.clone().requires_grad_() for t in tensors]
    with Allocations() as reverse:
        token_loss(*leaves, targets, transform=transform).sum().backward()
    with torch.no_grad(), forward_ad.dual_level():
        duals = [forward_ad.make_dual(t, torch.ones_like(t)) for t in tensors]
        with Allocations() as forward:
            token_loss(*duals, targets, transform=transform)
    return reverse, forward


@pytest.mark.parametrize("transform", [PLAIN, *TRANSFORMS.values()], ids=["plain", *TRANSFORMS])
def test_logits_exist_for_a_block_of_tokens_only(monkeypatch: pytest.MonkeyPatch, transform: LogitTransform) -> None:
    block_tokens, vocabulary = 8, 2000
    set_block(monkeypatch, block_tokens, vocabulary)
    block_numel = block_tokens * vocabulary
    few = measure_allocations(64, vocabulary, transform)
    many = measure_allocations(512, vocabulary, transform)
    for passes in (few, many):
        for allocations in passes:
            assert allocations.largest_numel == block_numel
    # Beside a handful of blocks and the gradients of the weight, only a few numbers a token.
    for small, large in zip(few, many, strict=True):
        print(f"peak {small.peak_bytes / (4 * block_numel):.2f} and {large.peak_bytes / (4 * block_numel):.2f} blocks")
        assert large.peak_bytes < 6 * 4 * block_numel
        assert large.peak_bytes - small.peak_bytes <= (512 - 64) * 4 * (4 + 8)
