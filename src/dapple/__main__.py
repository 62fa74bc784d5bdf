"""`python -m dapple`: the same as `dapple`, for torchrun."""

from dapple.cli.main import run

run()
