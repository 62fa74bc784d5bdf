import itertools

import pytest
import torch

from dapple.errors import InputError
from dapple.zoo.text import batches, split_text, validation_batches


def take(count, *arguments, **options):
    return list(itertools.islice(batches(*arguments, **options), count))


def equal(first, second):
    return all(torch.equal(a, b) for a, b in zip(first, second, strict=True))


def test_two_iterators_give_the_same_batches():
    first, second = (take(3, "train", 4, 16, seed=7) for _ in range(2))
    assert all(equal(a, b) for a, b in zip(first, second, strict=True))


def test_batches_differ_between_steps_and_seeds_and_splits():
    one, two = take(2, "train", 4, 16, seed=7)
    (other_seed,) = take(1, "train", 4, 16, seed=8)
    (other_split,) = take(1, "validation", 4, 16, seed=7)
    assert not any(equal(one, other) for other in (two, other_seed, other_split))


def test_a_later_first_step_continues_the_same_sequence():
    assert equal(take(4, "train", 4, 16, seed=7)[3], take(1, "train", 4, 16, 7, first_step=3)[0])


def test_targets_are_the_bytes_after_the_tokens():
    tokens, targets = take(1, "train", 4, 16, seed=0)[0]
    assert tokens.shape == targets.shape == (4, 16)
    assert tokens.dtype == targets.dtype == torch.int64
    assert torch.equal(tokens[:, 1:], targets[:, :-1])
    assert bytes(tokens[0].tolist() + targets[0, -1:].tolist()) in bytes(
        split_text("train").tolist()
    )


def test_train_and_validation_are_the_two_ends_of_one_text():
    train, validation = split_text("train"), split_text("validation")
    element = train.data_ptr() + len(train)
    assert element == validation.data_ptr()  # adjacent in one storage: no byte is in both
    assert 0.099 < len(validation) / (len(train) + len(validation)) < 0.101
    assert len(train) > 300_000


def test_validation_batches_are_fixed_and_differ_from_each_other():
    first, second = (validation_batches(3, 4, 16) for _ in range(2))
    assert all(equal(a, b) for a, b in zip(first, second, strict=True))
    assert not equal(first[0], first[1])
    text = bytes(split_text("validation").tolist())
    assert all(bytes(row.tolist()) in text for tokens, _ in first for row in tokens)


def test_a_context_as_long_as_the_text_allows_has_one_window():
    length = len(split_text("validation"))
    (tokens, targets) = take(1, "validation", 2, length - 1, seed=0)[0]
    assert torch.equal(tokens[0], split_text("validation")[:-1].long())
    assert torch.equal(targets[1], split_text("validation")[1:].long())
    assert validation_batches(1, 1, length - 1)[0][0].shape == (1, length - 1)


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (("test", 4, 16, 0), 'split "test" is unknown; use train or validation'),
        (("train", 0, 16, 0), "global batch size 0 is too small"),
        (("train", 4, 0, 0), "context 0 does not fit"),
        (("validation", 4, 10**7, 0), "context 10000000 does not fit the validation text"),
    ],
)
def test_bad_arguments_are_refused_before_the_first_batch(arguments, words):
    with pytest.raises(InputError, match=words):
        batches(*arguments)


def test_no_validation_batches_are_refused():
    with pytest.raises(InputError, match="count of validation batches 0"):
        validation_batches(0, 4, 16)
