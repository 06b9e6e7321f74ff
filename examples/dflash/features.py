"""What a target says to a packed row, or what a cache holds of it for the row's documents.

Each is a tensor with a name: "features" [T, K*H] and, where they are wanted, "target_tokens" [T] int64 (at p the token
that the target holds most likely to follow the one at p).

Guarantees:
- A cached document's tensors are the ones the target gave, bit for bit; a document is known by its tokens, and a
  target is document-causal, so its neighbours in the row do not matter.
- What the cache does not hold is computed. On CUDA the first batch always is, so that all is compiled at the start,
  however late the first document comes that the cache does not hold: a compile after the warm-up ends a run.
"""

from __future__ import annotations

import warnings
from collections.abc import Mapping
from contextlib import nullcontext

import torch
from torch import Tensor

import graphsafe

from .feature_cache import FeatureCache
from .target import Target


class FeatureSource:
    """Computes what the target says to batches on the target's device, or finds it.

    Args:
        target: the model; its ``features`` or ``features_and_tokens`` does the work.
        layer_ids: the K layers.
        cache: from ``feature_cache.feature_cache``; a document's entry has tensors of the same names.
        label_chunk: find the target's most likely tokens too, with logits of so many positions at once; None: do not.
        graphed: on CUDA, run the target as a CUDA graph, which frees the host; the first calls are eager. The tensors
            returned are then the graph's own, and the next call overwrites them.
        compiled: on CUDA, run the target's layers compiled (``Target.compiled_layers``).
    """

    def __init__(
        self,
        target: Target,
        layer_ids: tuple[int, ...],
        cache: FeatureCache | None = None,
        label_chunk: int | None = None,
        graphed: bool = False,
        compiled: bool = False,
    ) -> None:
        self.target, self.layer_ids, self.cache, self.label_chunk = target, layer_ids, cache, label_chunk
        self._compiled = compiled and target.device.type == "cuda"
        if self._compiled:
            target.compile_layers()
        as_graph = graphed and target.device.type == "cuda"
        self._is_cold = target.device.type == "cuda"  # nothing has been compiled by this thread
        self._graphed = graphsafe.graphed(self._read, outputs="alias") if as_graph else None

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
        if self._is_cold or any(entry is None for entry in found):
            entries = self._compute_missing(batch, lengths, found)
            for tokens, entry, former in zip(documents, entries, found, strict=True):
                if former is None:
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
        self._is_cold = False
        names, device = ("tokens", "document_ids", "positions"), self.target.device
        row = tuple(batch[name].to(device, non_blocking=True) for name in names)
        if self._graphed is not None:
            try:
                read: dict[str, Tensor] = self._graphed(*row)
                return read
            except graphsafe.CaptureError as exc:  # before anything has run
                self._graphed = None
                warnings.warn(f"The target runs without a CUDA graph, which is slower: {exc}", stacklevel=2)
        return self._read(*row)

    def _read(self, tokens: Tensor, document_ids: Tensor, positions: Tensor) -> dict[str, Tensor]:
        with self.target.compiled_layers() if self._compiled else nullcontext():
            return self._ask(tokens, document_ids, positions)

    def _ask(self, tokens: Tensor, document_ids: Tensor, positions: Tensor) -> dict[str, Tensor]:
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
