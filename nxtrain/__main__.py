"""`python -m nxtrain` is the command `nxtrain`, so that torchrun can start it by module name."""

from __future__ import annotations

from nxtrain.cli import main

main()
