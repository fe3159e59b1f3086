"""Dimensions of published models, including models that nxtrain does not train, and sizes of published data sets."""

from __future__ import annotations

from dataclasses import dataclass

from nxtrain.common.dimensions import Dimensions


@dataclass(frozen=True)
class Shape:
    """Dimensions of a published model, and their source.

    Args:
        dimensions: Dimensions of the model.
        seq_len: Tokens of the model's training sequences.
        source: Publication.
    """

    dimensions: Dimensions
    seq_len: int
    source: str


@dataclass(frozen=True)
class Dataset:
    """Size of a published data set.

    Args:
        tokens: Number of tokens, by the publisher's tokenizer.
        bytes: Bytes on disk; None if not published with the tokens.
        source: Publication.
    """

    tokens: float
    bytes: float | None
    source: str


def _gpt(
    vocab: int, hidden: int, layers: int, heads: int, *, tied: bool = True, positions: int = 2048, inner: int = 0
) -> Dimensions:
    return Dimensions(
        vocab_size=vocab,
        hidden_size=hidden,
        num_layers=layers,
        num_heads=heads,
        num_kv_heads=heads,
        head_size=hidden // heads,
        intermediate_size=inner or 4 * hidden,
        tied=tied,
        gated=False,
        biases=True,
        positions=positions,
    )


_GPT3 = "Brown et al. 2020 (arXiv:2005.14165) table 2.1"
_FSDP = "PyTorch blog, Training a 1 Trillion Parameter Model With PyTorch FSDP on AWS, 2022; re:Invent 2022 CMP401"
_NEMO = "aws-neuron-sdk, about-neuron/benchmarks/trn1; widths and depths that give the named sizes"
_PYTHIA = "Biderman et al. 2023 (arXiv:2304.01373) table 1"
_BLOOM = "Scao et al. 2022 (arXiv:2211.05100) table 3"

SHAPES = {
    "gpt3-6.7b": Shape(_gpt(50_257, 4096, 32, 32), 2048, _GPT3),
    "gpt3-13b": Shape(_gpt(50_257, 5120, 40, 40), 2048, _GPT3),
    "gpt3-23b": Shape(_gpt(50_257, 8192, 28, 64), 2048, _NEMO),
    "gpt3-46b": Shape(_gpt(50_257, 8192, 56, 64), 2048, _NEMO),
    "gpt3-175b": Shape(_gpt(50_257, 12_288, 96, 96), 2048, f"{_GPT3}; {_FSDP}"),
    "gpt-1t": Shape(_gpt(50_257, 25_600, 128, 160), 2048, _FSDP),
    "gpt-neox-20b": Shape(
        _gpt(50_432, 6144, 44, 64, tied=False, positions=0), 2048, "Black et al. 2022 (arXiv:2204.06745) section 2.1"
    ),
    "pythia-1b": Shape(_gpt(50_304, 2048, 16, 8, tied=False, positions=0), 2048, _PYTHIA),
    "pythia-1.4b": Shape(_gpt(50_304, 2048, 24, 16, tied=False, positions=0), 2048, _PYTHIA),
    "pythia-2.8b": Shape(_gpt(50_304, 2560, 32, 32, tied=False, positions=0), 2048, _PYTHIA),
    "pythia-6.9b": Shape(_gpt(50_432, 4096, 32, 32, tied=False, positions=0), 2048, _PYTHIA),
    "pythia-12b": Shape(_gpt(50_688, 5120, 36, 40, tied=False, positions=0), 2048, _PYTHIA),
    "bloom-7.1b": Shape(_gpt(250_880, 4096, 30, 32, positions=0), 2048, _BLOOM),
    "bloom-176b": Shape(_gpt(250_880, 14_336, 70, 112, positions=0), 2048, _BLOOM),
}
"""Published models by name, for predictions only; `nxtrain train` has no code for them."""

DATASETS = {
    "wikitext": Dataset(100e6, 750e6, "AWS slides on foundation models, 2025-02"),
    "c4": Dataset(156e9, 305e9, "Dodge et al. 2021 (arXiv:2104.08758)"),
    "the-pile": Dataset(300e9, 825 * 2**30, "Gao et al. 2020 (arXiv:2101.00027); Pythia (arXiv:2304.01373)"),
    "redpajama": Dataset(1.0e12, 5e12, "AWS slides on foundation models, 2025-02; RedPajama-Data-1T"),
    "redpajama-v2": Dataset(30e12, 170e12, "AWS slides on foundation models, 2025-02; RedPajama-Data-v2"),
    "slimpajama": Dataset(627e9, 895e9, "Soboleva et al. 2023, SlimPajama-627B"),
}
"""Published data sets by name."""
