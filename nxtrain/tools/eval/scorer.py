"""Scorer of a trained model: log-likelihoods of continuations and whole texts, and text generation.

Token sequences are sorted by length and scored in batches whose logits have a bounded size. Whole batches are divided
over the data parallel ranks. So a sequence has the same batch for any number of ranks. On CPUs its score is then
bitwise equal. Tensor parallel ranks share a model, and all of them get the scores.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import accumulate
from typing import TypeVar

import torch
from torch import Tensor

from nxtrain.backends.base import Backend
from nxtrain.common.distributed.agreement import Ranks
from nxtrain.common.errors import ConfigError, DivergedError
from nxtrain.common.process.progress import Progress
from nxtrain.nn.decoding import Decoder
from nxtrain.tools.eval.generate import Continuation, Sampling, extend
from nxtrain.tools.eval.trained import Trained

T = TypeVar("T")

LOGITS = 1 << 25  # maximum number of logits computed at once; 128 MiB in float32
MAX_ROWS = 32  # maximum number of rows in a batch


@dataclass(frozen=True)
class Row:
    """Token sequence whose last `num_scored` tokens are scored."""

    ids: tuple[int, ...]  # tokens of the context, then tokens that are scored
    num_scored: int  # number of scored tokens, less than the length of `ids`


@dataclass(frozen=True)
class Likelihood:
    """Log-likelihood of the scored tokens of a sequence."""

    nats: float  # sum of the natural logarithms of the tokens' probabilities
    is_greedy: bool  # True if each scored token is the most likely token at its position

    def __add__(self, other: Likelihood) -> Likelihood:
        return Likelihood(self.nats + other.nats, self.is_greedy and other.is_greedy)


class Scorer:
    """Trained model that scores and continues texts.

    Every rank creates a scorer, and calls its methods with the same texts.

    Attributes:
        length: Maximum sequence length in tokens.
        prefix: Token that begins a text.
        progress: Progress output, which gets the number of rows done on this rank after each batch.
    """

    def __init__(self, model: Trained, backend: Backend, ranks: Ranks) -> None:
        self.model, self.ranks = model, ranks
        # As in the lm-evaluation-harness, even if rope_scaling extends the length. Dynamic scaling begins beyond this.
        _, longest = model.config.longest_sequence
        self.length = min(longest, model.config.max_position_embeddings)
        prefix = model.prefix
        if prefix is None:
            prefix = min(model.ends, default=None)
        if prefix is None:
            raise ConfigError(
                f"the tokenizer of {model.location} has no begin-of-text or end-of-text token, which eval needs"
            )
        self.prefix = prefix
        self._prefix_text = model.tokenizer.decode([prefix], skip_special_tokens=False)
        model.refuse_foreign(max(model.tokenizer.get_vocab(with_added_tokens=True).values()))
        self._decoder = Decoder(model.open(backend, self.length, ranks.mesh), backend.put)
        self._put = backend.put
        self.progress: Progress | None = None

    def likelihoods(
        self,
        pairs: Sequence[tuple[str, str]],
        done: Callable[[int, Likelihood], None] = lambda number, likelihood: None,
    ) -> list[Likelihood]:
        """Compute the log-likelihoods of continuations.

        Args:
            pairs: Contexts, possibly empty, and continuations. A context that is too long is cut at its start.
            done: Called on every rank with the index and the score of each pair, as soon as the pair is scored.
        """
        return self.of_rows([self.rows(*pair) for pair in pairs], done)

    def rolling(
        self, texts: Sequence[str], done: Callable[[int, Likelihood], None] = lambda number, likelihood: None
    ) -> list[Likelihood]:
        """Compute the log-likelihoods of whole texts, with the context of each token given by `windows`."""
        groups = []
        for text in texts:
            ids = self._ids(text)
            groups.append(list(windows([self.prefix, *ids], len(ids), self.length)))
        return self.of_rows(groups, done)

    def rows(self, context: str, continuation: str) -> list[Row]:
        """Build the token sequences that score a continuation.

        There are several if the continuation alone exceeds the model's maximum length. Context and continuation are
        encoded together, since a tokenizer may join characters of both. Spaces between them belong to the continuation.
        """
        tokenizer = self.model.tokenizer
        if not context.strip():
            continuation = context + continuation
            ids = tokenizer.encode(continuation, add_special_tokens=False).ids
            prefix_ids = [self.prefix]
            if ids[:1] == prefix_ids:
                ids = ids[1:]
            return list(windows([*prefix_ids, *ids], len(ids), self.length))
        prefix_ids = self._ids(context.rstrip()) or [self.prefix]
        scored = self._ids(context + continuation)[len(prefix_ids) :]
        # If a tokenizer merges the whole continuation into the context's tokens, it is encoded by itself.
        scored = scored or tokenizer.encode(continuation, add_special_tokens=False).ids
        return list(windows([*prefix_ids, *scored], len(scored), self.length))

    def _ids(self, text: str) -> list[int]:
        """Token ids of a text; nothing is added before a text that begins with the prefix, as in the harness."""
        begins = bool(self._prefix_text) and text.startswith(self._prefix_text)
        ids: list[int] = self.model.tokenizer.encode(text, add_special_tokens=not begins).ids
        return ids

    def continuations(
        self,
        requests: Sequence[tuple[str, int, tuple[str, ...]]],
        sampling: Sampling,
        done: Callable[[int, str], None] = lambda number, text: None,
        *,
        seed: int = 0,
    ) -> list[str]:
        """Continue texts until a stop text, the model's end-of-text token, or a number of tokens.

        Equal texts are continued independently, since tasks that measure pass@k repeat a text. Continuations are
        decoded without the text before, as in the lm-evaluation-harness; see `Continuation`.

        Args:
            requests: Text, maximum number of new tokens, and stop texts. A text that is too long is cut at its start.
            done: Called on every rank with the index and the continuation of each text, as soon as it is complete.
            seed: Seed of the sampling; equal texts draw from adjacent random streams.
        """
        tokenizer = self.model.tokenizer
        texts = []
        seen = Counter[str]()
        for prompt, wanted, stops in requests:
            count = min(wanted, self.length - 1)
            ids = self._ids(prompt)[-(self.length - count) :] or [self.prefix]
            stream = (seed << 20) % (1 << 62) + seen[prompt]
            ends = self.model.ends
            texts.append(Continuation(ids, count, tokenizer, ends, stops=stops, seed=stream, alone=True))
            seen.update([prompt])
        written: dict[int, str] = {}
        for batch in self._rounds([len(text.ids) for text in texts]):
            if batch:
                for _ in extend(self._decoder, [texts[number] for number in batch], sampling):
                    pass
            new = self._of_all_ranks({number: texts[number].text for number in batch})
            for number, text in new.items():
                done(number, text)
            written |= new
        return [written[number] for number in range(len(texts))]

    def of_rows(
        self, groups: Sequence[Sequence[Row]], done: Callable[[int, Likelihood], None] = lambda number, likelihood: None
    ) -> list[Likelihood]:
        """Sum the log-likelihoods over the rows of each group.

        Args:
            groups: Rows of each text.
            done: Called on every rank with the index and the sum of a group, as soon as all of its rows are scored.

        Raises:
            DivergedError: A score is not finite.
        """
        owners: list[int] = []
        flat: list[Row] = []
        for number, rows in enumerate(groups):
            owners += [number] * len(rows)
            flat += rows
        left = [len(rows) for rows in groups]
        totals = [Likelihood(0.0, True)] * len(groups)
        scores: dict[int, Likelihood] = {}
        first = list(accumulate(left, initial=0))
        for batch in self._rounds([len(row.ids) for row in flat]):
            mine = {}
            if batch:
                mine = dict(zip(batch, self._score([flat[at] for at in batch]), strict=True))
            new = self._of_all_ranks(mine)
            if not all(math.isfinite(score.nats) for score in new.values()):  # equal on every rank
                raise DivergedError(
                    "the model's scores are not finite: its weights diverged; use an earlier checkpoint"
                )
            scores |= new
            for at in new:
                owner = owners[at]
                left[owner] -= 1
                if not left[owner]:  # summed in the order of the rows, whatever the order of the batches
                    for row in range(first[owner], first[owner + 1]):
                        totals[owner] = totals[owner] + scores[row]
                    done(owner, totals[owner])
        return totals

    def _of_all_ranks(self, mine: Mapping[int, T]) -> dict[int, T]:
        """Gather the results of all ranks by index, in the same order on each rank."""
        results: dict[int, T] = {}
        for part in self.ranks.gather(mine):
            results |= part
        return results

    def _rounds(self, lengths: Sequence[int]) -> Iterator[list[int]]:
        """Yield the row indices of this rank's batch in each round, longest rows first.

        All ranks have the same number of rounds. If no batch is left for this rank, its last list is empty. The logits
        of one token per row of a batch fit into `LOGITS`.
        """
        order = sorted(range(len(lengths)), key=lambda number: (-lengths[number], number))
        size = min(MAX_ROWS, self._chunk())
        batches = [order[start : start + size] for start in range(0, len(order), size)]
        dp = self.ranks.mesh.dp
        mine = batches[dp.rank :: dp.size]
        num_rows = sum(len(batch) for batch in mine)
        if len(mine) < math.ceil(len(batches) / dp.size):
            mine.append([])
        done = 0
        for batch in mine:
            yield batch
            done += len(batch)
            if self.progress is not None:
                self.progress.total = num_rows
                self.progress.show(done)

    def _chunk(self) -> int:
        """Maximum number of tokens whose logits are computed at once."""
        return max(1, LOGITS // self.model.config.vocab_size)

    def _score(self, rows: Sequence[Row]) -> list[Likelihood]:
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
        return [Likelihood(total, best) for total, best in zip(sums, greedy, strict=True)]


def _judge(logits: Tensor, targets: Tensor) -> tuple[Tensor, Tensor]:
    """Log-probability of each target token, and True where the target is the most likely token.

    Shapes: logits (B, S, V) and targets (B, S) to two tensors (B, S).
    """
    chosen = logits.gather(-1, targets[..., None])[..., 0].float()
    return (chosen - logits.float().logsumexp(-1)).cpu(), (logits.argmax(-1) == targets).cpu()


def windows(ids: Sequence[int], num_scored: int, length: int) -> Iterator[Row]:
    """Yield rows that together score the last tokens of a sequence once, each within the model's maximum length.

    Scored tokens are divided into pieces of `length` tokens. Each piece has as many earlier tokens as context as fit.

    Source: `get_rolling_token_windows` with a context of one token, of the lm-evaluation-harness.
    """
    first = len(ids) - num_scored
    for start in range(first, len(ids), length):
        end = min(start + length, len(ids))
        yield Row(tuple(ids[max(0, end - length - 1) : end]), end - start)
