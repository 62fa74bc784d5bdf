"""Clusters: machines, their devices, and the links between them.

A cluster is read from TOML with quantities as people write them, or named by a preset:

    config-a        2 machines of 8 V100 16 GB, NVLink inside, 25 Gbit/s between    (DAPPLE, section 6)
    config-b        16 machines of one V100 16 GB, 25 Gbit/s between
    config-c        16 machines of one V100 16 GB, 10 Gbit/s between
    config-a:4x8    the same with 4 machines of 8
    h100:4x8        4 machines of 8 H100, NVLink inside, InfiniBand between; see docs/presets.md

Devices are numbered machine by machine, from 0.
"""

from __future__ import annotations

import json
import re
import tomllib
from typing import Annotated, Any, Literal

from pydantic import (
    AfterValidator,
    BaseModel,
    BeforeValidator,
    ConfigDict,
    Field,
    ValidationError,
    model_validator,
)

from dapple.errors import DappleError, FileError, InputError
from dapple.files import describe_validation, read_text
from dapple.presets import CLUSTERS, DEVICES, ClusterFigures
from dapple.units import check_not_tiny, parse_bandwidth, parse_bytes, parse_flops, parse_seconds

NETWORK_MODELS = ("shared", "paper")


def _quantity(parse: Any) -> BeforeValidator:
    def read(value: Any) -> Any:
        if not isinstance(value, (str, int, float)) or isinstance(value, bool):
            raise ValueError("expected a quantity, such as a number with a unit")
        try:
            return parse(value)
        except DappleError as error:
            raise ValueError(str(error)) from error

    return BeforeValidator(read)


# Beyond these limits (1 EiB, 30 years, a byte in a quarter of an hour, 10^30 in a second) a number is a
# slip, and sums would overflow.
ByteCount = Annotated[int, _quantity(parse_bytes), Field(gt=0, le=2**60)]
BytesPerSecond = Annotated[float, _quantity(parse_bandwidth), Field(ge=1e-3, le=1e30)]
FlopsPerSecond = Annotated[float, _quantity(parse_flops), Field(ge=1e-3, le=1e30)]
SecondsValue = Annotated[
    float, _quantity(parse_seconds), Field(ge=0, le=1e9), AfterValidator(check_not_tiny)
]


class _Frozen(BaseModel):
    model_config = ConfigDict(frozen=True, extra="forbid", allow_inf_nan=False)


class DeviceKind(_Frozen):
    """A kind of device.

    Attributes:
        memory: bytes that a training process may use.
        flops: peak operations per second at the training precision; None: unknown.
        memory_bandwidth: bytes per second of its memory; None: unknown.
        speed: compute speed relative to the device that the profile was taken on.
        source: where the figures come from.
    """

    name: str
    memory: ByteCount
    flops: FlopsPerSecond | None = None
    memory_bandwidth: BytesPerSecond | None = None
    speed: Annotated[float, Field(ge=1e-9, le=1e9)] = 1.0
    source: str = ""


class Link(_Frozen):
    """A link between devices of one machine, or between machines.

    Attributes:
        bandwidth: bytes per second in one direction. Between machines it is the network card's,
            shared by the machine's devices under the "shared" model.
        latency: seconds before the first byte arrives.
        flow_bandwidth: bytes per second that a single flow reaches; None: the bandwidth. The
            "paper" model gives each flow this much and shares nothing.
        allreduce_bandwidth: bytes per second in the ring formula 2 (n-1)/n bytes / bandwidth;
            None: the bandwidth.
    """

    bandwidth: BytesPerSecond
    latency: SecondsValue = 0.0
    flow_bandwidth: BytesPerSecond | None = None
    allreduce_bandwidth: BytesPerSecond | None = None


class Machines(_Frozen):
    """`count` equal machines with `devices` devices each.

    Attributes:
        inside: the link between two devices of the machine.
        outside: the machine's network card; may be missing when there is one machine only.
    """

    count: Annotated[int, Field(ge=1)] = 1
    devices: Annotated[int, Field(ge=1)]
    kind: DeviceKind
    inside: Link
    outside: Link | None = None


class Cluster(_Frozen):
    """Machines in order; devices are numbered through them from 0.

    Attributes:
        machines: groups of equal machines.
        network_model: "shared" (latency, bandwidth, cards shared by a machine's devices) or
            "paper" (a fixed bandwidth per flow, nothing shared).
        source: where the figures come from.
    """

    format: Literal["dapple-cluster"] = "dapple-cluster"
    version: Literal[1] = 1
    name: str
    machines: tuple[Machines, ...] = Field(min_length=1)
    network_model: Literal["shared", "paper"] = "shared"
    source: str = ""

    @model_validator(mode="after")
    def _reachable(self) -> Cluster:
        if self.num_machines > 1 and any(group.outside is None for group in self.machines):
            raise ValueError("a cluster of several machines needs `outside` links on each")
        return self

    @property
    def num_machines(self) -> int:
        """Number of machines."""
        return sum(group.count for group in self.machines)

    @property
    def num_devices(self) -> int:
        """Number of devices."""
        return sum(group.count * group.devices for group in self.machines)

    def machine_sizes(self) -> tuple[int, ...]:
        """Devices of each machine, in order."""
        return tuple(g.devices for g in self.machines for _ in range(g.count))

    def machine_groups(self) -> tuple[Machines, ...]:
        """The group of each machine, in order."""
        return tuple(g for g in self.machines for _ in range(g.count))

    def machine_of_device(self) -> tuple[int, ...]:
        """Machine number of each device, in order."""
        return tuple(m for m, size in enumerate(self.machine_sizes()) for _ in range(size))

    def kind_of_device(self) -> tuple[DeviceKind, ...]:
        """Kind of each device, in order."""
        return tuple(g.kind for g in self.machines for _ in range(g.count * g.devices))

    def with_memory(self, memory: int | str) -> Cluster:
        """The same cluster with another memory on every device, such as "110 MiB"."""
        size = parse_bytes(memory, "memory")
        groups = tuple(
            g.model_copy(update={"kind": g.kind.model_copy(update={"memory": size})})
            for g in self.machines
        )
        return self.model_copy(update={"machines": groups})

    def to_toml(self) -> str:
        """The cluster as TOML, base units throughout."""
        lines = [f'format = "{self.format}"', f"version = {self.version}"]
        lines += [f"name = {_toml_string(self.name)}", f'network_model = "{self.network_model}"']
        lines += [f"source = {_toml_string(self.source)}"]
        for group in self.machines:
            lines += ["", "[[machines]]", f"count = {group.count}", f"devices = {group.devices}"]
            for part in ("kind", "inside", "outside"):
                value = getattr(group, part)
                if value is not None:
                    lines += [f"[machines.{part}]", *_toml_fields(value)]
        return "\n".join(lines) + "\n"


def _toml_fields(value: BaseModel) -> list[str]:
    fields = value.model_dump(exclude_none=True)
    return [
        f"{k} = {_toml_string(v) if isinstance(v, str) else repr(v)}" for k, v in fields.items()
    ]


def _toml_string(text: str) -> str:
    # What JSON escapes, TOML's basic strings escape in the same way; of the rest they bar DEL.
    return json.dumps(text, ensure_ascii=False).replace("\x7f", "\\u007f")


def device_kind(name: str, dtype: str | None = None) -> DeviceKind:
    """A kind of device by its name, such as "a100-80gb".

    Args:
        name: one of `dapple.presets.DEVICES`.
        dtype: whose peak speed is wanted, such as "float32"; None: what it is usually trained in.

    Raises:
        InputError: no such device, or no figure for this type.
    """
    figures = DEVICES.get(name)
    if figures is None:
        raise InputError(f'device "{name}" is unknown; known: {", ".join(DEVICES)}')
    flops = figures.flops.get(dtype or figures.training_dtype)
    if flops is None:
        known = ", ".join(figures.flops)
        raise InputError(f'no peak speed of {name} is known for "{dtype}"; known: {known}')
    return DeviceKind(
        name=name,
        memory=figures.memory,
        flops=flops,
        memory_bandwidth=figures.memory_bandwidth,
        source=figures.source,
    )


def preset(name: str) -> Cluster:
    """A cluster by its preset name, such as "config-a" or "config-a:4x8".

    Raises:
        InputError: no such preset, or counts that are not MACHINESxDEVICES.
    """
    base, _, counts = name.partition(":")
    figures = CLUSTERS.get(base)
    if figures is None:
        raise InputError(
            f'"{name}" is neither a cluster file nor a preset; presets: local, {", ".join(CLUSTERS)}'
        )
    count, devices = figures.machines, figures.devices
    if counts:
        match = re.fullmatch(r"([1-9]\d{0,5})x([1-9]\d{0,5})", counts)
        if not match:
            raise InputError(f'"{name}": write counts as MACHINESxDEVICES, such as {base}:4x8')
        count, devices = int(match[1]), int(match[2])
    group = Machines(
        count=count,
        devices=devices,
        kind=device_kind(figures.device),
        inside=Link(**figures.inside._asdict()),
        outside=_outside(figures, devices),
    )
    return Cluster(name=name, machines=(group,), source=figures.source)


def _outside(figures: ClusterFigures, devices: int) -> Link:
    card = figures.outside
    if not figures.card_per_device:
        return Link(**card._asdict())
    total = card.bandwidth * devices
    flow = min(card.flow_bandwidth or card.bandwidth, total)
    return Link(bandwidth=total, latency=card.latency, flow_bandwidth=flow)


def parse_cluster(text: str, where: str) -> Cluster:
    """Read a cluster from TOML text.

    Raises:
        FileError: names `where`, the field, the value and what was expected.
    """
    try:
        return Cluster.model_validate(tomllib.loads(text))
    except tomllib.TOMLDecodeError as error:
        raise FileError(f"{where} is not TOML: {error}") from error
    except ValidationError as error:
        raise FileError(f"{where}: {describe_validation(error)}") from error


def load_cluster(name_or_path: str) -> Cluster:
    """Read a cluster file, or take a preset by its name.

    Raises:
        InputError: neither a readable cluster file nor a preset.
    """
    if name_or_path.endswith(".toml") or "/" in name_or_path:
        return parse_cluster(read_text(name_or_path), name_or_path)
    return preset(name_or_path)
