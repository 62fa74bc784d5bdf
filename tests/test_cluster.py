"""Clusters: presets, TOML, and what is wrong with a file."""

from __future__ import annotations

import contextlib
import re

import pytest
from hypothesis import given
from hypothesis import strategies as st

from dapple.cluster import Cluster, device_kind, load_cluster, parse_cluster, preset
from dapple.errors import DappleError, FileError, InputError
from dapple.presets import CLUSTERS, DEVICES

TEXT = """
format = "dapple-cluster"
name = "lab"
[[machines]]
count = 2
devices = 4
[machines.kind]
name = "a100"
memory = "40 GiB"
flops = "312 TFLOP/s"
[machines.inside]
bandwidth = "300 GB/s"
latency = "5 us"
[machines.outside]
bandwidth = "100 Gbit/s"
"""


def test_quantities_are_read_from_toml_as_people_write_them():
    """Base units inside."""
    cluster = parse_cluster(TEXT, "lab.toml")
    group = cluster.machines[0]
    assert (cluster.num_machines, cluster.num_devices) == (2, 8)
    assert group.kind.memory == 40 * 2**30
    assert group.kind.flops == 312e12
    assert (group.inside.bandwidth, group.inside.latency) == (300e9, 5e-6)
    assert group.outside is not None
    assert group.outside.bandwidth == 12.5e9


@pytest.mark.parametrize("name", [*CLUSTERS, "config-a:4x8"])
def test_clusters_round_trip_through_toml_files(name: str, tmp_path):
    """Written and read again, every preset is the same."""
    path = tmp_path / "cluster.toml"
    path.write_text(preset(name).to_toml(), encoding="utf-8")
    assert load_cluster(str(path)) == preset(name)


@given(st.text(st.characters(exclude_categories=["Cs"]), max_size=40))
def test_any_name_and_source_survive_a_toml_file(text: str):
    """Quotes, backslashes and control characters included."""
    cluster = preset("config-b").model_copy(update={"name": text, "source": text})
    assert parse_cluster(cluster.to_toml(), "x.toml") == cluster


def test_presets_are_the_papers_clusters():
    """A: 2 x 8. B and C: 16 x 1. Counts can be given."""
    assert preset("config-a").machine_sizes() == (8, 8)
    assert preset("config-b").machine_sizes() == (1,) * 16
    assert preset("config-c:3x2").machine_of_device() == (0, 0, 1, 1, 2, 2)


def test_memory_can_be_changed_everywhere_at_once():
    """`with_memory` takes a quantity in words and leaves the cluster itself alone."""
    cluster = preset("config-a")
    changed = cluster.with_memory("110 MiB")
    assert {kind.memory for kind in changed.kind_of_device()} == {110 * 2**20}
    assert {kind.memory for kind in cluster.kind_of_device()} == {16 * 2**30}


@pytest.mark.parametrize(
    ("old", "new", "field", "value"),
    [
        ('"40 GiB"', '"40 parsecs"', "memory", "40 parsecs"),
        ('"40 GiB"', "0", "memory", "0"),
        ('"300 GB/s"', "-1", "bandwidth", "-1"),
        ('"300 GB/s"', "1e31", "bandwidth", "1e+31"),
        ('"5 us"', '"soon"', "latency", "soon"),
        ('"5 us"', "1e-320", "latency", "1e-320 is less than anything real"),
        ("devices = 4", "devices = 0", "devices", "0"),
        ("devices = 4", "devices = 1.5", "devices", "1.5"),
        ("count = 2", "count = 2\ncolour = 3", "colour", "3"),
        ('"dapple-cluster"', '"dapple-plan"', "format", "dapple-plan"),
        ('name = "lab"', "", "name", ""),
    ],
)
def test_a_bad_field_is_named_with_its_value(old: str, new: str, field: str, value: str):
    """FileError: file, field, value."""
    with pytest.raises(FileError, match=r"lab\.toml") as caught:
        parse_cluster(TEXT.replace(old, new), "lab.toml")
    assert field in str(caught.value)
    assert value in str(caught.value)


def test_several_machines_need_a_link_between_them():
    """One machine does not."""
    alone = TEXT.split("[machines.outside]")[0]
    with pytest.raises(FileError, match="needs `outside` links"):
        parse_cluster(alone, "lab.toml")
    assert parse_cluster(alone.replace("count = 2", "count = 1"), "lab.toml").num_devices == 4


@pytest.mark.parametrize("text", ["", "machines = 3", "[[machines]]", "= 1", "machines = []"])
def test_files_that_are_no_cluster_are_refused(text: str):
    """Empty, of another shape, or not TOML at all."""
    with pytest.raises(FileError, match="lab"):
        parse_cluster(text, "lab.toml")


@pytest.mark.parametrize("name", ["", "config-z", "config-a:0x8", "config-a:4", "config-a:4x8x2"])
def test_unknown_presets_and_counts_are_refused(name: str):
    """With the presets, or with how counts are written."""
    with pytest.raises(InputError, match=re.escape(f'"{name}"')):
        load_cluster(name)


def test_a_missing_file_is_refused(tmp_path):
    """FileError names the path."""
    with pytest.raises(FileError, match=r"none\.toml"):
        load_cluster(str(tmp_path / "none.toml"))


@given(st.text(max_size=60))
def test_no_text_whatever_raises_anything_but_a_dapple_error(text: str):
    """Neither as a cluster file nor as a preset."""
    for read in (lambda: parse_cluster(text, "x.toml"), lambda: preset(text)):
        with contextlib.suppress(DappleError):
            assert isinstance(read(), Cluster)


@pytest.mark.parametrize("name", DEVICES)
def test_every_device_has_its_figures_and_their_source(name: str):
    """Peak speeds ascend from single to half precision, and the source is named."""
    kind = device_kind(name)
    assert kind.name == name
    assert kind.source
    assert kind.flops == DEVICES[name].flops[DEVICES[name].training_dtype]
    half = device_kind(name, "float16").flops
    single = device_kind(name, "float32").flops
    assert half is not None
    assert single is not None
    assert half > single


@pytest.mark.parametrize("name", CLUSTERS)
def test_every_cluster_preset_names_its_source(name: str):
    """Links inside are faster than outside, and a flow never exceeds its card."""
    cluster = preset(name)
    (group,) = cluster.machines
    assert cluster.source
    assert group.kind.name in DEVICES
    assert group.outside is not None
    assert (group.outside.flow_bandwidth or 0) <= group.outside.bandwidth
    assert load_cluster(f"{name}:3x2").machine_sizes() == (2, 2, 2)


def test_a_node_with_a_card_per_device():
    """Two H100 of a machine share two cards of 50 GB/s, and one flow uses one of them."""
    outside = preset("h100:4x2").machines[0].outside
    assert outside is not None
    assert (outside.bandwidth, outside.flow_bandwidth) == (100e9, 50e9)


@pytest.mark.parametrize(("name", "dtype"), [("h300", None), ("v100-16gb", "bfloat16")])
def test_unknown_devices_and_types_are_refused(name: str, dtype: str | None):
    """With what is known instead."""
    with pytest.raises(InputError, match="known: "):
        device_kind(name, dtype)
