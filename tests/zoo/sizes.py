"""Every model of the zoo, shrunk."""

from __future__ import annotations

from typing import Any

_ATTENTION = {"vocab": 16, "width": 8, "layers": 2, "heads": 2, "length": 5}
SMALL: dict[str, dict[str, Any]] = {
    "gpt": {"width": 16, "layers": 2, "heads": 2, "context": 8},
    "mlp": {},
    "skipnet": {"width": 12, "layers": 3},
    "vgg-19": {"groups": ((2, 4), (1, 6)), "width": 8, "classes": 5, "image": 8},
    "resnet-50": {"groups": (1, 2), "width": 4, "classes": 5, "image": 16},
    "gnmt-16": {"vocab": 16, "width": 6, "layers": 3, "length": 5},
    "bert-48": {**_ATTENTION, "context": 5},
    "bert-large": {**_ATTENTION, "context": 5},
    "xlnet-36": _ATTENTION,
    "amoebanet-36": {"layers": 3, "filters": 16, "classes": 5, "image": 64},
}
