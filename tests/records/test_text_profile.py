"""Text profiles: what is read, what is refused, and which tensors cross a cut."""

from __future__ import annotations

from pathlib import Path

import pytest

from dapple.errors import FileError, InputError
from dapple.records import ModelProfile
from dapple.records.text_profile import load_text_profile

SHARED = Path(__file__).parents[2].parent / "shared" / "profiles"
needs_shared = pytest.mark.skipif(
    not SHARED.is_dir(), reason="the profiles of ../shared are not in this checkout"
)


def _node(key: str, name: str, forward: str, backward: str, size: str, parameters: str) -> str:
    return (
        f"{key} -- {name} -- forward_compute_time={forward}, backward_compute_time={backward}, "
        f"activation_size={size}, parameter_size={parameters}\n"
    )


CHAIN = _node("node1", "Input", "0.5", "0", "64", "0.000")
CHAIN += _node("node2", "Conv2d(3, 64, kernel_size=(3, 3))", "2.0", "4.0", "[100.0; 28.0]", "40.0")
CHAIN += _node("node3", "Loss", "1.0", "1.5", "4", "0")
CHAIN += "\tnode1 -- node2\n\tnode2 -- node3\n"


def _load(tmp_path: Path, text: str, batch_size: int = 4) -> ModelProfile:
    path = tmp_path / "net-pbs-4.txt"
    path.write_text(text, encoding="utf-8")
    return load_text_profile(path, batch_size)


def test_units_and_lists(tmp_path: Path) -> None:
    """Milliseconds become seconds, bracketed sizes add up, and sizes count per row."""
    profile = _load(tmp_path, CHAIN)
    conv = profile.layers[1]
    assert conv.name == "Conv2d(3, 64, kernel_size=(3, 3))"
    assert (conv.forward_seconds, conv.backward_seconds) == ((0.002,), (0.004,))
    assert conv.parameter_bytes == 40
    assert conv.saved_bytes is None
    assert profile.batch_sizes == (4,)
    (tensor,) = profile.tensors
    assert (tensor.producer, tensor.consumers, tensor.bytes_per_sample) == (1, (2,), 32.0)


def test_order_is_topological(tmp_path: Path) -> None:
    """Layers follow the edges even where the lines of the file do not."""
    lines = CHAIN.splitlines(keepends=True)
    profile = _load(tmp_path, "".join([lines[2], lines[1], lines[0], *lines[3:]]))
    assert [layer.name[:4] for layer in profile.layers] == ["Inpu", "Conv", "Loss"]


def test_extra_fields_and_line_ends(tmp_path: Path) -> None:
    """A stage number behind the fields, blank lines and Windows line ends do no harm."""
    text = CHAIN.replace("parameter_size=40.0", "parameter_size=40.0 -- stage_id=1")
    profile = _load(tmp_path, text.replace("\n", "\r\n\r\n"))
    assert profile.layers[1].parameter_bytes == 40


def test_masks_cross_no_cut(tmp_path: Path) -> None:
    """An output without parameters and backward time behind it is recomputed where it is used."""
    text = _node("n1", "ids", "0.1", "0", "8", "0") + _node("n2", "mask", "0.1", "0", "80", "0")
    text += "".join(_node(f"b{i}", f"block{i}", "1", "2", "16", "400") for i in range(3))
    text += "n1 -- n2\nn1 -- b0\nb0 -- b1\nb1 -- b2\n" + "".join(f"n2 -- b{i}\n" for i in range(3))
    assert [tensor.producer for tensor in _load(tmp_path, text).tensors] == [2, 3]


def test_reshape_carries_the_gradient(tmp_path: Path) -> None:
    """A free reshape behind an embedding carries its gradient; positions read by all do not."""
    text = _node("n1", "embedding", "0.1", "0", "8", "400") + _node(
        "n2", "view", "0", "0", "8", "0"
    )
    text += _node("n3", "positions", "0.1", "0", "80", "0")
    text += "".join(_node(f"b{i}", f"block{i}", "1", "2", "16", "400") for i in range(2))
    text += "n1 -- n2\nn1 -- n3\nn2 -- b0\nb0 -- b1\nn3 -- b0\nn3 -- b1\n"
    assert [t.name for t in _load(tmp_path, text).tensors] == [
        "embedding.out",
        "view.out",
        "block0.out",
    ]


def test_residual_addition_is_priced(tmp_path: Path) -> None:
    """A residual addition without measured time still carries what the convolutions need."""
    text = _node("n1", "relu", "1", "1", "8", "0") + _node("n2", "conv", "1", "2", "8", "40")
    text += _node("n3", "Add", "0", "0", "8", "0") + _node("n4", "fc", "1", "2", "8", "40")
    text += "n1 -- n2\nn1 -- n3\nn2 -- n3\nn3 -- n4\n"
    tensors = _load(tmp_path, text).tensors
    assert [(t.name, t.consumers) for t in tensors] == [
        ("relu.out", (1, 2)),
        ("conv.out", (2,)),
        ("Add.out", (3,)),
    ]


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("", "holds no layer"),
        (CHAIN + "node3 -- node9\n", 'line 6: the edge names "node9"'),
        (CHAIN + "hello\n", 'line 6: "hello" is neither'),
        (CHAIN + _node("node3", "x", "1", "1", "1", "1"), 'line 6: "node3" is defined twice'),
        (CHAIN.replace("2.0,", "fast,"), 'line 2: forward_compute_time "fast" is no number'),
        (CHAIN.replace("2.0,", "-2.0,"), "line 2: forward_compute_time -2.0 must be finite"),
        (CHAIN.replace("2.0,", "2,5,"), 'line 2: "5" belongs to no field'),
        (CHAIN.replace("2.0,", "1e300,"), "line 2: forward_compute_time 1e300 is too large"),
        (CHAIN.replace("2.0,", "1e-320,"), "line 2: forward_compute_time 1e-320 is too small"),
        (CHAIN.replace("2.0,", "nan,"), "line 2: forward_compute_time nan must be finite"),
        (CHAIN.replace(", parameter_size=40.0", ""), "line 2: node2 has no parameter_size"),
        (CHAIN + "node3 -- node1\n", "lies on or behind a cycle"),
        (CHAIN + "node4 -- forward_compute_time=1\n", "line 6: "),
    ],
)
def test_refusals_name_the_line(tmp_path: Path, text: str, message: str) -> None:
    """What cannot be understood is refused with its line."""
    with pytest.raises(FileError) as caught:
        _load(tmp_path, text)
    assert message in str(caught.value)


def test_batch_size_must_be_positive(tmp_path: Path) -> None:
    """A profile batch size below one is refused."""
    with pytest.raises(InputError, match="must be at least 1"):
        _load(tmp_path, CHAIN, batch_size=0)


def test_missing_file(tmp_path: Path) -> None:
    """A missing file is named."""
    with pytest.raises(FileError, match="does not exist"):
        load_text_profile(tmp_path / "none.txt", 1)


@needs_shared
@pytest.mark.parametrize(
    ("name", "batch_size", "layers", "cut_bytes"),
    [
        ("bert-48-pbs-2", 2, 53, 4325376),
        ("xlnet-36-pbs-1", 1, 43, 2000000),
        ("vgg-19-pbs-32", 32, 26, 12000000),
    ],
)
def test_real_profiles(name: str, batch_size: int, layers: int, cut_bytes: int) -> None:
    """The published profiles load, and a middle cut costs the main tensor alone."""
    profile = load_text_profile(SHARED / f"{name}.txt", batch_size)
    assert profile.num_layers == layers
    cut = 19 if name.startswith("vgg") else layers // 2
    crossing = [t for t in profile.tensors if t.producer < cut <= max(t.consumers)]
    assert round(sum(t.bytes_per_sample for t in crossing) * batch_size) == cut_bytes
