"""Features of a packed row from a target, or from a cache of those of its documents.

Guarantees:
- A cached document's features are the ones the target gave, bit for bit; a document is known by its tokens, and a
  target is document-causal, so its neighbours in the row do not matter.
- What the cache does not hold is computed.
"""

from __future__ import annotations

from collections.abc import Mapping

import torch
from torch import Tensor

from .feature_cache import FeatureCache
from .target import Target


class FeatureSource:
    """Computes features of batches on the target's device, or finds them.

    Args:
        target: the model; its ``features`` does the work.
        layer_ids: the K layers.
        cache: from ``feature_cache.feature_cache``; entries have the name "features".
    """

    def __init__(self, target: Target, layer_ids: tuple[int, ...], cache: FeatureCache | None = None) -> None:
        self.target, self.layer_ids, self.cache = target, layer_ids, cache

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
        entries = [self.cache.get(tokens) for tokens in documents]
        found = [None if entry is None else entry["features"] for entry in entries]
        if any(features is None for features in found):
            computed = self._compute_missing(batch, lengths, found)
            for tokens, features, former in zip(documents, computed, found, strict=True):
                if former is None:
                    self.cache.put(tokens, {"features": features})
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
