"""Seconds of an operator on a device from its operations and bytes: a roofline.

    seconds = launch + max(operations / (peak * efficiency * fill), bytes / (bandwidth * efficiency))

`fill` is the small-batch floor: a product of matrices is computed in tiles, a device has so many
processors, and the last wave of tiles takes as long as a full one.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

from dapple.cluster import device_kind
from dapple.errors import InputError
from dapple.presets import DEVICES

_TILE, _NARROW_TILE = 64, 32
"""Rows and columns of the results that a kernel computes together, and of those for few rows."""
_SPLIT = 256
"""A product with few tiles is also split along the summed dimension, in pieces of at least this."""

_PROCESSORS = {"v100": 80, "a100": 108, "h100": 132, "h200": 132}


@dataclass(frozen=True)
class Efficiencies:
    """Fractions of the data sheet's peaks that operators reach, our estimates (docs/zoo.md).

    Attributes:
        product: of the peak operations, a product of large matrices.
        convolution: the same for a convolution, counted by its definition.
        winograd: for one of 3 x 3 with stride 1: Winograd's algorithm multiplies up to four times
            less, so that it may exceed 1.
        bandwidth: of the memory's bandwidth.
        launch_seconds: start of any kernel, s.
    """

    product: float
    convolution: float
    winograd: float
    bandwidth: float = 0.8
    launch_seconds: float = 5e-6


# Single precision units are kept busy by any large product; tensor cores wait for memory.
_SINGLE = Efficiencies(product=0.62, convolution=0.6, winograd=1.9)
_TENSOR_CORES = Efficiencies(product=0.5, convolution=0.35, winograd=0.35)


class Roofline:
    """What operators take on a kind of device.

    Args:
        device: a name of `dapple.presets.DEVICES`.
        dtype: the type that it computes in; None: what the device is usually trained in.

    Attributes:
        dtype: the type, such as "float32".

    Raises:
        InputError: no such device, or no figure for the type.
    """

    def __init__(self, device: str, dtype: str | None = None) -> None:
        kind = device_kind(device, dtype)
        family = device.split("-")[0]
        if family not in _PROCESSORS or kind.flops is None or kind.memory_bandwidth is None:
            raise InputError(
                f'no analytic model of "{device}"; known are those of {", ".join(_PROCESSORS)}'
            )
        self.dtype = dtype or DEVICES[device].training_dtype
        self.efficiencies = _SINGLE if self.dtype == "float32" else _TENSOR_CORES
        self._peak = kind.flops
        self._bandwidth = kind.memory_bandwidth * self.efficiencies.bandwidth
        self._processors = _PROCESSORS[family]

    def memory(self, count: float) -> float:
        """Seconds of an operator that moves `count` bytes and computes next to nothing."""
        return self.efficiencies.launch_seconds + count / self._bandwidth

    def product(self, m: int, n: int, k: int, moved: float, batch: int = 1) -> float:
        """Seconds of [m, k] x [k, n], `batch` times, with `moved` bytes in all."""
        return self._compute(m, n, k, batch, moved, self.efficiencies.product)

    def convolution(self, m: int, n: int, k: int, moved: float, winograd: bool) -> float:
        """Seconds of a convolution as a product: m pixels, n channels, sums of k."""
        speed = self.efficiencies.winograd if winograd else self.efficiencies.convolution
        return self._compute(m, n, k, 1, moved, speed)

    def _compute(
        self, m: int, n: int, k: int, batch: int, moved: float, efficiency: float
    ) -> float:
        operations = 2.0 * m * n * k * batch
        speed = self._peak * efficiency * self._fill(m, n, k, batch)
        return self.efficiencies.launch_seconds + max(operations / speed, moved / self._bandwidth)

    def _fill(self, m: int, n: int, k: int, batch: int) -> float:
        """Part of the processors' time in which they compute what is wanted."""
        high, wide = _tiles(m), _tiles(n)
        tiles = math.ceil(m / high) * math.ceil(n / wide) * batch
        used = m * n * batch / (tiles * high * wide)
        if tiles < self._processors:
            tiles *= max(1, min(self._processors // tiles, k // _SPLIT))
        full = math.ceil(tiles / self._processors) * self._processors
        return used * tiles / full


def _tiles(size: int) -> int:
    return _NARROW_TILE if size <= _NARROW_TILE else _TILE
