"""A language model of the transformers library, made from a configuration; nothing is downloaded.

Run from the folder of this file, with transformers installed:

    dapple train transformers_model.toml
"""

from collections.abc import Iterator

import torch
from transformers import GPT2Config, GPT2LMHeadModel

import dapple

VOCABULARY, LENGTH = 64, 32


def workload() -> dapple.Workload:
    config = GPT2Config(
        vocab_size=VOCABULARY,
        n_positions=LENGTH,
        n_embd=64,
        n_layer=4,
        n_head=4,
        bos_token_id=0,
        eos_token_id=0,
    )
    return dapple.Workload(
        name="gpt2-small",
        model=GPT2LMHeadModel(config),
        inputs=lambda rows: _batch(rows, torch.Generator().manual_seed(0)),
        # The loss that the model returns is a mean over these: labelled tokens after the first.
        weight=lambda inputs, targets: (inputs["labels"][:, 1:] != -100).sum(),
    )


def batches(split: str, global_batch_size: int, seed: int) -> Iterator[tuple[dict, None]]:
    random = torch.Generator().manual_seed(2 * seed + (split == "validation"))
    while True:
        yield _batch(global_batch_size, random), None


def _batch(rows: int, random: torch.Generator) -> dict[str, torch.Tensor]:
    """Rows that count up from a random number, of random lengths."""
    first = torch.randint(1, VOCABULARY, (rows, 1), generator=random)
    tokens = (first + torch.arange(LENGTH)) % VOCABULARY
    lengths = torch.randint(2, LENGTH + 1, (rows, 1), generator=random)
    mask = (torch.arange(LENGTH) < lengths).long()
    return {
        "input_ids": tokens,
        "attention_mask": mask,
        "labels": tokens.masked_fill(mask == 0, -100),
    }
