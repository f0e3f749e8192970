"""Weights for models whose numbers do not matter, made fast."""

from __future__ import annotations

import torch

BLOCK = 1 << 24
"""Random numbers that all weights are copied from: drawing 16 billion would take minutes."""


def fill(model: torch.nn.Module, weights: dict[str, torch.Tensor]) -> None:
    """Gives parameters without memory (device "meta") the tensors of `weights`.

    What is missing there is made, from one random block, and added.
    """
    block = None
    filled: dict[int, torch.nn.Parameter] = {}
    for prefix, module in model.named_modules():
        for name, parameter in list(module.named_parameters(recurse=False)):
            if parameter.device.type != "meta":
                continue
            # What is tied stays one parameter.
            if id(parameter) not in filled:
                key = f"{prefix}.{name}"
                if key not in weights:
                    block = random_block() if block is None else block
                    weights[key] = made_of(block, parameter)
                # A parameter of its own: one that is moved as a whole changes in place.
                filled[id(parameter)] = torch.nn.Parameter(weights[key], requires_grad=False)
            module.register_parameter(name, filled[id(parameter)])


def random_block() -> torch.Tensor:
    """bf16 [BLOCK], normal, of a usual weight's size."""
    generator = torch.Generator().manual_seed(0)
    return (torch.randn(BLOCK, generator=generator) * 0.02).to(torch.bfloat16)


def made_of(block: torch.Tensor, like: torch.Tensor) -> torch.Tensor:
    """A tensor of the same shape and type with memory of its own, repeating the block."""
    values = torch.empty(like.shape, dtype=like.dtype)
    for part in values.view(-1).split(BLOCK):
        part.copy_(block[: part.numel()])
    return values
