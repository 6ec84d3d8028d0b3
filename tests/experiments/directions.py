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
from vcore_ds.method.optimizers import AdamStep, adam_direction
from vcore_ds.utility.low_rank import orthonormalize

CLIP = 1.0  # largest 2-norm of the gradient and of the probe gradient
BETAS, ADAM_EPS = (0.9, 0.999), 1e-8


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
    inputs = {"input_ids": traces.input_ids, "use_cache": False}
    output = model(**inputs) if parameters is None else functional_call(model, parameters, (), inputs, tie_weights=True)
    logits, targets = output.logits[:, task.PROMPT_LENGTH - 1 : -1], traces.input_ids[:, task.PROMPT_LENGTH :]
    return cross_entropy(logits.flatten(0, 1).float(), targets.flatten(), reduction="none")


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
        loss = token_losses(model, traces).mean()  # over traces too, which have one length
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
            if self.setting.direction == "adam" and state:
                moments = (state["exp_avg"], state["exp_avg_sq"])
                g = adam_direction(g, *moments, AdamStep(int(state["step"]) + 1, BETAS, ADAM_EPS))
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
