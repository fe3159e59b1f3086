"""Scores of a model of ours: log-likelihoods of continuations and of whole texts, and texts continued to a stop.

Rows of tokens are sorted by length and read in batches, whose logits have a bounded size. Whole batches are divided
over the data parallel ranks, so that a row has the same neighbours, and bit for bit the same score, for any number of
them. Tensor parallel ranks share a model, and all of them have the scores.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from nxtrain.backends.base import Backend
from nxtrain.distributed.agreement import Ranks
from nxtrain.errors import ConfigError, DivergedError
from nxtrain.nn.decoding import Decoder
from nxtrain.train.generate import Continuation, Sampling, extend
from nxtrain.train.trained import Trained

LOGITS = 1 << 25
"""Most logits that are computed at once; 128 MiB in float32."""

MAX_ROWS = 32
"""Most rows of a batch."""


@dataclass(frozen=True)
class Row:
    """Tokens whose last ones are scored.

    Args:
        ids: Tokens that are known, then tokens that are scored.
        num_scored: Number of tokens that are scored, fewer than all.
    """

    ids: tuple[int, ...]
    num_scored: int


@dataclass(frozen=True)
class Likelihood:
    """Log-likelihood of some tokens.

    Args:
        nats: Sum of the natural logarithms of the tokens' probabilities.
        is_greedy: Each token is the likeliest one at its place.
    """

    nats: float
    is_greedy: bool

    def __add__(self, other: Likelihood) -> Likelihood:
        return Likelihood(self.nats + other.nats, self.is_greedy and other.is_greedy)


class Scorer:
    """A model that scores and continues texts; every rank makes one, and calls its methods with the same texts.

    Args:
        model: The model.
        backend: Backend that runs the model.
        ranks: Ranks that share the work, with a model in each tensor parallel group.

    Attributes:
        model: The model.
        length: Tokens of the longest sequence.
        prefix: Token that begins a text.
        tell: Called behind each batch with the rows that this rank has done, and with all of its rows.
    """

    def __init__(self, model: Trained, backend: Backend, ranks: Ranks) -> None:
        self.model, self._ranks = model, ranks
        _, self.length = model.config.longest_sequence
        begin = tuple(model.tokenizer.encode("").ids) or tuple(sorted(model.ends)[:1])
        if not begin:
            raise ConfigError(f"{model.place}: its tokenizer has no token that begins or ends a text, which eval needs")
        self.prefix = begin[-1]
        model.refuse_foreign(max(model.tokenizer.get_vocab(with_added_tokens=True).values()))
        self._decoder = Decoder(model.open(backend, self.length, ranks.mesh), backend.put)
        self._put = backend.put
        self.tell: Callable[[int, int], None] = lambda done, number: None
        self._reports = ranks.mesh.tp.rank == 0

    def likelihoods(
        self, pairs: Sequence[tuple[str, str]], done: Callable[[int, Likelihood], None] = lambda number, found: None
    ) -> list[Likelihood]:
        """Log-likelihoods of continuations.

        Args:
            pairs: Contexts, perhaps empty, and continuations. Of a context that is too long, the end is used.
            done: Called with each pair that this tensor parallel group has scored, on its first rank.
        """
        return self._totals([self.rows(*pair) for pair in pairs], done)

    def rolling(
        self, texts: Sequence[str], done: Callable[[int, Likelihood], None] = lambda number, found: None
    ) -> list[Likelihood]:
        """Log-likelihoods of whole texts, each token after as many earlier ones as `windows` gives it.

        Args:
            texts: The texts.
            done: Called with each text that this tensor parallel group has scored, on its first rank.
        """
        found = (self.model.tokenizer.encode(text).ids for text in texts)
        return self._totals([list(windows([self.prefix, *ids], len(ids), self.length)) for ids in found], done)

    def rows(self, context: str, continuation: str) -> list[Row]:
        """Rows of tokens that score a continuation; several if the continuation alone exceeds the model's length.

        A context and its continuation are encoded together, since a tokenizer may join characters of both. Spaces
        between them belong to the continuation.
        """
        tokenizer = self.model.tokenizer
        if not context.strip():
            continuation = context + continuation
            ids = tokenizer.encode(continuation, add_special_tokens=False).ids
            known = [self.prefix]
            if ids[:1] == known:
                ids = ids[1:]
            return list(windows([*known, *ids], len(ids), self.length))
        known = tokenizer.encode(context.rstrip()).ids or [self.prefix]
        scored = tokenizer.encode(context + continuation).ids[len(known) :]
        # Where a tokenizer joins all of the continuation to the context, the continuation is encoded by itself.
        scored = scored or tokenizer.encode(continuation, add_special_tokens=False).ids
        return list(windows([*known, *scored], len(scored), self.length))

    def continuations(
        self,
        requests: Sequence[tuple[str, int, tuple[str, ...]]],
        sampling: Sampling,
        done: Callable[[int, str], None] = lambda number, text: None,
        *,
        seed: int = 0,
    ) -> list[str]:
        """Continue texts until a stop text, the model's end token, or a number of tokens.

        Equal texts are continued independently: tasks that count passes in k samples repeat a text.

        Args:
            requests: Text, most tokens to add, and stop texts. Of a text that is too long, the end is used.
            sampling: Rule by which each token is drawn.
            done: Called with each text that this tensor parallel group has continued, on its first rank.
            seed: Seed of the draws; equal texts draw from adjacent streams.
        """
        tokenizer, ends = self.model.tokenizer, self.model.ends
        texts, seen = [], Counter[str]()
        for prompt, wanted, stops in requests:
            count = min(wanted, self.length - 1)
            ids = tokenizer.encode(prompt).ids[-(self.length - count) :] or [self.prefix]
            texts.append(
                Continuation(ids, count, tokenizer, ends, stops=stops, seed=(seed << 20) % (1 << 62) + seen[prompt])
            )
            seen.update([prompt])
        mine: dict[int, str] = {}
        for batch in self._shared([len(text.ids) for text in texts]):
            for _ in extend(self._decoder, [texts[number] for number in batch], sampling):
                pass
            mine |= {number: texts[number].text for number in batch}
            for number in batch if self._reports else ():
                done(number, mine[number])
        merged = {number: text for found in self._ranks.gather(mine) for number, text in found.items()}
        return [merged[number] for number in range(len(texts))]

    def _totals(self, groups: Sequence[Sequence[Row]], done: Callable[[int, Likelihood], None]) -> list[Likelihood]:
        """Sums over the rows of each group; a group whose rows several ranks score is not told to `done`."""
        flat = [(number, row) for number, rows in enumerate(groups) for row in rows]
        left = [len(rows) for rows in groups]
        totals = [Likelihood(0.0, True) for _ in groups]
        mine: dict[int, Likelihood] = {}
        for batch in self._shared([len(row.ids) for _, row in flat]):
            found = self._score([flat[number][1] for number in batch])
            mine |= dict(zip(batch, found, strict=True))
            for at, likelihood in zip(batch, found, strict=True):
                owner = flat[at][0]
                left[owner] = left[owner] - 1
                totals[owner] = totals[owner] + likelihood
                if not left[owner] and self._reports:
                    done(owner, totals[owner])
        merged = {at: likelihood for part in self._ranks.gather(mine) for at, likelihood in part.items()}
        totals = [Likelihood(0.0, True) for _ in groups]
        for at, (number, _) in enumerate(flat):
            totals[number] = totals[number] + merged[at]
        return totals

    def _shared(self, lengths: Sequence[int]) -> Iterator[list[int]]:
        """Numbers of the rows of each batch of this rank, longest rows first; a token of each row has its logits."""
        order = sorted(range(len(lengths)), key=lambda number: (-lengths[number], number))
        size = min(MAX_ROWS, self._chunk())
        batches = [order[start : start + size] for start in range(0, len(order), size)]
        mesh = self._ranks.mesh
        mine, done = batches[mesh.dp.rank :: mesh.dp.size], 0
        for batch in mine:
            yield batch
            done += len(batch)
            self.tell(done, sum(map(len, mine)))

    def _chunk(self) -> int:
        """Tokens whose logits are computed at once."""
        return max(1, LOGITS // self.model.config.vocab_size)

    def _score(self, rows: Sequence[Row]) -> list[Likelihood]:
        """Log-likelihoods of one batch."""
        pieces = [row.ids[:-1] for row in rows]
        longest = max(map(len, pieces))
        self._decoder.begin(len(rows), capacity=1 << (longest - 1).bit_length())
        targets = torch.zeros(len(rows), longest, dtype=torch.int64)
        is_scored = torch.zeros(len(rows), longest, dtype=torch.bool)
        for number, row in enumerate(rows):
            targets[number, : len(row.ids) - 1] = torch.tensor(row.ids[1:])
            is_scored[number, len(row.ids) - 1 - row.num_scored : len(row.ids) - 1] = True
        nats = torch.zeros(len(rows), longest, dtype=torch.float64)
        is_best = torch.ones(len(rows), longest, dtype=torch.bool)
        for start, logits in self._decoder.read(pieces, self._chunk()):
            part = slice(start, start + logits.shape[1])
            wanted = self._put(targets[:, part])
            nats[:, part], is_best[:, part] = _judge(logits, wanted)
        sums = nats.masked_fill(~is_scored, 0.0).sum(1).tolist()
        greedy = (is_best | ~is_scored).all(1).tolist()
        if not all(map(math.isfinite, sums)):
            raise DivergedError("the model's scores are not finite: its weights diverged; take an earlier checkpoint")
        return [Likelihood(total, best) for total, best in zip(sums, greedy, strict=True)]


def _judge(logits: Tensor, targets: Tensor) -> tuple[Tensor, Tensor]:
    """Log-probability of each target, and True where the target is the likeliest token: (B, S, V), (B, S) to (B, S)."""
    chosen = logits.gather(-1, targets[..., None])[..., 0].float()
    return (chosen - logits.float().logsumexp(-1)).cpu(), (logits.argmax(-1) == targets).cpu()


def windows(ids: Sequence[int], num_scored: int, length: int) -> Iterator[Row]:
    """Rows that score the last tokens of a sequence once, each within the model's length.

    Scored tokens are divided into pieces of `length` tokens. Each piece comes after as many earlier tokens as fit.

    Args:
        ids: Tokens that are known, at least one, then tokens that are scored.
        num_scored: Number of tokens that are scored.
        length: Tokens that the model reads at most.

    Source: `get_rolling_token_windows` with a context of one token, of the lm-evaluation-harness.
    """
    first = len(ids) - num_scored
    for start in range(first, len(ids), length):
        end = min(start + length, len(ids))
        yield Row(tuple(ids[max(0, end - length - 1) : end]), end - start)
