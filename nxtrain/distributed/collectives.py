"""How ranks talk to each other, whatever carries it."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Generic, Literal, Protocol, TypeVar

from nxtrain.mesh import Axis

if TYPE_CHECKING:
    import torch
    from torch import Tensor

Result_co = TypeVar("Result_co", covariant=True)


class Pending(Protocol[Result_co]):
    """A collective under way."""

    def wait(self) -> Result_co:
        """Block until the result may be used, and return it; called once."""
        ...


@dataclass(frozen=True)
class Done(Generic[Result_co]):
    """A collective that needs no waiting."""

    result: Result_co

    def wait(self) -> Result_co:
        """Return the result."""
        return self.result


Op = Literal["sum", "max"]


class Collectives(ABC):
    """Communication between the ranks of an axis. An axis of size 1 is the identity and costs nothing.

    Inputs are contiguous, and equal in shape and type on all ranks of a group. That of `all_reduce` belongs to the
    collective, which may work in place: its values are undefined afterwards. All others keep their values. On an axis
    of size 1 a result may be the input itself. Every rank calls the same collectives in the same order.

    Attributes:
        lazy: What is started is recorded, and runs at the next step boundary.
    """

    lazy: bool = False

    def part(self) -> None:
        """Let nothing of the values of earlier collectives reach later ones, but by what these are given."""

    def all_reduce(self, x: Tensor, axis: Axis, op: Op = "sum") -> Tensor:
        """Reduce over the axis; may overwrite `x`."""
        return self.start_all_reduce(x, axis, op).wait()

    def all_gather(self, x: Tensor, axis: Axis) -> Tensor:
        """Concatenate every rank's `x` along dimension 0, in rank order: (n, ...) to (n * size, ...)."""
        return self.start_all_gather(x, axis).wait()

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
        """Give `x` to a neighbour on the axis, who starts to receive it; `x` stays as it is until waited for.

        Two ranks meet in each transfer: they start those between them in the same order.

        Args:
            x: At least one dimension.
            axis: Not of size 1.
            to: Position of the other on this rank's group of the axis.

        Raises:
            LostPeerError: The other died; here, or when waited for.
            HangError: It did not come in time; likewise.
        """

    @abstractmethod
    def start_receive(self, like: Tensor, axis: Axis, source: int) -> Pending[Tensor]:
        """Take what the neighbour at position `source` sends; see `start_send`.

        Args:
            like: Of the shape and type of what comes. May take part in the transfer, and keeps its values.
            axis, source: Where from.
        """

    @abstractmethod
    def exchange(self, x: Tensor, axis: Axis, peer: int) -> Tensor:
        """Swap tensors of one shape and type with a neighbour on the axis, which calls this too; see `start_send`."""

    @abstractmethod
    def barrier(self) -> None:
        """Wait until every rank of the world is here."""
