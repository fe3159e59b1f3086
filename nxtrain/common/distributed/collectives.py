"""Interface of collectives and transfers between ranks, for any transport."""

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
    """A collective under way."""

    def wait(self) -> Result_co:
        """Block until the result may be used, and return the result; called once."""
        ...


@dataclass(frozen=True)
class Done(Generic[Result_co]):
    """Result of a collective that needs no waiting."""

    result: Result_co

    def wait(self) -> Result_co:
        """Return the result."""
        return self.result


@dataclass(frozen=True)
class PendingParts:
    """A collective of one packed tensor under way, whose result is the tensors of these shapes.

    Args:
        packed: The collective.
        shapes: Shapes of the packed tensors.
        dim: Dimension along which they lie one after the other.
    """

    packed: Pending[Tensor]
    shapes: Sequence[torch.Size]
    dim: int = 0

    def wait(self) -> list[Tensor]:
        """Wait for the packed tensor, and return the views of its parts."""
        parts = self.packed.wait().split([shape.numel() for shape in self.shapes], dim=self.dim)
        return [part.view(shape) for part, shape in zip(parts, self.shapes, strict=True)]


Op = Literal["sum", "max"]


@dataclass(frozen=True)
class RowCounts:
    """Rows of the blocks of an all-to-all, for each rank of the axis in order.

    Args:
        sent: Rows that this rank sends to each rank.
        received: Rows that this rank receives from each rank.
    """

    sent: tuple[int, ...]
    received: tuple[int, ...]

    @property
    def back(self) -> RowCounts:
        """Rows of the all-to-all that returns the blocks."""
        return RowCounts(self.received, self.sent)


class Collectives(ABC):
    """Communication between the ranks of an axis. An axis of size 1 is the identity and costs nothing.

    Inputs are contiguous, and equal in shape and type on all ranks of a group. The rows of `all_to_all` may differ.
    `all_reduce` may work in place: the values of its input are undefined afterwards. All other inputs keep their
    values. On an axis of size 1 a result may be the input itself. Every rank calls the same collectives in the same
    order.

    Attributes:
        lazy: Collectives are recorded when they are started, and run at the next step boundary.
    """

    lazy: bool = False

    def part(self) -> None:
        """Break hidden dependencies between collectives, so that a NaN in one result cannot spread to later results."""

    def all_reduce(self, x: Tensor, axis: Axis, op: Op = "sum") -> Tensor:
        """Reduce over the axis; may overwrite `x`."""
        return self.start_all_reduce(x, axis, op).wait()

    def all_gather(self, x: Tensor, axis: Axis) -> Tensor:
        """Concatenate every rank's `x` along dimension 0, in rank order: (n, ...) to (n * size, ...)."""
        return self.start_all_gather(x, axis).wait()

    def all_to_all(self, x: Tensor, axis: Axis, rows: RowCounts | None = None) -> Tensor:
        """Send a block of `x` to each rank of the axis, and concatenate the blocks received, in rank order.

        Args:
            x: (n, ...), the blocks one after the other along dimension 0.
            rows: Rows of each block; None: all blocks of all ranks have n / size rows.
        """
        return self.start_all_to_all(x, axis, rows).wait()

    def reduce_scatter(self, x: Tensor, axis: Axis) -> Tensor:
        """Sum over the axis and keep this rank's slice of dimension 0: (n * size, ...) to (n, ...)."""
        return self.start_reduce_scatter(x, axis).wait()

    @abstractmethod
    def start_all_reduce(self, x: Tensor, axis: Axis, op: Op = "sum") -> Pending[Tensor]:
        """`all_reduce` that other work may overlap; may overwrite `x`."""

    @abstractmethod
    def start_all_gather(self, x: Tensor, axis: Axis) -> Pending[Tensor]:
        """`all_gather` that other work may overlap."""

    @abstractmethod
    def start_all_to_all(self, x: Tensor, axis: Axis, rows: RowCounts | None = None) -> Pending[Tensor]:
        """`all_to_all` that other work may overlap.

        A lazy device has no blocks of different sizes, since its graphs would depend on them.
        """

    @abstractmethod
    def start_reduce_scatter(self, x: Tensor, axis: Axis, scale: float = 1.0) -> Pending[Tensor]:
        """`reduce_scatter` that other work may overlap, times `scale`."""

    @abstractmethod
    def start_all_reduce_bucket(
        self, tensors: Sequence[Tensor], axis: Axis, dtype: torch.dtype, scale: float = 1.0
    ) -> Pending[list[Tensor]]:
        """Sum tensors over the axis in a type, times `scale`, in one collective that other work may overlap.

        The tensors keep their values, and may be freed at once.
        """

    @abstractmethod
    def start_send(self, x: Tensor, axis: Axis, to: int) -> Pending[None]:
        """Send `x` to a neighbour on the axis, which starts to receive; the caller keeps `x` unchanged until `wait`.

        Both ranks start the transfers between them in the same order.

        Args:
            x: Tensor of at least one dimension.
            axis: Axis of size 2 or more.
            to: Position of the other rank in this rank's group of the axis.

        Raises:
            LostPeerError: The other rank died; raised at once or by `wait`.
            HangError: The other rank did not come in time; raised at once or by `wait`.
        """

    @abstractmethod
    def start_receive(self, like: Tensor, axis: Axis, source: int) -> Pending[Tensor]:
        """Receive a tensor from the neighbour at position `source`; see `start_send`.

        Args:
            like: Tensor of the shape and type that is sent. The transfer may use the tensor, but keeps its values.
        """

    @abstractmethod
    def exchange(self, x: Tensor, axis: Axis, peer: int) -> Tensor:
        """Swap tensors of equal shape and type with a neighbour, which calls `exchange` too; see `start_send`."""

    @abstractmethod
    def start_shift(self, x: Tensor, axis: Axis, hops: int = 1) -> Pending[Tensor]:
        """Send `x` to the rank `hops` further along the axis, as a ring; receive the tensor of the rank `hops` before.

        The caller keeps `x` unchanged until `wait`.
        """

    @abstractmethod
    def barrier(self) -> None:
        """Wait until every rank of the world has called `barrier`."""
