"""Figures of devices and clusters that have a name, each with where it is published.

Peak figures of data sheets: what is reached is less, and differs by model and by software. Dense
operations throughout; data sheets since the A100 headline twice as many, with sparsity.
"""

from __future__ import annotations

from typing import NamedTuple

_GIB = 2**30


class DeviceFigures(NamedTuple):
    """A kind of device.

    Attributes:
        memory: bytes that a training process finds. The data sheet's "GB" are GiB less what
            driver and context hold: 1 GiB, and 2 of the H200's 141 (the V100 16 GB of the paper's
            clusters is taken as a whole).
        flops: peak operations per second by data type; "float16" and "bfloat16" on tensor cores.
        training_dtype: the type that training usually runs in on this device.
        memory_bandwidth: bytes per second.
        source: where the figures are published.
    """

    memory: int
    flops: dict[str, float]
    training_dtype: str
    memory_bandwidth: float
    source: str


class LinkFigures(NamedTuple):
    """A link, each way. Bytes per second and seconds, as in `dapple.cluster.Link`."""

    bandwidth: float
    latency: float
    flow_bandwidth: float | None = None
    allreduce_bandwidth: float | None = None


class ClusterFigures(NamedTuple):
    """Equal machines.

    Attributes:
        device: name of the devices' kind.
        machines, devices: how many there are unless the name says so.
        inside: between two devices of a machine.
        outside: a machine's network card; with `card_per_device`, that of one of its devices.
        card_per_device: every device brings a card; a machine has their sum, a flow uses one.
        source: where the figures are published.
    """

    device: str
    machines: int
    devices: int
    inside: LinkFigures
    outside: LinkFigures
    card_per_device: bool
    source: str


_HOPPER_FLOPS = {"float32": 66.9e12, "float16": 989.4e12, "bfloat16": 989.4e12}
_AMPERE_FLOPS = {"float32": 19.5e12, "float16": 312e12, "bfloat16": 312e12}
_VOLTA_FLOPS = {"float32": 15.7e12, "float16": 125e12}

DEVICES: dict[str, DeviceFigures] = {
    "v100-16gb": DeviceFigures(
        16 * _GIB, _VOLTA_FLOPS, "float32", 900e9, "NVIDIA V100 data sheet (2020), SXM2"
    ),
    "v100-32gb": DeviceFigures(
        31 * _GIB, _VOLTA_FLOPS, "float16", 900e9, "NVIDIA V100 data sheet (2020), SXM2"
    ),
    "a100-40gb": DeviceFigures(
        39 * _GIB, _AMPERE_FLOPS, "bfloat16", 1555e9, "NVIDIA A100 data sheet (2021), SXM"
    ),
    "a100-80gb": DeviceFigures(
        79 * _GIB, _AMPERE_FLOPS, "bfloat16", 2039e9, "NVIDIA A100 data sheet (2021), SXM"
    ),
    "h100": DeviceFigures(
        79 * _GIB, _HOPPER_FLOPS, "bfloat16", 3350e9, "NVIDIA H100 data sheet (2023), SXM"
    ),
    "h200": DeviceFigures(
        139 * _GIB, _HOPPER_FLOPS, "bfloat16", 4800e9, "NVIDIA H200 data sheet (2024), SXM"
    ),
}

# Effective bandwidths behind the paper's numbers (HPGO, the authors' planner): NVLink 130 GB/s
# among 8 devices and 40 GB/s per pair; 0.8 GB/s per flow and 3.0 GB/s AllReduce at 25 Gbit/s,
# 0.32 and 1.2 GB/s at 10 Gbit/s. Latencies are ours throughout, of the usual size: a peer copy over
# NVLink, TCP between machines, RDMA over InfiniBand.
_PAPER_NVLINK = LinkFigures(40e9, 5e-6, 40e9, 130e9)
_ETHERNET_25 = LinkFigures(25e9 / 8, 30e-6, 0.8e9, 3.0e9)
_ETHERNET_10 = LinkFigures(10e9 / 8, 30e-6, 0.32e9, 1.2e9)
_PAPER = "DAPPLE (PPoPP 2021), section 6"

# NVLink figures of data sheets count both directions; a link here is one.
_NVLINK_3, _NVLINK_4 = LinkFigures(600e9 / 2, 5e-6), LinkFigures(900e9 / 2, 5e-6)
_HDR, _NDR = LinkFigures(200e9 / 8, 10e-6), LinkFigures(400e9 / 8, 10e-6)
_DGX_A100 = "DGX A100 data sheet: NVLink 600 GB/s per GPU, 8 InfiniBand cards of 200 Gbit/s"
_DGX_H100 = "DGX H100 data sheet: NVLink 900 GB/s per GPU, 8 InfiniBand cards of 400 Gbit/s"
_DGX_H200 = "DGX H200 data sheet: NVLink 900 GB/s per GPU, 8 InfiniBand cards of 400 Gbit/s"
# Of the DGX-1's cube mesh a pair has one or two links of 25 GB/s, a ring uses all six; it has four
# cards for eight devices, so each device brings half of one.
_NVLINK_2 = LinkFigures(25e9, 5e-6, 25e9, 150e9)
_HALF_EDR = LinkFigures(100e9 / 8 / 2, 10e-6, 100e9 / 8)
_DGX_1 = "DGX-1 data sheet: NVLink 300 GB/s per V100, 4 InfiniBand cards of 100 Gbit/s"

CLUSTERS: dict[str, ClusterFigures] = {
    "config-a": ClusterFigures("v100-16gb", 2, 8, _PAPER_NVLINK, _ETHERNET_25, False, _PAPER),
    "config-b": ClusterFigures("v100-16gb", 16, 1, _PAPER_NVLINK, _ETHERNET_25, False, _PAPER),
    "config-c": ClusterFigures("v100-16gb", 16, 1, _PAPER_NVLINK, _ETHERNET_10, False, _PAPER),
    "v100-32gb": ClusterFigures("v100-32gb", 1, 8, _NVLINK_2, _HALF_EDR, True, _DGX_1),
    "a100-40gb": ClusterFigures("a100-40gb", 1, 8, _NVLINK_3, _HDR, True, _DGX_A100),
    "a100-80gb": ClusterFigures("a100-80gb", 1, 8, _NVLINK_3, _HDR, True, _DGX_A100),
    "h100": ClusterFigures("h100", 1, 8, _NVLINK_4, _NDR, True, _DGX_H100),
    "h200": ClusterFigures("h200", 1, 8, _NVLINK_4, _NDR, True, _DGX_H200),
}
