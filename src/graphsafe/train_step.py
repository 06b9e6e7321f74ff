"""TrainStep: forward, backward, clipping and optimizer step as one graph.

Guarantees:
- Bit-identical to the eager loop with the same optimizer configuration, which ``mode="eager"`` runs.
- No batch is trained twice and none is skipped: the first calls of a signature are real eager steps, the capturing
  call records and replays once, and a capture that fails has trained nothing.
- Never replays onto memory that is no longer the captured tensor's: what a module, the optimizer or a parameter holds
  is compared with what was captured before every replay.
- On CUDA a replay runs no Python of the user's. On the CPU it runs ``loss_fn`` again, on the static inputs.
"""

from __future__ import annotations

from collections.abc import Callable
from contextlib import suppress
from typing import Any, Literal

import torch

from . import gate, walk
from .capture import capture_with_retries, checked_on_cpu
from .compile_gate import CompileInCapture
from .context import ThreadContext, active_contexts
from .draws import Draws
from .errors import GraphsafeError, NoContextError, ShapeMismatchError
from .failures import warn
from .graph import Graph
from .leaf_owners import AnothersStream, claimed, claimed_if_shared
from .loop import Kind, Loop
from .memory import Memory, refuse_rebound
from .optimizers import OptimizerControl
from .repairs import private, rng_positions
from .signature import Call, StaticInputs, copied, differs, read_call
from .step_plans import Captured, FastStep, StepPlan, Tensors, check_arguments, check_warmup, note_stale
from .streams import on_own_stream


class TrainStep:
    """One training step as an object: ``out = step(*batch)``.

    Runs ``loss = loss_fn(*batch); (loss / accumulate).backward()`` and, every ``accumulate``-th call, clips, steps the
    optimizer and zeroes the gradients.

    Args:
        loss_fn: returns a scalar loss, or ``(loss, aux)`` with any pytree of tensors.
        optimizer: its parameters on one device; its learning rate stays a Python number that schedulers may change.
        model: the module that ``loss_fn`` trains, where ``loss_fn`` does not reach it itself.
        mode: "graph", or "eager" for the same loop without capture.
        max_grad_norm: clip the gradients' total norm to this.
        accumulate: micro-batches a step.
        scaler: a ``torch.amp.GradScaler``.
        num_warmup_iters: eager calls of a signature before it is captured.
        max_graphs: signatures that are captured; further ones run eagerly, with one warning.
        on_mismatch: what a signature unlike the first gets: "capture" (a graph of its own), "eager", or "error".
        outputs: "copy", or "alias": the static outputs themselves, which the next replay overwrites.
        set_to_none: as in ``optimizer.zero_grad``.

    Raises:
        GraphsafeError: an argument is unusable, or the optimizer cannot be captured (its name and those that can).

    A batch's tensors lie on the optimizer's device; those of a StaticBuffers or a BufferRing slot are read in place.

    Thread safety: one thread, inside a ``thread_context`` of the device. Sync: none after the capture.
    """

    def __init__(
        self,
        loss_fn: Callable[..., Any],
        optimizer: torch.optim.Optimizer,
        *,
        model: torch.nn.Module | None = None,
        mode: Literal["graph", "eager"] = "graph",
        max_grad_norm: float | None = None,
        accumulate: int = 1,
        scaler: torch.amp.GradScaler | None = None,
        num_warmup_iters: int = 3,
        max_graphs: int = 4,
        on_mismatch: Literal["capture", "eager", "error"] = "capture",
        outputs: Literal["copy", "alias"] = "copy",
        set_to_none: bool = True,
    ) -> None:
        check_arguments(
            loss_fn,
            optimizer,
            mode=mode,
            max_grad_norm=max_grad_norm,
            accumulate=accumulate,
            num_warmup_iters=num_warmup_iters,
            max_graphs=max_graphs,
            on_mismatch=on_mismatch,
            outputs=outputs,
            scaler=scaler,
            set_to_none=set_to_none,
        )
        self._optimizer, self._mode = optimizer, mode
        self._num_warmup_iters, self._max_graphs = num_warmup_iters, max_graphs
        self._on_mismatch, self._outputs, self._set_to_none = on_mismatch, outputs, set_to_none
        self._control = OptimizerControl(optimizer, scaled=scaler is not None, strict=mode == "graph")
        self._device = self._control.device
        self._loop = Loop(loss_fn, self._control, max_grad_norm, accumulate, scaler, set_to_none)
        self._roots = (loss_fn, model, optimizer, scaler)  # what a graph keeps alive
        self._reach = (loss_fn, model, optimizer)
        self._modules = walk.modules(loss_fn, model)
        check_warmup(self._modules, mode, num_warmup_iters)
        self._context: ThreadContext | None = None
        self._plans: dict[object, StepPlan] = {}
        self._position = self._num_steps = 0  # micro-batches of the unfinished accumulation; steps
        self._draws = Draws(loss_fn, model)
        self._trained = [p.requires_grad for p in self._control.parameters]
        self._warned, self._stale = False, 0
        self._fast: FastStep | None = None
        self._pending_rng: torch.Tensor | None = None

    # the call

    def __call__(self, *batch: Any) -> Any:
        """Train on one batch. Returns what ``loss_fn`` returned, detached and unscaled.

        Raises:
            NoContextError: this thread has no context on the device.
            ShapeMismatchError: another signature than the first, under ``on_mismatch="error"``; or an input on another
                device. Nothing was trained.
            CaptureError: the step cannot be captured; nothing was trained by this call.
            GraphsafeError: a hyper-parameter other than the learning rate has changed since the capture.
        """
        fast = self._fast
        if fast is not None and self._pending_rng is None:
            tensors = fast.tensors(batch)
            if tensors is not None:
                fast.captured.inputs.load_tensors(tensors, fast.grad_mode)
                return self._replay_graph(fast.captured, "whole", ())
        context = self._bind()
        return on_own_stream(context, lambda: self._call(context, batch))

    def _call(self, context: ThreadContext, batch: tuple[Any, ...]) -> Any:
        kind = self._loop.kind(self._position)
        if gate.capturing() is not None:  # nested in an outer capture: part of its graph
            return self._advance(kind, self._loop.run(batch, kind))
        call = read_call(batch, self._device, self._modules)
        if self._mode == "graph" and any(tensor.requires_grad for tensor in call.tensors):
            raise GraphsafeError(
                "A tensor of the batch requires grad. A graph reads its own copy of it, so no gradient would reach the "
                "tensor: detach() it, or reach what is trained through loss_fn, or use mode='eager'."
            )
        trained = [p.requires_grad for p in self._control.parameters]
        if trained != self._trained:  # some were frozen, or are trained again: what is known of any call is out of date
            self._trained = trained
            self._forget()
        plan = self._plan(call, context)
        if self._mode == "eager" or not plan.admitted:
            return self._eager(context, plan, call, batch, kind)
        known = plan.captured.get((kind, call.slots))
        if known is not None:
            if not known.memory.holds():
                self._stale = note_stale(plan, known, self._stale)
                self._forget()
                return self._eager(context, plan, call, batch, kind)
            self._control.check_settings(known.settings)
            if self._loop.gradients_ready(kind) and self._loop.only(known.present):
                if kind == "whole" and self._set_to_none and known.graph is not None:
                    self._fast = FastStep(context, self._control, known, call, batch)
                return self._replay(context, plan, known, call, kind)
        warm = plan.calls >= self._num_warmup_iters and kind in plan.kinds and self._num_steps > 0
        if known is not None or not warm or not self._loop.gradients_ready(kind):
            return self._eager(context, plan, call, batch, kind)
        plan.draws = self._draws.of(call)
        with claimed(context, self._control.parameters, alone=True) as own, suppress(AnothersStream):
            if own:
                return self._capture(context, plan, call, batch, kind)
        plan.note_guest()
        return self._eager(context, plan, call, batch, kind)

    @property
    def grad_norm(self) -> torch.Tensor | None:
        """Total norm of the last step's gradients before clipping: a tensor [] on the device; None where unclipped."""
        return None if self._loop.norm is None else self._loop.norm.clone()

    def flush(self) -> None:
        """Step on an unfinished accumulation, as at the end of an epoch. Does nothing where there is none."""
        if self._position == 0:
            return
        context = self._bind()
        with context.seat(exclusive=True):
            self._loop.finish()
        self._position = 0
        self._num_steps += 1

    def reset(self) -> None:
        """Drop all graphs; the next calls warm up and capture again."""
        self._forget()
        self._plans.clear()
        self._warned = False

    def _lint_call(self) -> Callable[..., Any]:
        return self._loop.loss_and_backward

    # state

    def state_dict(self) -> dict[str, Any]:
        """Everything but the model's weights: optimizer, scaler, accumulated gradients, counters, RNG. It pickles."""
        generator = self._pending_rng
        if generator is None and self._context is not None:
            generator = self._context.rng_state()
        counters = {"position": self._position, "num_steps": self._num_steps, "generator": generator}
        return self._loop.state_dict(with_gradients=self._position > 0) | counters

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Go on from ``state_dict()``'s value; the model's weights are loaded by the caller.

        Raises:
            GraphsafeError: a part is missing or belongs to another model. Nothing was loaded.
        """
        self._loop.load_state_dict(state)
        self._forget()
        self._position, self._num_steps = int(state["position"]), int(state["num_steps"])
        if state["generator"] is not None:
            self._pending_rng = state["generator"]

    def _bind(self) -> ThreadContext:
        context = next((c for c in active_contexts() if c.device == self._device), None)
        bound = self._context
        if bound is not None and bound is not context and not bound.closed:
            bound.check_thread("A TrainStep of the context")
        if context is None:
            raise NoContextError("TrainStep", str(self._device))
        if context is not bound:
            self.reset()  # the former context's graphs died with it
            self._context = context
        if self._pending_rng is not None:
            context.set_rng_state(self._pending_rng.cpu())
            self._pending_rng = None
        return context

    def _plan(self, call: Call, context: ThreadContext) -> StepPlan:
        plan = self._plans.get(call.key)
        if plan is not None:
            return plan
        admitted = len(self._plans) < self._max_graphs
        if self._plans:
            context.counters.mismatches += 1
            if self._on_mismatch == "error":
                first = next(iter(self._plans.values()))
                raise ShapeMismatchError("TrainStep's batch", first.summary, call.summary())
            admitted = admitted and self._on_mismatch == "capture"
        plan = StepPlan(call.summary(), admitted)
        if admitted:
            self._plans[call.key] = plan
        elif self._on_mismatch == "capture" and not self._warned and self._mode == "graph":
            self._warned = True
            warn(
                f"TrainStep has met more than max_graphs={self._max_graphs} signatures; further ones run eagerly until "
                f"reset(). This batch: {call.summary()}; {differs(call, next(iter(self._plans)))}. Pad to fewer shapes "
                "(graphsafe.padding), pass numbers that vary as tensors, or raise max_graphs."
            )
        return plan

    def _eager(self, context: ThreadContext, plan: StepPlan, call: Call, batch: tuple[Any, ...], kind: Kind) -> Any:
        plan.draws = draws = self._draws.of(call)
        with context.seat(exclusive=draws is not False), claimed_if_shared(context, self._control.parameters):
            before = context.drawn() if draws is None else None
            with rng_positions.tracing_on(context.device) as trace:
                result = self._loop.run(batch, kind)
            plan.traces[kind] = trace
            if draws is None:
                plan.draws = self._draws.note(call, context.drawn() != before)
        if kind == "first" and kind not in plan.kinds:
            plan.first = self._loop.with_gradient()
            dense = all(p.grad is not None and p.grad.layout is torch.strided for p in plan.first)
            plan.admitted = plan.admitted and dense  # sparse ones have no fixed size to accumulate in
        plan.calls += 1
        plan.kinds.add(kind)
        context.counters.eager_steps += 1
        return self._advance(kind, result)

    def _advance(self, kind: Kind, result: Any) -> Any:
        steps = kind in ("whole", "last")
        self._position = 0 if steps else self._position + 1
        self._num_steps += steps
        return result

    def _capture(self, context: ThreadContext, plan: StepPlan, call: Call, batch: tuple[Any, ...], kind: Kind) -> Any:
        self._loop.make_buffers(plan.first)
        inputs = StaticInputs(call)
        inputs.load(call)
        self._control.refresh_lr()
        arguments = call.with_tensors(inputs.tensors)
        if self._device.type == "cpu":
            return self._check_on_cpu(context, plan, call, inputs, arguments, kind)
        gradients = self._loop.gradients(self._modules)
        known_state, undo = set(self._optimizer.state), self._loop.undo(self._modules)
        present = self._loop.with_gradient()
        before, memory = walk.tensors(self._roots), Memory(*self._reach)

        def body() -> Any:
            self._loop.begin(kind, plan.first)
            return self._loop.run(arguments, kind)

        try:
            shared, name, trace = self._outputs == "copy", self._loop.name, plan.traces.get(kind)
            graph, result = capture_with_retries(context, body, undo, shared_pool=shared, name=name, trace=trace)
        except CompileInCapture:
            plan.compiles += 1
            if plan.compiles > 1:
                raise
            return self._eager(context, plan, call, arguments, kind)  # compiles outside the capture, for these inputs
        plan.compiles = 0
        try:
            refuse_rebound(memory)
        except BaseException:
            graph.close()
            undo()
            raise
        stray = self._loop.stray_gradients(gradients, kind)
        if stray or set(self._optimizer.state) != known_state:
            # State or a gradient made inside the capture would be made anew by every replay.
            graph.close()
            undo()
            plan.admitted = not stray  # it would be so again
            return self._eager(context, plan, call, batch, kind)
        captured = plan.captured[kind, call.slots] = self._captured(inputs, graph, result, present)
        graph.keep(before, self._roots, inputs.tensors, gradients, self._control.lr_tensors)
        graph.keep(self._loop.static_gradients, self._loop.norm_buffer)
        return self._replay(context, plan, captured, call, kind, loaded=True)

    def _captured(self, inputs: StaticInputs, graph: Graph | None, result: Any, present: Tensors) -> Captured:
        leaves, spec = private.tree_flatten(result)
        return Captured(inputs, graph, spec, leaves, self._control.settings(), self._memory(), present)

    def _memory(self) -> Memory:
        return Memory(*self._reach, gradients_of=self._loop.gradients_kept(self._modules))

    def _check_on_cpu(
        self, context: ThreadContext, plan: StepPlan, call: Call, inputs: StaticInputs, arguments: Any, kind: Kind
    ) -> Any:
        undo, present = self._loop.undo(self._modules), self._loop.with_gradient()
        memory = Memory(*self._reach)
        try:
            with checked_on_cpu(context):
                self._loop.begin(kind, plan.first)
                result = self._loop.forward_backward(arguments)
            refuse_rebound(memory)
        except BaseException:
            undo()
            raise
        if kind in ("whole", "last"):
            with context.seat(exclusive=plan.draws is not False):
                self._loop.finish()
        captured = plan.captured[kind, call.slots] = self._captured(inputs, None, result, present)
        captured.leaves = copied(captured.leaves)
        return self._advance(kind, self._give_out(captured))

    def _replay(
        self, context: ThreadContext, plan: StepPlan, captured: Captured, call: Call, kind: Kind, loaded: bool = False
    ) -> Any:
        if not loaded:
            captured.inputs.load(call)
        if captured.graph is None:
            return self._replay_on_cpu(context, plan, captured, call, kind)
        return self._replay_graph(captured, kind, plan.first)

    def _replay_graph(self, captured: Captured, kind: Kind, first: tuple[torch.Tensor, ...]) -> Any:
        assert captured.graph is not None
        captured.uses += 1
        self._control.refresh_lr()
        captured.graph.replay()
        self._loop.show_gradients(kind, first)
        if kind in ("whole", "last") and self._loop.norm is not None:
            self._loop.norm = self._loop.norm_buffer
        return self._advance(kind, self._give_out(captured))

    def _replay_on_cpu(self, context: ThreadContext, plan: StepPlan, captured: Captured, call: Call, kind: Kind) -> Any:
        with context.seat(exclusive=plan.draws is not False):
            self._loop.begin(kind, plan.first)
            result = self._loop.run(call.with_tensors(captured.inputs.tensors), kind)
        captured.uses += 1
        if not captured.memory.holds():  # what the run itself has put into a container
            captured.memory = self._memory()
        leaves, captured.spec = private.tree_flatten(result)
        alias = self._outputs == "alias" and len(leaves) == len(captured.leaves)
        with torch.no_grad():
            for index, leaf in enumerate(leaves):
                if alias and isinstance(leaf, torch.Tensor):
                    leaves[index] = captured.leaves[index].copy_(leaf)
        captured.leaves = leaves
        context.counters.replays += 1
        return self._advance(kind, self._give_out(captured))

    def _give_out(self, captured: Captured) -> Any:
        leaves = copied(captured.leaves) if self._outputs == "copy" else captured.leaves
        return private.tree_unflatten(leaves, captured.spec)

    def _forget(self) -> None:
        """Let all graphs go: a parameter or the optimizer's state is no longer the captured one."""
        self._fast = None
        for plan in self._plans.values():
            plan.forget()
        self._draws.forget()
        self._loop.static_gradients = {}
        self._control.prepare()
