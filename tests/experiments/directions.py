"""The small model, its token losses, and the probe direction of utilities."""

from collections.abc import Sequence

import torch
import torch.autograd.forward_ad as forward_ad
from torch import Tensor
from torch.func import functional_call
from torch.nn.functional import cross_entropy
from transformers import AutoModelForCausalLM, PreTrainedModel, Qwen3Config

from tests.experiments import task
from tests.experiments.settings import Setting
from tests.experiments.task import Traces
from vcore_ds.method.optimizers import adam_direction, blend_momentum, muon_direction, muon_update
from vcore_ds.method.weights import uniform_weights
from vcore_ds.utility.low_rank import orthonormalize

CLIP = 1.0
"""Largest 2-norm of the gradient and of the probe gradient."""
BETAS, ADAM_EPS = (0.9, 0.999), 1e-8
FINITE_DIFFERENCE_EPS = 1e-4
MUON_MOMENTUM = 0.95


def make_small_qwen3(seed: int) -> PreTrainedModel:
    """A Qwen3 of about 0.1M parameters, tied embeddings, fp32."""
    config = Qwen3Config(
        vocab_size=task.VOCABULARY,
        hidden_size=64,
        intermediate_size=192,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        head_dim=16,
        max_position_embeddings=128,
        rope_parameters={"rope_type": "default", "rope_theta": 100.0},
        initializer_range=0.05,
        tie_word_embeddings=True,
        attn_implementation="eager",  # has a forward-mode derivative
        bos_token_id=None,
        eos_token_id=task.END,
        pad_token_id=task.END,
    )
    torch.manual_seed(seed)
    return AutoModelForCausalLM.from_config(config)


def token_losses(model: PreTrainedModel, traces: Traces, parameters: dict[str, Tensor] | None = None) -> Tensor:
    """Loss of each supervised token in nats, `[N]` fp32. `parameters` replace the model's."""
    targets = traces.input_ids[:, 1:][traces.supervised]
    return cross_entropy(supervised_logits(model, traces, parameters), targets, reduction="none")


def supervised_logits(model: PreTrainedModel, traces: Traces, parameters: dict[str, Tensor] | None = None) -> Tensor:
    """Logits of each supervised token, `[N, V]` fp32. `parameters` replace the model's."""
    inputs = {"input_ids": traces.input_ids, "use_cache": False}
    if parameters is None:
        logits = model(**inputs).logits
    else:
        logits = functional_call(model, parameters, (), inputs, tie_weights=True).logits
    return logits[:, :-1][traces.supervised].float()


def mean_over_sequences(values: Tensor, traces: Traces) -> Tensor:
    """`mean_i mean_t`, scalar."""
    return (values * uniform_weights(traces.sequence_index, len(traces), values.dtype)).sum() / len(traces)


class Muon(torch.optim.AdamW):
    """The package's Muon in one process: for the matrices of the layers, with AdamW for the rest, without weight
    decay."""

    def __init__(self, parameters: dict[str, Tensor]):
        others = [p for name, p in parameters.items() if not _is_hidden_matrix(name, p)]
        super().__init__(others, lr=1.0, betas=BETAS, eps=ADAM_EPS, weight_decay=0.0)
        self.matrices = [p for name, p in parameters.items() if _is_hidden_matrix(name, p)]
        for matrix in self.matrices:
            self.state[matrix]["momentum"] = torch.zeros_like(matrix, requires_grad=False)

    @torch.no_grad()
    def step(self, closure: None = None) -> None:  # type: ignore[override]  # no closure is taken
        super().step()
        for matrix in self.matrices:
            momentum = self.state[matrix]["momentum"]
            update = muon_update(blend_momentum(matrix.grad, momentum, MUON_MOMENTUM))
            momentum.lerp_(matrix.grad, 1 - MUON_MOMENTUM)
            matrix.sub_(self.param_groups[0]["lr"] * update)
            matrix.grad = None


def _is_hidden_matrix(name: str, parameter: Tensor) -> bool:
    return ".layers." in name and parameter.dim() == 2


class Direction:
    """The probe direction of one run, kept between steps like `vcore_ds.utility.direction`; with `probe_decay` as a
    running mean, which the package had up to version 0.6."""

    def __init__(self, setting: Setting, parameters: dict[str, Tensor], optimizer: torch.optim.Optimizer):
        self.setting, self.parameters, self.optimizer = setting, parameters, optimizer
        self.num_taken = 0
        self.random = torch.Generator().manual_seed(setting.seed)
        """Generator for low-rank approximations alone, so that other draws of a run do not depend on them."""
        self.vector = {name: torch.zeros_like(p, requires_grad=False) for name, p in parameters.items()}

    def take_probe(self, model: PreTrainedModel, traces: Traces) -> None:
        losses = token_losses(model, traces)
        if self.setting.probe_loss == "dft":
            losses = losses * torch.exp(-losses.detach())
        elif self.setting.probe_loss == "answer":
            losses = losses * traces.in_answer
        loss = mean_over_sequences(losses, traces)  # the scale does not matter under a KL budget
        self.take(torch.autograd.grad(loss, list(self.parameters.values())))

    @torch.no_grad()
    def take(self, gradients: Sequence[Tensor]) -> None:
        """Add a gradient, in the parameters' order, to the running mean: clipped, and times Adam's Jacobian."""
        norm = torch.linalg.vector_norm(torch.stack([torch.linalg.vector_norm(g) for g in gradients]))
        decay = self.setting.probe_decay
        self.num_taken += 1
        share = (1 - decay) / (1 - decay**self.num_taken)
        for (name, parameter), gradient in zip(self.parameters.items(), gradients, strict=True):
            g = gradient * (CLIP / norm).clamp_max(1.0)
            state = self.optimizer.state.get(parameter, {})
            if self.setting.direction == "muon" and "momentum" in state:
                g = muon_direction(blend_momentum(g, state["momentum"], MUON_MOMENTUM), g, MUON_MOMENTUM)
            elif self.setting.direction != "sgd" and state:
                moments = (state["exp_avg"], state["exp_avg_sq"])
                g = adam_direction(g, *moments, step=int(state["step"]) + 1, betas=BETAS, eps=ADAM_EPS)
            self.vector[name].lerp_(g, share)
        if (rank := self.setting.probe_rank) > 0:
            for name, matrix in self.vector.items():
                if matrix.dim() == 2 and min(matrix.shape) > rank:
                    basis = orthonormalize((matrix @ torch.randn(matrix.shape[1], rank, generator=self.random))[None])
                    self.vector[name] = basis[0] @ (basis[0].mT @ matrix)

    @torch.no_grad()
    def utilities(self, model: PreTrainedModel, traces: Traces) -> Tensor:
        """`s = <v, grad l>`, `[N]`, exact."""
        with forward_ad.dual_level():
            dual = {name: forward_ad.make_dual(p.detach(), self.vector[name]) for name, p in self.parameters.items()}
            return forward_ad.unpack_dual(token_losses(model, traces, dual)).tangent

    @torch.no_grad()
    def bf16_utilities(self, low_precision: PreTrainedModel, traces: Traces) -> Tensor:
        """`(l(theta) - l(theta - eps * v)) / eps`, parameters taken in fp32 and rounded."""

        def losses(eps: float) -> Tensor:
            rounded = {name: (p.detach() - eps * self.vector[name]).bfloat16() for name, p in self.parameters.items()}
            return token_losses(low_precision, traces, rounded)

        return (losses(0.0) - losses(FINITE_DIFFERENCE_EPS)) / FINITE_DIFFERENCE_EPS
