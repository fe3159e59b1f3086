"""Sliding-window attention: a query sees its own token and a number of tokens before it.

Source: Jiang et al. 2023 (arXiv:2310.06825) section 2; `Qwen2Config` of transformers for the switch of the Qwens.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Annotated, Any

from pydantic import Field

from nxtrain_models.decoder.config import Count, DecoderConfig


class WindowConfig(DecoderConfig):
    """Shape of a decoder whose layers may have sliding-window attention."""

    sliding_window: Count | None = None
    """Tokens that a query sees, its own among them; None for all before it."""

    def window_of(self, layer: int) -> int | None:
        """Tokens that a query of a layer sees, its own among them; None for all before it."""
        return self.sliding_window


class SwitchedWindowConfig(WindowConfig):
    """Shape of a decoder whose `config.json` switches its window on or off; here the window is always on."""

    max_window_layers: Annotated[int, Field(ge=0, le=2**16)] | None = None
    """Layers before the first one with a window."""

    def window_of(self, layer: int) -> int | None:
        """Tokens that a query of a layer sees, its own among them; None for all before it."""
        if layer < (self.max_window_layers or 0):
            return None
        return self.sliding_window


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
