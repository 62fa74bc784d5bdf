"""Random numbers of a captured model: each layer that draws some is seeded first.

So they depend on the layer and not on what ran before it: another plan, or running a layer again,
draws the same.
"""

from __future__ import annotations

from collections.abc import Callable

SeedLayer = Callable[[int], None]
"""Seeds the generators for a layer, given its number in the model."""


def leave_generators(layer: int) -> None:
    """Seed nothing: the layer goes on with the generators as they are."""


def seed_layer(seed: SeedLayer, layer: int) -> None:
    """Stands in a stage's graph before the first random operator of each layer."""
    seed(layer)
