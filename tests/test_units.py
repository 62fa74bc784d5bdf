"""Quantities as people write them."""

from __future__ import annotations

import contextlib
import doctest

import pytest
from hypothesis import given
from hypothesis import strategies as st

from dapple import units
from dapple.errors import UnitError

READERS = (units.parse_bytes, units.parse_bandwidth, units.parse_flops, units.parse_seconds)


def test_examples_in_the_docstrings_hold():
    """Doctest."""
    assert doctest.testmod(units).failed == 0


@pytest.mark.parametrize(
    ("read", "text", "value"),
    [
        (units.parse_bytes, "110 MB", 110_000_000),
        (units.parse_bytes, "1.5KiB", 1536),
        (units.parse_bytes, "8 bit", 1),
        (units.parse_bytes, 12, 12),
        (units.parse_bandwidth, "10 Gbit/s", 1.25e9),
        (units.parse_bandwidth, "40 GB/s", 40e9),
        (units.parse_bandwidth, "100 Mbps", 12.5e6),
        (units.parse_flops, "989 TFLOPS", 989e12),
        (units.parse_seconds, "2 ms", 0.002),
        (units.parse_seconds, "1e-3", 0.001),
        (units.parse_seconds, "5 µs", 5e-6),
    ],
)
def test_quantities_are_read_in_base_units(read, text, value):
    """Powers of 1000 and 1024, bits and bytes, plain numbers."""
    assert read(text) == pytest.approx(value)


@pytest.mark.parametrize("read", READERS)
@pytest.mark.parametrize("text", ["", "fast", "-1", "1 parsec", "nan", "inf", "1e999", "1..2", -1])
def test_what_cannot_be_read_is_refused_with_name_and_value(read, text):
    """UnitError names the quantity, the value, and an example where the unit is wrong."""
    with pytest.raises(UnitError, match="my figure") as caught:
        read(text, "my figure")
    assert str(text) in str(caught.value)


@given(st.text(max_size=12))
def test_no_text_whatever_raises_anything_but_a_unit_error(text: str):
    """Never a traceback of another type."""
    for read in READERS:
        with contextlib.suppress(UnitError):
            assert read(text) >= 0


@given(st.integers(0, 2**50))
def test_printed_bytes_are_near_the_value(count: int):
    """Three figures and more, readable again."""
    text = units.format_bytes(count)
    assert units.parse_bytes(text) == pytest.approx(count, rel=0.06, abs=0.5)


def test_more_bytes_than_any_machine_has_are_refused():
    """An overflow is a slip in the unit, and is told as such."""
    with pytest.raises(UnitError, match="check the unit"):
        units.parse_bytes("1e308 TiB")
