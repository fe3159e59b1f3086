"""Interface of collectives and point-to-point transfers between ranks, for any transport."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Generic, Literal, Protocol, TypeVar

from nxtrain.common.mesh import Axis

if TYPE_CHECKING:
    import torch
    from torch import Tensor

Result_co = TypeVar("Result_co", covariant=True)


class Pending(Protocol[Result_co]):
    """A collective or transfer in progress."""

    def wait(self) -> Result_co:
        """Block until the result is ready, and return it. May be called only once."""
        ...


@dataclass(frozen=True)
class Done(Generic[Result_co]):
    """Result of a collective that is already complete."""

    result: Result_co

    def wait(self) -> Result_co:
        """Return the result."""
        return self.result


@dataclass(frozen=True)
class PendingParts:
    """A pending collective of several tensors packed in one, whose result is the list of unpacked tensors.

    Args:
        packed: The pending collective of the packed tensor.
        shapes: Shape of each tensor.
        dim: Dimension along which the tensors are concatenated.
    """

    packed: Pending[Tensor]
    shapes: Sequence[torch.Size]
    dim: int = 0

    def wait(self) -> list[Tensor]:
        """Wait for the packed tensor, and return one view for each tensor in it."""
        parts = self.packed.wait().split([shape.numel() for shape in self.shapes], dim=self.dim)
        return [part.view(shape) for part, shape in zip(parts, self.shapes, strict=True)]


Op = Literal["sum", "max"]


@dataclass(frozen=True)
class RowCounts:
    """Number of rows that an all-to-all sends to and receives from each rank of the axis, in rank order.

    Args:
        sent: Rows that this rank sends to each rank.
        received: Rows that this rank receives from each rank.
    """

    sent: tuple[int, ...]
    received: tuple[int, ...]

    @property
    def back(self) -> RowCounts:
        """Row counts of the reverse all-to-all, which returns the rows to their senders."""
        return RowCounts(self.received, self.sent)


class Collectives(ABC):
    """Collectives and transfers between the ranks of an axis. On an axis of size 1, every collective is the identity.

    Inputs are contiguous, and equal in shape and dtype on all ranks of a group. Only `all_to_all` with `rows` allows
    different numbers of rows. `all_reduce` may work in place, so that the values of its input are undefined afterwards.
    All other inputs keep their values. On an axis of size 1, a result may be the input itself. Every rank calls the
    same collectives in the same order.

    Attributes:
        lazy: A started collective is only recorded, and runs at the next step boundary.
    """

    lazy: bool = False

    def part(self) -> None:
        """Cut spurious dependencies between collectives, so that a NaN in one result cannot spread to later results."""

    def all_reduce(self, x: Tensor, axis: Axis, op: Op = "sum") -> Tensor:
        """All-reduce `x` over the axis; may overwrite `x`."""
        return self.start_all_reduce(x, axis, op).wait()

    def all_gather(self, x: Tensor, axis: Axis) -> Tensor:
        """All-gather: concatenate each rank's `x` along dimension 0 in rank order.

        The shapes are (n, ...) to (n * size, ...).
        """
        return self.start_all_gather(x, axis).wait()

    def all_to_all(self, x: Tensor, axis: Axis, rows: RowCounts | None = None) -> Tensor:
        """All-to-all: send one block of `x` to each rank of the axis, and concatenate the received blocks by rank.

        Args:
            x: (n, ...), the blocks one after the other along dimension 0.
            rows: Rows of each block; None: all blocks of all ranks have n / size rows.
        """
        return self.start_all_to_all(x, axis, rows).wait()

    def reduce_scatter(self, x: Tensor, axis: Axis) -> Tensor:
        """Reduce-scatter: sum `x` over the axis, and keep this rank's slice of dimension 0.

        The shapes are (n * size, ...) to (n, ...).
        """
        return self.start_reduce_scatter(x, axis).wait()

    @abstractmethod
    def start_all_reduce(self, x: Tensor, axis: Axis, op: Op = "sum") -> Pending[Tensor]:
        """Start an `all_reduce` that overlaps with other computation; may overwrite `x`."""

    @abstractmethod
    def start_all_gather(self, x: Tensor, axis: Axis) -> Pending[Tensor]:
        """Start an `all_gather` that overlaps with other computation."""

    @abstractmethod
    def start_all_to_all(self, x: Tensor, axis: Axis, rows: RowCounts | None = None) -> Pending[Tensor]:
        """Start an `all_to_all` that overlaps with other computation.

        A lazy device supports only blocks of equal size, since its graphs would depend on the sizes.
        """

    @abstractmethod
    def start_reduce_scatter(self, x: Tensor, axis: Axis, scale: float = 1.0) -> Pending[Tensor]:
        """Start a `reduce_scatter` that overlaps with other computation; the result is multiplied by `scale`."""

    @abstractmethod
    def start_all_reduce_bucket(
        self, tensors: Sequence[Tensor], axis: Axis, dtype: torch.dtype, scale: float = 1.0
    ) -> Pending[list[Tensor]]:
        """Start one all-reduce sum of several tensors, packed in one bucket of type `dtype`.

        The sums are multiplied by `scale`. The tensors keep their values, and may be freed at once.
        """

    @abstractmethod
    def start_send(self, x: Tensor, axis: Axis, to: int) -> Pending[None]:
        """Start to send `x` to another rank of the axis, which calls `start_receive`.

        Both ranks start the transfers between them in the same order.

        Args:
            x: Tensor of at least one dimension.
            axis: Axis of size 2 or more.
            to: Position of the other rank in this rank's group of the axis.

        Raises:
            LostPeerError: The other rank died; raised at once or by `wait`.
            HangError: The other rank did not take part before the timeout; raised at once or by `wait`.
        """

    @abstractmethod
    def start_receive(self, like: Tensor, axis: Axis, source: int) -> Pending[Tensor]:
        """Start to receive a tensor from the rank at position `source` of the axis; see `start_send`.

        Args:
            like: Tensor with the shape and dtype of the sent tensor. Its values stay unchanged.
        """

    @abstractmethod
    def exchange(self, x: Tensor, axis: Axis, peer: int) -> Tensor:
        """Swap tensors of equal shape and dtype with another rank of the axis, which also calls `exchange`.

        See `start_send` for the errors.
        """

    @abstractmethod
    def start_shift(self, x: Tensor, axis: Axis, hops: int = 1) -> Pending[Tensor]:
        """Start a ring shift: send `x` to the rank `hops` after this one, and receive from the rank `hops` before.

        The caller keeps `x` unchanged until `wait`.
        """

    @abstractmethod
    def barrier(self) -> None:
        """Wait until every rank of the world has called `barrier`."""
