"""Features of a packed row from a target, and a cache of them in host memory for later epochs.

Guarantees:
- A cached document's features are the ones the target gave, bit for bit; a document is known by its tokens, and a
  target is document-causal, so its neighbours in the row do not matter.
- The cache never grows past its limit; what does not fit is computed again.
"""

from __future__ import annotations

from collections.abc import Mapping

import torch
from torch import Tensor

from .target import Target


class FeatureCache:
    """Features by document, in host memory. One thread.

    Args:
        limit_bytes: how much it may hold.
    """

    def __init__(self, limit_bytes: int) -> None:
        self.limit_bytes = limit_bytes
        self.num_bytes = 0
        self._features: dict[bytes, Tensor] = {}

    def get(self, tokens: Tensor) -> Tensor | None:
        """The features [n, K*H] of the document of these tokens [n], or None."""
        return self._features.get(tokens.numpy().tobytes())

    def put(self, tokens: Tensor, features: Tensor) -> None:
        """Keep a copy, where it fits."""
        size = features.numel() * features.element_size()
        if self.num_bytes + size > self.limit_bytes:
            return
        key = tokens.numpy().tobytes()
        if key not in self._features:
            self._features[key] = features.to("cpu", copy=True)
            self.num_bytes += size


class FeatureSource:
    """Computes features of batches on the target's device, or finds them.

    Args:
        target: the model; its ``features`` does the work.
        layer_ids: the K layers.
        cache_bytes: host memory for features of documents; 0: no cache.
    """

    def __init__(self, target: Target, layer_ids: tuple[int, ...], cache_bytes: int = 0) -> None:
        self.target, self.layer_ids = target, layer_ids
        self.cache = FeatureCache(cache_bytes) if cache_bytes > 0 else None

    def __call__(self, batch: Mapping[str, Tensor]) -> Tensor:
        """Features [T, K*H] of a batch of CPU tensors. Padding's are zero, or mean nothing.

        Sync: with a cache, on CUDA, waits for what it keeps; otherwise none.
        """
        if self.cache is None:
            return self._compute(batch)
        document_ids = batch["document_ids"]
        lengths = torch.unique_consecutive(document_ids[document_ids >= 0], return_counts=True)[1].tolist()
        num_valid = sum(lengths)
        documents = batch["tokens"][:num_valid].split(lengths)
        found = [self.cache.get(tokens) for tokens in documents]
        if any(features is None for features in found):
            computed = self._compute_missing(batch, lengths, found)
            for tokens, features in zip(documents, computed, strict=True):
                self.cache.put(tokens, features)
        else:
            computed = [features for features in found if features is not None]
        width = len(self.layer_ids) * self.target.hidden_size
        row = torch.zeros(len(document_ids), width, dtype=self.target.dtype, device=self.target.device)
        for features, place in zip(computed, row[:num_valid].split(lengths), strict=True):
            place.copy_(features)
        return row

    def _compute(self, batch: Mapping[str, Tensor]) -> Tensor:
        names, device = ("tokens", "document_ids", "positions"), self.target.device
        tensors = (batch[name].to(device, non_blocking=True) for name in names)
        return self.target.features(*tensors, self.layer_ids)

    def _compute_missing(
        self, batch: Mapping[str, Tensor], lengths: list[int], found: list[Tensor | None]
    ) -> list[Tensor]:
        """All documents' features: on CUDA the whole row is computed, on the CPU only the documents not found."""
        num_valid = sum(lengths)
        if self.target.device.type == "cuda":
            return list(self._compute(batch)[:num_valid].split(lengths))
        missing = torch.tensor([features is None for features in found])
        kept = missing.repeat_interleave(torch.tensor(lengths)).nonzero().flatten()
        part = {name: batch[name][kept] for name in ("tokens", "document_ids", "positions")}
        missing_lengths = [n for n, features in zip(lengths, found, strict=True) if features is None]
        fresh = iter(self._compute(part).split(missing_lengths))
        return [next(fresh) if features is None else features for features in found]
