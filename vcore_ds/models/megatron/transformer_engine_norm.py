"""TransformerEngine's RMSNorm for dual numbers. Imported only where its kernels can run: see `norms`."""

import torch
from transformer_engine.pytorch import RMSNorm

from vcore_ds.models.megatron.norms import TakesDualNumbers


class TransformerEngineNorm(TakesDualNumbers, RMSNorm):
    """One kernel each for the value and the gradient. In bf16 it rounds once, where `norms.PlainRMSNorm` rounds the
    normalized values and their product with the weight."""

    def __init__(self, size: int, eps: float):
        # Without a device it takes the current GPU, whatever PyTorch's default device is.
        super().__init__(size, eps=eps, device=torch.empty(0).device)
