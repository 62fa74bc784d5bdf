import pytest
import torch
from torch.nn import functional as F  # noqa: N812

from dapple.errors import InputError
from dapple.zoo import GPT, ZOO, make_workload, next_byte_loss, unmasked_tokens
from tests.zoo.sizes import SMALL


def test_the_embedding_and_the_head_of_the_gpt_are_one_parameter():
    model = GPT(width=16, layers=1, heads=2)
    assert model.head.weight is model.embed.weight
    assert "head.weight" not in dict(model.named_parameters())


def test_the_default_gpt_has_about_eight_million_parameters():
    with torch.device("meta"):
        model = GPT()
    assert 7.9e6 < sum(p.numel() for p in model.parameters()) < 8.1e6


def test_the_gpt_does_not_look_ahead():
    torch.manual_seed(0)
    model = GPT(width=16, layers=2, heads=2, context=8)
    tokens = torch.arange(8).unsqueeze(0)
    changed = tokens.clone()
    changed[0, 5] = 99
    before, after = model(tokens), model(changed)
    torch.testing.assert_close(before[:, :5], after[:, :5])
    assert not torch.allclose(before[:, 5:], after[:, 5:])


@pytest.mark.parametrize("name", ZOO)
def test_every_workload_gives_each_parameter_a_finite_gradient_in_its_dtype(name):
    workload = ZOO[name](**SMALL[name])
    workload.model.double()
    output = workload.model(*workload.inputs(5))
    loss = workload.loss(output, workload.targets(5))
    loss.backward()
    assert loss.dtype == torch.float64
    assert loss.shape == ()
    for place, parameter in workload.model.named_parameters():
        assert torch.isfinite(parameter.grad).all()
        # A bias that shifts the scores of all tokens alike changes no softmax over tokens.
        if not (place == "head.bias" and name.startswith(("bert", "xlnet"))):
            assert parameter.grad.abs().max() > 0


@pytest.mark.parametrize("name", ZOO)
def test_the_rows_of_every_workload_are_independent(name):
    workload = ZOO[name](**SMALL[name])
    # Batch norm's statistics are the exception, in training mode.
    workload.model.double().eval()
    inputs = workload.inputs(5)
    pieces = zip(*(torch.tensor_split(value, 2) for value in inputs), strict=True)
    apart = torch.cat([workload.model(*piece) for piece in pieces])
    torch.testing.assert_close(apart, workload.model(*inputs), rtol=0, atol=1e-12)


@pytest.mark.parametrize("name", ZOO)
def test_example_inputs_and_targets_are_the_same_each_time(name):
    workload = ZOO[name](**SMALL[name])
    for first, second in zip(workload.inputs(3), workload.inputs(3), strict=True):
        assert torch.equal(first, second)
        assert len(first) == 3
    assert torch.equal(workload.targets(3), workload.targets(3))


def test_the_skipnet_joins_its_first_third_to_its_last_and_masks_by_length():
    workload = ZOO["skipnet"](width=6, layers=3)
    x, lengths = workload.inputs(4)
    full = workload.model(x, lengths)
    assert not torch.allclose(full, workload.model(x, torch.zeros_like(lengths)))
    with torch.no_grad():  # the half of `join` that reads the skip
        workload.model.join.weight[:, 6:] = 0
    assert not torch.allclose(full, workload.model(x, lengths))


def test_weighted_pieces_of_the_loss_add_up_to_the_loss_of_the_whole_batch():
    torch.manual_seed(0)
    logits = torch.randn(4, 6, 256, dtype=torch.float64)
    targets = torch.randint(0, 256, (4, 6))
    targets[0, 2:] = -100
    targets[3] = -100
    pieces = [(logits[:1], targets[:1]), (logits[1:3], targets[1:3])]
    weights = [unmasked_tokens(None, t) for _, t in pieces]
    losses = [next_byte_loss(*piece) for piece in pieces]
    assert weights == [2.0, 12.0]
    assert unmasked_tokens(None, targets[3:]) == 0.0
    weighted = sum(w * loss for w, loss in zip(weights, losses, strict=True)) / sum(weights)
    kept = targets != -100
    torch.testing.assert_close(weighted, F.cross_entropy(logits[kept], targets[kept]))
    torch.testing.assert_close(weighted, next_byte_loss(logits, targets))


@pytest.mark.parametrize(
    ("name", "arguments", "words"),
    [
        ("gtp", {}, '"gtp" is not in the zoo; known: gpt, mlp, skipnet'),
        ("gpt", {"depth": 4}, 'no argument "depth"; it has: vocab, width, layers'),
        ("gpt", {"width": 30, "heads": 4}, "width 30 is not a multiple of heads 4"),
        ("gpt", {"heads": 0}, "cannot be built"),
        ("gpt", {"layers": "4"}, "cannot be built"),
        ("gpt", {"dropout": 2}, "cannot be built"),
        ("mlp", {"width": -1}, "cannot be built"),
        ("skipnet", {"layers": 4}, "layers 4 is not a positive multiple of 3"),
    ],
)
def test_a_wrong_name_or_argument_is_refused_in_one_line(name, arguments, words):
    with pytest.raises(InputError) as caught:
        make_workload(name, **arguments)
    assert words in str(caught.value)
    assert "\n" not in str(caught.value)
