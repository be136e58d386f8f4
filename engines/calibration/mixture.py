"""Weights of heads while they are trained: always a mixture, and always ready to be saved and gone on with.

They are the softmax of numbers that Adam moves. That keeps them on the simplex at every step with no projection, which
would undo Adam's moments, and a step is a factor on a weight, as in exponentiated gradients, whatever its size. What
softmax cannot give is a zero: a start with zeros is first mixed with a little of all heads, so that each can gain, and
what is next to nothing in the end is dropped.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch

from engines.errors import CalibrationFitError

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

# Weights below it are dropped in the end; all of nine heads together are less than a hundredth.
_DUST = 1e-3
_MEAN, _SQUARE, _LEAST = 0.9, 0.99, 1e-8


class Mixture:
    """Weights [H_S, H_R] of each receiver layer.

    Args:
        start: on the simplex, column by column.
        spread: share of a uniform mixture in the start; with 0 a head that has no weight never gets any.

    Raises:
        CalibrationFitError: a column of the start is no mixture.
    """

    def __init__(self, start: Mapping[int, torch.Tensor], spread: float) -> None:
        self._logits: dict[int, torch.Tensor] = {}
        for layer, weights in start.items():
            if not (bool((weights >= 0).all()) and bool(((weights.sum(dim=0) - 1).abs() < 1e-3).all())):
                raise CalibrationFitError(f"weights of layer {layer} to start with are no mixture of heads")
            uniform = 1 / weights.shape[0]
            self._logits[layer] = ((1 - spread) * weights.float() + spread * uniform).log().requires_grad_()
        self._means, self._squares = (
            {layer: torch.zeros_like(one, requires_grad=False) for layer, one in self._logits.items()} for _ in range(2)
        )
        self.losses: list[float] = []

    @property
    def steps(self) -> int:
        """Made so far."""
        return len(self.losses)

    def weights(self) -> dict[int, torch.Tensor]:
        """float32 [H_S, H_R] of each layer, through which gradients pass."""
        return {layer: logits.softmax(dim=0) for layer, logits in self._logits.items()}

    def sparse(self) -> dict[int, torch.Tensor]:
        """The weights without those that are next to nothing."""
        found = {}
        for layer, weights in self.weights().items():
            kept = weights.detach().where(weights >= _DUST, 0.0)
            found[layer] = kept / kept.sum(dim=0)
        return found

    def step(self, loss: torch.Tensor, learning_rate: float) -> None:
        """Follow the gradient of `loss` (Kingma and Ba 2015, algorithm 1).

        Raises:
            CalibrationFitError: the loss or its gradient is no number.
        """
        found: Sequence[torch.Tensor] = torch.autograd.grad(loss, list(self._logits.values()))
        if not all(bool(one.isfinite().all()) for one in (loss, *found)):
            raise CalibrationFitError(f"the loss of step {self.steps + 1} or its gradient is no number")
        self.losses.append(float(loss.detach()))
        by_mean, by_square = (1 - decay**self.steps for decay in (_MEAN, _SQUARE))
        for (layer, logits), slope in zip(self._logits.items(), found, strict=True):
            mean = self._means[layer].lerp_(slope, 1 - _MEAN)
            square = self._squares[layer].lerp_(slope.square(), 1 - _SQUARE)
            with torch.no_grad():
                logits.sub_(learning_rate * (mean / by_mean) / ((square / by_square).sqrt() + _LEAST))

    def state(self) -> dict[str, torch.Tensor]:
        """All that is needed to go on: `logits.3`, `mean.3` and `square.3` of layer 3, and all `losses`."""
        named = (("logits", self._logits), ("mean", self._means), ("square", self._squares))
        found = {f"{name}.{layer}": one.detach().clone() for name, all_ in named for layer, one in all_.items()}
        return found | {"losses": torch.tensor(self.losses, dtype=torch.float64)}

    def load(self, state: Mapping[str, torch.Tensor]) -> None:
        """Go on from a state.

        Raises:
            CalibrationFitError: it is of other layers or heads.
        """
        mine = self.state()
        if mine.keys() != state.keys() or any(
            mine[name].shape != one.shape for name, one in state.items() if name != "losses"
        ):
            raise CalibrationFitError("the state to go on from is of other layers or heads; start anew")
        with torch.no_grad():
            for name, mean in (("logits", self._logits), ("mean", self._means), ("square", self._squares)):
                for layer, one in mean.items():
                    one.copy_(state[f"{name}.{layer}"])
        self.losses = state["losses"].tolist()
