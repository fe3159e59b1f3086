"""Configuration of sliding-window attention, in which a query attends to a fixed number of last tokens.

Source: Jiang et al. 2023 (arXiv:2310.06825) section 2; `Qwen2Config` of transformers for the switch of the Qwens.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Annotated, Any

from pydantic import Field

from nxtrain_models.decoder.config import Count, DecoderConfig


class WindowConfig(DecoderConfig):
    """Configuration of a decoder whose layers may have sliding-window attention."""

    sliding_window: Count | None = None
    """Sliding window in tokens, including the query's own; None for full causal attention."""

    def window_of(self, layer: int) -> int | None:
        """Sliding window of a layer in tokens, including the query's own; None for full causal attention."""
        return self.sliding_window


class SwitchedWindowConfig(WindowConfig):
    """Configuration of a decoder whose `config.json` can disable the window; here a given window is always enabled."""

    max_window_layers: Annotated[int, Field(ge=0, le=2**16)] | None = None
    """Number of layers without a window, before the first layer with a window."""

    def window_of(self, layer: int) -> int | None:
        """Sliding window of a layer in tokens, including the query's own; None for full causal attention."""
        if layer < (self.max_window_layers or 0):
            return None
        return self.sliding_window


def without_unused_window(hf: Mapping[str, Any]) -> dict[str, Any]:
    """Remove a disabled or unused window from the content of a `config.json`."""
    window = hf.get("sliding_window", 4096) if hf.get("use_sliding_window", False) else None
    first, layers = hf.get("max_window_layers", 28), hf.get("num_hidden_layers")
    if window is None or (isinstance(first, int) and isinstance(layers, int) and first >= layers):
        return {**hf, "sliding_window": None, "max_window_layers": None}
    return {**hf, "sliding_window": window, "max_window_layers": first}


def with_switch(hf: Mapping[str, Any]) -> dict[str, Any]:
    """Add `use_sliding_window` to the content of a `config.json`, by its window."""
    if hf["sliding_window"] is None:
        kept = {name: value for name, value in hf.items() if name not in ("sliding_window", "max_window_layers")}
        return {**kept, "use_sliding_window": False}
    return {**hf, "max_window_layers": hf["max_window_layers"] or 0, "use_sliding_window": True}
