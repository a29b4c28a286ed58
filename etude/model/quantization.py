"""The quantised weight formats that can be read, as config.json describes them."""

from __future__ import annotations

import json
from collections.abc import Mapping
from typing import Any

QUANTIZED: dict[str, dict[str, tuple[Any, ...]]] = {
    "fp8": {"fmt": ("e4m3",), "weight_block_size": (None, [128, 128], [64, 64], [32, 32])},
    "fbgemm_fp8": {},
    "compressed-tensors": {"format": ("float-quantized",)},
    "mxfp4": {},
}
"""Methods whose tensors `checkpoint` reads, and the allowed values of their other keys. A block at
the edge of a matrix may be smaller, so the block size must be a known one."""


def check_quantization(how: Mapping[str, Any] | None) -> None:
    """Raises ValueError for weights that cannot be read. The rounding of activations is ignored:
    they are not rounded here."""
    if not how:
        return
    only = QUANTIZED.get(method := how.get("quant_method", ""))
    if only is None or any(how.get(key, values[0]) not in values for key, values in only.items()):
        more = {key: how.get(key) for key in only or ()}
        raise ValueError(
            f"config.json: quantization_config of {method!r} {more or ''} is not supported; "
            f"supported: {', '.join(QUANTIZED)}"
        )


def without_quantization(config_json: bytes) -> bytes:
    """config.json of the same model in bf16."""
    said = json.loads(config_json)
    if not isinstance(said, dict) or "quantization_config" not in said:
        return config_json
    check_quantization(said.pop("quantization_config"))
    return json.dumps(said, indent=2).encode()
