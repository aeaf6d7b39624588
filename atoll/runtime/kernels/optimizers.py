"""Update rules: the arithmetic behind ``Update(rule)``, one class each, found by the name of the rule."""

from __future__ import annotations

from collections.abc import Callable, Mapping

import torch

from atoll.errors import ProgramError
from atoll.policies.optim.spec import OptimizerSpec
from atoll.runtime.state import ParameterStore
from atoll.runtime.worker_state import OptimizerKernel

__all__ = ["OPTIMIZERS", "AdamW", "optimizer"]


class AdamW:
    """AdamW (Loshchilov and Hutter, 2019) by ``torch.optim.AdamW``, fused, on the masters of a store.

    Weight decay applies to parameters of two or more axes (matrices and embeddings), not to biases and norms. State: two
    moments of the masters' dtype. Update on a CPU core: about 0.7 ns an element.
    """

    names = ("exp_avg", "exp_avg_sq")

    def __init__(self, store: ParameterStore, spec: OptimizerSpec) -> None:
        self.store = store
        self.steps = 0
        decayed = [leaf for leaf in store.masters.values() if leaf.ndim >= 2]
        plain = [leaf for leaf in store.masters.values() if leaf.ndim < 2]
        groups = [{"params": leaves, "weight_decay": decay}
                  for leaves, decay in ((decayed, spec.weight_decay), (plain, 0.0)) if leaves]
        self.inner = torch.optim.AdamW(groups, lr=spec.learning_rate, betas=spec.betas, eps=spec.epsilon,
                                       fused=True) if groups else None

    def update(self, learning_rate: float) -> None:
        self.steps += 1
        if self.inner is None:
            return
        for group in self.inner.param_groups:
            group["lr"] = learning_rate
        self.inner.step()

    def moments(self) -> dict[str, dict[str, torch.Tensor]]:
        """Per logical name "exp_avg" and "exp_avg_sq" (zeros before the first update)."""
        if self.inner is None:
            return {}
        return {name: {key: self._state(leaf)[key] for key in self.names} for name, leaf in self.store.masters.items()}

    def load(self, moments: Mapping[str, Mapping[str, torch.Tensor]], steps: int) -> None:
        """Raises ``ProgramError`` when a name or a moment is missing or has another shape."""
        for name, leaf in self.store.masters.items():
            state = self._state(leaf)
            for key in self.names:
                value = moments.get(name, {}).get(key)
                if value is None or value.shape != leaf.shape:
                    found = "nothing" if value is None else f"shape {tuple(value.shape)}"
                    raise ProgramError(f"optimizer state {key} of {name!r}: expected shape {tuple(leaf.shape)}, found {found}")
                state[key].copy_(value)
            state["step"].fill_(float(steps))
        self.steps = steps

    def _state(self, leaf: torch.nn.Parameter) -> dict[str, torch.Tensor]:
        assert self.inner is not None
        state: dict[str, torch.Tensor] = self.inner.state[leaf]
        if not state:
            state["step"] = torch.zeros((), dtype=torch.float32, device=leaf.device)
            for key in self.names:
                state[key] = torch.zeros_like(leaf, memory_format=torch.preserve_format, requires_grad=False)
        return state


OPTIMIZERS: Mapping[str, Callable[[ParameterStore, OptimizerSpec], OptimizerKernel]] = {"adamw": AdamW}


def optimizer(store: ParameterStore, spec: OptimizerSpec) -> OptimizerKernel:
    """The kernel of ``spec.rule`` over ``store``. Raises ``ProgramError`` on an unknown rule."""
    if spec.rule not in OPTIMIZERS:
        raise ProgramError(f"optimizer.rule: found {spec.rule!r}, allowed: {', '.join(OPTIMIZERS)}")
    return OPTIMIZERS[spec.rule](store, spec)
