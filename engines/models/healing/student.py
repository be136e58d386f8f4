"""The model that is healed: some layers fade out, the others learn through low-rank adapters (LoRA, Hu et al. 2021)."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch
from torch import nn
from torch.nn import functional

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping

    from engines.models.loading import LoadedModel

MATRICES = (
    "self_attn.q_proj",
    "self_attn.k_proj",
    "self_attn.v_proj",
    "self_attn.o_proj",
    "mlp.gate_proj",
    "mlp.up_proj",
    "mlp.down_proj",
)
NORMS = ("input_layernorm", "post_attention_layernorm")


class AdaptedLinear(nn.Module):
    """A frozen matrix W [out, in] and a trained product: y = (W + up · down) x; zero at the start."""

    def __init__(self, linear: nn.Linear, rank: int, generator: torch.Generator) -> None:
        super().__init__()
        self.weight = nn.Parameter(linear.weight.detach(), requires_grad=False)
        rows, columns = self.weight.shape
        # float32 beside a bfloat16 matrix: one step of the optimiser is smaller than bfloat16 resolves.
        self.down = nn.Parameter(torch.randn(rank, columns, generator=generator) / math.sqrt(columns))
        self.up = nn.Parameter(torch.zeros(rows, rank))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """`x` [..., in] to [..., out]."""
        # Norms are trained, and come out, in float32.
        x = x.to(self.weight.dtype)
        small = functional.linear(x, self.down.to(x.dtype))
        return functional.linear(x, self.weight) + functional.linear(small, self.up.to(x.dtype))


class FadingLayer(nn.Module):
    """A layer whose change of the residual stream is scaled by `share`, from 1 (whole) to 0 (gone)."""

    def __init__(self, layer: nn.Module) -> None:
        super().__init__()
        self.layer = layer
        self.share = 1.0

    def forward(self, hidden_states: torch.Tensor, *args: Any, **kwargs: Any) -> torch.Tensor:
        """The residual stream [batch, rows, dim] after the faded layer."""
        if self.share == 0.0:
            return hidden_states
        output: torch.Tensor = self.layer(hidden_states, *args, **kwargs)
        return output if self.share == 1.0 else torch.lerp(hidden_states, output, self.share)


@dataclass(frozen=True)
class Student:
    """A transformers model changed in place: every layer learns, and can fade; numbers are those of the whole model."""

    loaded: LoadedModel
    layers: tuple[FadingLayer, ...]

    def fade(self, shares: Mapping[int, float]) -> None:
        """Set what is left of layers, by number."""
        for index, share in shares.items():
            self.layers[index].share = share

    def trained(self) -> dict[str, nn.Parameter]:
        """All trained parameters by name."""
        return {name: value for name, value in self.loaded.model.named_parameters() if value.requires_grad}

    def adapted(self) -> Iterator[tuple[str, AdaptedLinear]]:
        """Name in the whole model's file, without ".weight", and matrix, of the layers that are not gone."""
        for index, layer in self._there():
            for name in MATRICES:
                yield f"model.layers.{index}.{name}", layer.get_submodule(name)

    def norms(self) -> Iterator[tuple[str, nn.Parameter]]:
        """Name in the whole model's file, and weight, of every norm that is not gone."""
        for index, layer in self._there():
            for name in NORMS:
                yield f"model.layers.{index}.{name}.weight", layer.get_submodule(name).weight
        yield "model.norm.weight", self.loaded.model.model.norm.weight

    def gone(self) -> tuple[int, ...]:
        """The layers that have faded out."""
        return tuple(index for index, layer in enumerate(self.layers) if layer.share == 0.0)

    def _there(self) -> Iterator[tuple[int, Any]]:
        yield from ((index, layer.layer) for index, layer in enumerate(self.layers) if layer.share > 0.0)


def make_student(loaded: LoadedModel, rank: int, seed: int) -> Student:
    """Change `loaded`, in the dtype to train in, into a student that computes the same until it learns or fades."""
    generator = torch.Generator().manual_seed(seed)
    loaded.model.requires_grad_(False)
    for index, layer in enumerate(loaded.layers):
        for name in MATRICES:
            owner, _, attribute = name.partition(".")
            linear = layer.get_submodule(name)
            setattr(layer.get_submodule(owner), attribute, AdaptedLinear(linear, rank, generator))
        for name in NORMS:
            _train_norm(layer.get_submodule(name))
        loaded.layers[index] = FadingLayer(layer)
    _train_norm(loaded.model.model.norm)
    return Student(loaded, tuple(loaded.layers))


def _train_norm(norm: Any) -> None:
    norm.weight = nn.Parameter(norm.weight.detach().float())
