"""Quantities as people write them: bytes, bytes per second, seconds, operations per second.

Prefixes k, M, G, T are powers of 1000; Ki, Mi, Gi, Ti are powers of 1024. "bit" is an eighth of a
byte. A plain number is taken in the base unit.
"""

from __future__ import annotations

import re

from dapple.errors import UnitError

_PREFIXES = {"": 1, "k": 1e3, "K": 1e3, "M": 1e6, "G": 1e9, "T": 1e12, "P": 1e15}
_PREFIXES |= {"Ki": 2**10, "Mi": 2**20, "Gi": 2**30, "Ti": 2**40}
# Per second, to divide by: 30 / 1e6 is the number nearest to 30 us, 30 * 1e-6 is not.
_PER_SECOND = {"": 1.0, "s": 1.0, "ms": 1e3, "us": 1e6, "µs": 1e6, "ns": 1e9}
_NUMBER = re.compile(r"\s*([0-9.]+(?:[eE][+-]?[0-9]+)?)\s*(\S*)\s*")
_MOST_BYTES = 2.0**60
_LEAST = 1e-30


def parse_bytes(value: str | float, what: str = "size") -> int:
    """Read a size such as "16 GiB" or "110 MB" into bytes.

    >>> parse_bytes("16 GiB")
    17179869184
    """
    number, unit = _split(value, what, "16 GiB")
    size = number * _scale(unit, {"B": 1.0, "bit": 0.125, "": 1.0}, value, what, "16 GiB")
    if size >= _MOST_BYTES:
        raise UnitError(f"{what} {value} is more than {format_bytes(_MOST_BYTES)}; check the unit")
    return round(size)


def parse_bandwidth(value: str | float, what: str = "bandwidth") -> float:
    """Read a bandwidth such as "25 Gbit/s" into bytes per second.

    >>> parse_bandwidth("25 Gbit/s")
    3125000000.0
    """
    number, unit = _split(value, what, "25 Gbit/s")
    units = {"B/s": 1.0, "bit/s": 0.125, "bps": 0.125, "": 1.0}
    return number * _scale(unit, units, value, what, "25 Gbit/s")


def parse_flops(value: str | float, what: str = "speed") -> float:
    """Read a speed such as "14 TFLOP/s" into operations per second.

    >>> parse_flops("14 TFLOP/s")
    14000000000000.0
    """
    number, unit = _split(value, what, "14 TFLOP/s")
    units = {"FLOP/s": 1.0, "FLOPS": 1.0, "": 1.0}
    return number * _scale(unit, units, value, what, "14 TFLOP/s")


def parse_seconds(value: str | float, what: str = "time") -> float:
    """Read a time such as "30 us" into seconds.

    >>> parse_seconds("30 us")
    3e-05
    """
    number, unit = _split(value, what, "30 us")
    if unit not in _PER_SECOND:
        raise UnitError(f'{what} "{value}" has no known unit; write it like "30 us"')
    return number / _PER_SECOND[unit]


def format_bytes(count: float) -> str:
    """Print bytes with a binary prefix.

    >>> format_bytes(16 * 2**30), format_bytes(1536)
    ('16.0 GiB', '1.5 KiB')
    """
    size = float(count)
    for unit in ("B", "KiB", "MiB", "GiB"):
        if abs(size) < 1024:
            return f"{size:.0f} B" if unit == "B" else f"{size:.1f} {unit}"
        size /= 1024
    return f"{size:.1f} TiB"


def format_seconds(seconds: float) -> str:
    """Print seconds with a prefix that keeps three figures.

    >>> format_seconds(0.01234), format_seconds(12.3)
    ('12.3 ms', '12.3 s')
    """
    for unit, scale in (("s", 1.0), ("ms", 1e3), ("us", 1e6)):
        if abs(seconds) * scale >= 1 or unit == "us":
            return f"{seconds * scale:.3g} {unit}"
    raise AssertionError("unreachable")


def _split(value: str | float, what: str, example: str) -> tuple[float, str]:
    if not isinstance(value, str):
        try:
            number, unit = float(value), ""
        except OverflowError:
            raise UnitError(f"{what} of {len(str(value))} digits is too large") from None
    else:
        match = _NUMBER.fullmatch(value)
        try:
            number, unit = float(match[1]), match[2]  # type: ignore[index]
        except (TypeError, ValueError):
            raise UnitError(
                f'{what} "{value}" is not a number with a unit; write it like "{example}"'
            ) from None
    if not 0 <= number < float("inf"):
        raise UnitError(f"{what} {value} must be a finite number that is not negative")
    return number, unit


def _scale(
    unit: str, bases: dict[str, float], value: str | float, what: str, example: str
) -> float:
    for base, scale in bases.items():
        if unit.endswith(base) and unit[: len(unit) - len(base)] in _PREFIXES:
            return _PREFIXES[unit[: len(unit) - len(base)]] * scale
    raise UnitError(f'{what} "{value}" has no known unit; write it like "{example}"')


def check_not_tiny(value: float) -> float:
    """A number that can be divided by: nothing in a profile or cluster is near the smallest floats.

    Raises:
        ValueError: it is above 0 and below 1e-30.
    """
    if 0 < value < _LEAST:
        raise ValueError(f"{value} is less than anything real; write 0, or at least {_LEAST}")
    return value
