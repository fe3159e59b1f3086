"""`python -m nxtrain` is the command `nxtrain`, so that torchrun can start it by module name."""

from __future__ import annotations

from nxtrain.train.recovery import stacks


def main() -> None:
    """Run the command, which shows its stacks whenever it is asked to, from here on."""
    stacks.answer_requests()
    from nxtrain.cli import main  # its imports take a while

    main()


if __name__ == "__main__":
    main()
