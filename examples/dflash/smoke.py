"""``smoke``: some training steps at full shape with random weights and features, to see that they fit and stay flat.

No target is loaded and no data is read: what is tried is the drafter's step, which needs the most memory.
"""

from __future__ import annotations

import gc
import time

import torch

import graphsafe

from .batches import batch_specs
from .config import Config, InputError
from .drafter import Drafter
from .plan import GIB, describe_needs, drafter_config, drafter_needs, read_shape, topology
from .replicas import Replica
from .step import COMPUTE_DTYPES, NUM_WARMUP_STEPS, DrafterStep, target_specs

NUM_WARM_STEPS = NUM_WARMUP_STEPS + 3  # and the capture
NUM_STEPS = 10
DOCUMENT_TOKENS = 512
GROWTH = 0.01  # of the peak: as much is no leak


def random_batch(config: Config, vocab_size: int, generator: torch.Generator) -> dict[str, torch.Tensor]:
    """A full row of documents of random tokens, anchors spread evenly over it."""
    tokens = config.token_budget
    places = torch.arange(tokens)
    return {
        "tokens": torch.randint(0, vocab_size, (tokens,), generator=generator),
        "document_ids": places // DOCUMENT_TOKENS,
        "positions": places % DOCUMENT_TOKENS,
        "loss_mask": torch.ones(tokens, dtype=torch.bool),
        "anchors": torch.linspace(1, tokens - 2, config.num_anchors).long(),
        "anchor_valid": torch.ones(config.num_anchors, dtype=torch.bool),
    }


def smoke(config: Config) -> int:
    """The command. Returns its exit code: 1 where memory still grows after the warm-up, or a loss is not finite."""
    devices = topology(config)
    shape, _ = read_shape(config)
    drafter, device = drafter_config(config, shape), devices.drafters[0]
    dtype, generator = COMPUTE_DTYPES[config.dtype], torch.Generator().manual_seed(config.seed)
    width = len(drafter.target_layer_ids) * drafter.hidden_size
    try:
        with graphsafe.thread_context(device, seed=config.seed, name="smoke") as context:
            head = (0.02 * torch.randn(shape.vocab_size, shape.hidden_size, generator=generator)).to(device, dtype)
            model = Drafter(drafter, seed=config.seed, gradient_checkpointing=config.gradient_checkpointing).to(device)
            step = DrafterStep(model, head, head, config, NUM_WARM_STEPS + NUM_STEPS, Replica(0, 1, device, None))
            slot = graphsafe.StaticBuffers({**batch_specs(config), **target_specs(config, drafter)}, device)
            memory, losses = [], []
            for index in range(NUM_WARM_STEPS + NUM_STEPS):
                batch = random_batch(config, shape.vocab_size, generator)
                features = torch.randn(config.token_budget, width, generator=generator).to(dtype)
                if config.labels == "target":
                    batch["target_tokens"] = batch["tokens"].roll(-1)
                slot.load({**batch, "features": features})
                context.synchronize()
                start = time.monotonic()
                measured = step(slot).tolist()
                step_s = time.monotonic() - start
                losses.append(measured[0] / measured[1])
                memory.append(_memory_in_use(device))
                print(f"step {index + 1:2}  loss {losses[-1]:7.4f}  {step_s * 1e3:8.1f} ms  {memory[-1] / GIB:.3f} GiB")
    except torch.OutOfMemoryError as exc:
        needs = describe_needs(device, drafter_needs(config, drafter, devices, 0))
        raise InputError(f"Out of memory: {str(exc).splitlines()[0]}\n{needs}") from exc
    warm, end = max(memory[:NUM_WARM_STEPS]), max(memory)
    grown = end > warm * (1 + GROWTH)
    finite = all(loss == loss and abs(loss) != float("inf") for loss in losses)
    print(f"peak after warm-up {warm / GIB:.3f} GiB, at the end {end / GIB:.3f} GiB: {'GROWS' if grown else 'flat'}")
    if not finite:
        print("a loss is not finite")
    return 0 if finite and not grown else 1


def _memory_in_use(device: torch.device) -> int:
    """Peak bytes allocated on a CUDA device so far; on the CPU, bytes of the tensors alive now."""
    if device.type == "cuda":
        return torch.cuda.max_memory_allocated(device)
    storages = {}
    for item in gc.get_objects():
        if type(item) in (torch.Tensor, torch.nn.Parameter):
            storage = item.untyped_storage()
            storages[storage.data_ptr()] = storage.nbytes()
    return sum(storages.values())
