"""What a target says to a packed row, and a cache of it in host memory for later epochs.

Each is a tensor with a name: "features" [T, K*H] and, where they are wanted, "target_tokens" [T] int64 (at p the token
that the target holds most likely to follow the one at p).

Guarantees:
- A cached document's tensors are the ones the target gave, bit for bit; a document is known by its tokens, and a
  target is document-causal, so its neighbours in the row do not matter.
- The cache never grows past its limit; what does not fit is computed again.
"""

from __future__ import annotations

from collections.abc import Mapping

import torch
from torch import Tensor

from .target import Target


class FeatureCache:
    """Tensors by document, in host memory. One thread.

    Args:
        limit_bytes: how much it may hold.
    """

    def __init__(self, limit_bytes: int) -> None:
        self.limit_bytes = limit_bytes
        self.num_bytes = 0
        self._entries: dict[bytes, Mapping[str, Tensor]] = {}

    def get(self, tokens: Tensor) -> Mapping[str, Tensor] | None:
        """The tensors, each [n, ...], of the document of these tokens [n], or None."""
        return self._entries.get(tokens.numpy().tobytes())

    def put(self, tokens: Tensor, entry: Mapping[str, Tensor]) -> None:
        """Keep a copy, where it fits."""
        size = sum(tensor.numel() * tensor.element_size() for tensor in entry.values())
        if self.num_bytes + size > self.limit_bytes:
            return
        key = tokens.numpy().tobytes()
        if key not in self._entries:
            self._entries[key] = {name: tensor.to("cpu", copy=True) for name, tensor in entry.items()}
            self.num_bytes += size


class FeatureSource:
    """Computes what the target says to batches on the target's device, or finds it.

    Args:
        target: the model; its ``features`` or ``features_and_tokens`` does the work.
        layer_ids: the K layers.
        cache_bytes: host memory for documents; 0: no cache.
        label_chunk: find the target's most likely tokens too, with logits of so many positions at once; None: do not.
    """

    def __init__(
        self, target: Target, layer_ids: tuple[int, ...], cache_bytes: int = 0, label_chunk: int | None = None
    ) -> None:
        self.target, self.layer_ids, self.label_chunk = target, layer_ids, label_chunk
        self.cache = FeatureCache(cache_bytes) if cache_bytes > 0 else None

    def __call__(self, batch: Mapping[str, Tensor]) -> dict[str, Tensor]:
        """The tensors, by name, for a batch of CPU tensors. Padding's are zero, or mean nothing.

        Sync: with a cache, on CUDA, waits for what it keeps; otherwise none.
        """
        if self.cache is None:
            return self.compute(batch)
        document_ids = batch["document_ids"]
        lengths = torch.unique_consecutive(document_ids[document_ids >= 0], return_counts=True)[1].tolist()
        documents = batch["tokens"][: sum(lengths)].split(lengths)
        found = [self._find(tokens) for tokens in documents]
        if any(entry is None for entry in found):
            entries = self._compute_missing(batch, lengths, found)
            for tokens, entry in zip(documents, entries, strict=True):
                self.cache.put(tokens, entry)
        else:
            entries = [entry for entry in found if entry is not None]
        row = self._zeros(len(document_ids))
        for name, tensor in row.items():
            for entry, place in zip(entries, tensor[: sum(lengths)].split(lengths), strict=True):
                place.copy_(entry[name])
        return row

    def compute(self, batch: Mapping[str, Tensor]) -> dict[str, Tensor]:
        """The same, whatever the cache holds."""
        names, device = ("tokens", "document_ids", "positions"), self.target.device
        tokens, document_ids, positions = (batch[name].to(device, non_blocking=True) for name in names)
        if self.label_chunk is None:
            return {"features": self.target.features(tokens, document_ids, positions, self.layer_ids)}
        features, target_tokens = self.target.features_and_tokens(
            tokens, document_ids, positions, self.layer_ids, self.label_chunk
        )
        return {"features": features, "target_tokens": target_tokens}

    def _zeros(self, length: int) -> dict[str, Tensor]:
        target, width = self.target, len(self.layer_ids) * self.target.hidden_size
        row = {"features": torch.zeros(length, width, dtype=target.dtype, device=target.device)}
        if self.label_chunk is not None:
            row["target_tokens"] = torch.zeros(length, dtype=torch.int64, device=target.device)
        return row

    def _find(self, tokens: Tensor) -> Mapping[str, Tensor] | None:
        entry = None if self.cache is None else self.cache.get(tokens)
        return entry if self.label_chunk is None or (entry is not None and "target_tokens" in entry) else None

    def _compute_missing(
        self, batch: Mapping[str, Tensor], lengths: list[int], found: list[Mapping[str, Tensor] | None]
    ) -> list[Mapping[str, Tensor]]:
        """All documents' tensors: on CUDA the whole row is computed, on the CPU only the documents not found."""
        if self.target.device.type == "cuda":
            return _by_document(self.compute(batch), lengths)
        missing = torch.tensor([entry is None for entry in found])
        kept = missing.repeat_interleave(torch.tensor(lengths)).nonzero().flatten()
        part = {name: batch[name][kept] for name in ("tokens", "document_ids", "positions")}
        missing_lengths = [n for n, entry in zip(lengths, found, strict=True) if entry is None]
        fresh = iter(_by_document(self.compute(part), missing_lengths))
        return [next(fresh) if entry is None else entry for entry in found]


def _by_document(tensors: Mapping[str, Tensor], lengths: list[int]) -> list[Mapping[str, Tensor]]:
    """Each document's part of a row's tensors; padding is left out."""
    parts = [tensor[: sum(lengths)].split(lengths) for tensor in tensors.values()]
    return [dict(zip(tensors, entry, strict=True)) for entry in zip(*parts, strict=True)]
