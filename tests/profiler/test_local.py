"""Profiling on this machine: processes, links, and what makes the workload."""

from __future__ import annotations

import functools
import os

import pytest

import dapple
from dapple.cluster import Link, load_cluster
from dapple.errors import InputError, RunError
from dapple.profiler.local import load_factory, local_cluster
from dapple.zoo import make_workload
from tests.profiler.models import fails_inside, small_mlp


@pytest.fixture(scope="module")
def measured():
    """Two processes at the same time."""
    told: list[tuple[str, float]] = []
    profile, cluster = dapple.profile(
        small_mlp,
        devices=2,
        batch_sizes=(1, 2),
        rounds=1,
        report=lambda what, fraction: told.append((what, fraction)),
    )
    return profile, cluster, told


def test_the_profile_says_how_many_processes_were_busy(measured):
    """As many as will train."""
    profile, _, told = measured
    assert profile.concurrency == 2
    assert profile.batch_sizes == (1, 2)
    assert told[0] == ("batch of 1", 0.0)


def test_the_machine_comes_as_a_cluster_with_measured_links(measured):
    """Latency, bandwidth and AllReduce; the memory is shared out."""
    _, cluster, _ = measured
    assert (cluster.name, cluster.num_devices, cluster.num_machines) == ("local", 2, 1)
    link = cluster.machines[0].inside
    assert 0 < link.latency < 1
    assert link.bandwidth > 1e5
    assert link.allreduce_bandwidth is not None
    assert link.allreduce_bandwidth > 1e5
    memory = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    assert cluster.machines[0].kind.memory == memory // 2


def test_the_cluster_goes_through_a_file_and_back(measured, tmp_path):
    """As `local` does."""
    _, cluster, _ = measured
    path = tmp_path / "local.toml"
    path.write_text(cluster.to_toml())
    assert load_cluster(str(path)) == cluster


def test_one_device_needs_no_link():
    """Its bandwidth is never used."""
    cluster = local_cluster(1, Link(bandwidth=1.0))
    assert cluster.num_devices == 1


def test_a_zoo_name_makes_its_workload():
    """With the arguments that were typed."""
    assert load_factory("mlp", {"width": 8})().name == "mlp"


def test_a_function_makes_a_users_workload():
    """By "module:function"."""
    assert load_factory("tests.profiler.models:small_mlp", {})().name == "mlp"


@pytest.mark.parametrize(
    ("model", "arguments", "words"),
    [
        ("nope", {}, "not in the zoo"),
        ("mlp", {"wide": 3}, 'no argument "wide"'),
        ("tests.profiler.nothing:f", {}, "can not be imported"),
        ("tests.profiler.models:f", {}, 'no function "f"'),
        ("tests.profiler.models:small_mlp", {"width": 3}, "can not be called with"),
    ],
)
def test_a_model_that_does_not_exist_is_refused_at_once(model, arguments, words: str):
    """Not only in the processes that measure, which need seconds to start."""
    with pytest.raises(InputError, match=words):
        load_factory(model, arguments)


def test_a_function_that_returns_something_else_is_refused():
    """When it is called."""
    with pytest.raises(InputError, match=r"returned list; it must return a dapple\.Workload"):
        load_factory("tests.profiler.models:a_list", {})()


def test_a_failure_in_the_users_code_is_reported_with_its_place():
    """Its last line outside of torch and dapple."""
    with pytest.raises(RunError, match=r"no such encoder \(File .*models\.py.* in fails_inside"):
        dapple.profile(fails_inside, batch_sizes=(1,))


def test_a_refusal_in_a_process_comes_out_as_it_is():
    """An InputError there is an InputError here."""
    factory = functools.partial(make_workload, "mlp", width=-1)
    with pytest.raises(InputError, match="cannot be built"):
        dapple.profile(factory, batch_sizes=(1,))


@pytest.mark.parametrize(
    ("name", "words"), [("devices", "measure with 1 to"), ("rounds", "1 pass")]
)
def test_counts_must_be_at_least_one(name: str, words: str):
    """InputError."""
    with pytest.raises(InputError, match=words):
        dapple.profile(small_mlp, **{name: 0})
