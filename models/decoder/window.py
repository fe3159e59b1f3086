"""Windows of attention, which nothing computes: within a window attention is plainly causal, beyond it is refused.

Source: Jiang et al. 2023 (arXiv:2310.06825) section 2; `Qwen2Config` of transformers for the switch of the Qwens.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Annotated, Any

from pydantic import Field

from nxtrain.common.errors import Problem
from nxtrain_models.decoder.config import Count, DecoderConfig


class WindowConfig(DecoderConfig):
    """Shape of a decoder whose layers may have windows."""

    sliding_window: Count | None = None
    """Tokens that a query sees, its own among them; None for all before it."""

    @property
    def longest_sequence(self) -> tuple[str, int]:
        """Key that limits the tokens of a sequence, and the number."""
        window = self.sliding_window
        if window is not None and window < self.scaled_length:
            return "sliding_window", window
        return super().longest_sequence


class SwitchedWindowConfig(WindowConfig):
    """Shape of a decoder whose `config.json` has a switch next to its window; the window here is one that is in use."""

    max_window_layers: Annotated[int, Field(ge=0, le=2**16)] | None = None
    """Layers before the first one with a window."""


def beyond_window(config: DecoderConfig, seq_len: int) -> list[Problem]:
    """Reason why sequences are too long for the window of a shape, if any."""
    window = config.sliding_window if isinstance(config, WindowConfig) else None
    if window is None or seq_len <= window:
        return []
    reason = f"seq_len={seq_len} exceeds model.config.sliding_window={window}, and no kernel cuts attention there"
    hint = (
        f"shorten sequences to {window} tokens, within which the window changes nothing; or raise "
        "model.config.sliding_window for a model that sees the whole sequence"
    )
    return [Problem("train.seq_len", reason, hint=hint)]


def without_unused_window(hf: Mapping[str, Any]) -> dict[str, Any]:
    """Content of a `config.json` without a window that is switched off or that no layer has."""
    window = hf.get("sliding_window", 4096) if hf.get("use_sliding_window", False) else None
    first, layers = hf.get("max_window_layers", 28), hf.get("num_hidden_layers")
    if window is None or (isinstance(first, int) and isinstance(layers, int) and first >= layers):
        return {**hf, "sliding_window": None, "max_window_layers": None}
    return {**hf, "sliding_window": window, "max_window_layers": first}


def with_switch(hf: Mapping[str, Any]) -> dict[str, Any]:
    """Content of a `config.json` that says whether its window is in use."""
    if hf["sliding_window"] is None:
        kept = {name: value for name, value in hf.items() if name not in ("sliding_window", "max_window_layers")}
        return {**kept, "use_sliding_window": False}
    return {**hf, "max_window_layers": hf["max_window_layers"] or 0, "use_sliding_window": True}
