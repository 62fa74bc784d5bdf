"""dapple: plan and run pipeline and data parallel training of an unmodified PyTorch model."""

__version__ = "0.1.0"
