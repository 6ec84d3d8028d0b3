"""Memory that code allocates, counted tensor by tensor: the same on every machine, unlike a process's size."""

import torch
from torch.multiprocessing.reductions import StorageWeakRef
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves


class Allocations(TorchDispatchMode):
    """Counts the tensors that operations inside the block create. Views and in-place results create none.

    Attributes:
        peak_bytes: largest sum over the tensors created inside that were alive at the same time.
        largest_numel: number of elements of the largest one.
        shapes: the shapes of all of them.
    """

    def __init__(self) -> None:
        super().__init__()
        self.peak_bytes = self.largest_numel = 0
        self.shapes: set[tuple[int, ...]] = set()
        self._live: dict[StorageWeakRef, int] = {}

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        result = func(*args, **(kwargs or {}))
        inputs = [leaf for leaf in tree_leaves((args, kwargs)) if isinstance(leaf, torch.Tensor)]
        known = {StorageWeakRef(tensor.untyped_storage()) for tensor in inputs}
        for tensor in tree_leaves(result):
            if not isinstance(tensor, torch.Tensor) or StorageWeakRef(tensor.untyped_storage()) in known:
                continue
            if tensor.is_meta:  # has a size, and no memory
                continue
            self._live[StorageWeakRef(tensor.untyped_storage())] = tensor.untyped_storage().nbytes()
            self.largest_numel = max(self.largest_numel, tensor.untyped_storage().nbytes() // tensor.element_size())
            self.shapes.add(tuple(tensor.shape))
        self.peak_bytes = max(self.peak_bytes, self.live_bytes())
        return result

    def live_bytes(self) -> int:
        """Sum over the tensors created inside that are alive now."""
        self._live = {storage: nbytes for storage, nbytes in self._live.items() if not storage.expired()}
        return sum(self._live.values())
