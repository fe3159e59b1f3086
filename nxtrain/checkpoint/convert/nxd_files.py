"""Files of NeuronX Distributed's checkpoints: finding checkpoints, and reading rank files with memory-mapped tensors.

A checkpoint is a subfolder, called a tag. A tag has `checkpoint` (save begun), `model/` and `optim/` with a file per
rank, `scheduler.pt`, `user_content.pt` and `done` (save ended). With `use_xser`, a rank's file refers to tensors in
separate files.

Source: `save_checkpoint` of neuronx-distributed 0.18, trainer/checkpoint.py.
"""

from __future__ import annotations

import pickle
import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import lru_cache
from itertools import product
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from nxtrain.common.errors import CheckpointError
from nxtrain.common.io.regular import require_regular

BEGUN, DONE = "checkpoint", "done"
MODEL_DIR, OPTIM_DIR = "model", "optim"
SCHEDULER, USER_CONTENT = "scheduler.pt", "user_content.pt"

MEANS = ("exp_avg", "exp_avg_sq")
"""Names of AdamW's running means, equal in nxtrain and in NxD."""

MASTER, MASTERS = "master", "sharded_master_weights"
"""Names of the float32 master weights in nxtrain and in NxD."""

BASE_STATE = "base_state"
"""Key of the optimizer state in NxD's files with ZeRO-1; other files do not have the key."""

_RANK_FILE = re.compile(r"dp_rank_(\d+)_tp_rank_(\d+)_pp_rank_(\d+)\.pt")


def rank_file(*, dp: int = 0, tp: int, pp: int) -> str:
    """File name of a rank in NxD's checkpoints."""
    return f"dp_rank_{dp:02d}_tp_rank_{tp:02d}_pp_rank_{pp:02d}.pt"


def find_tag(path: Path) -> Path:
    """Find an NxD checkpoint: the path itself, or the newest finished checkpoint in the folder.

    Raises:
        CheckpointError: The checkpoint is incomplete, or the folder has no finished checkpoint.
    """
    if (path / MODEL_DIR).is_dir():
        if (path / BEGUN).exists() and not (path / DONE).exists():  # converters write neither
            raise CheckpointError(f"{path} is incomplete: NeuronX Distributed did not write {DONE}; use another tag")
        return path
    done = sorted(path.glob(f"*/{DONE}"), key=lambda file: file.stat().st_mtime)
    tags = [file.parent for file in done if (file.parent / MODEL_DIR).is_dir()]
    if not tags:
        raise CheckpointError(
            f"{path} contains no finished checkpoint of NeuronX Distributed: neither {MODEL_DIR}/ nor <tag>/{DONE}"
        )
    return tags[-1]


@dataclass(frozen=True)
class Grid:
    """Grid of NxD's rank files, one for each combination of dp, tp and pp rank."""

    folder: Path
    dp: int
    tp: int
    pp: int

    @staticmethod
    def of(folder: Path) -> Grid:
        """Derive the parallel degrees from the names of a folder's rank files.

        Raises:
            CheckpointError: Files are missing or have unknown names.
        """
        names = sorted(file.name for file in folder.iterdir() if file.suffix == ".pt" and file.is_file())
        names = [name for name in names if not name.endswith(".info.pt")]
        ranks: list[tuple[int, ...]] = []
        for name in names:
            match = _RANK_FILE.fullmatch(name)
            if match is None:
                hint = ""
                if "_ep_rank_" in name:
                    hint = "; experts are not supported"
                raise CheckpointError(f"{folder} holds {name}, which is not a rank file of a Llama model{hint}")
            ranks.append(tuple(map(int, match.groups())))
        if not names and (folder / ".metadata").exists():
            raise CheckpointError(
                f"{folder} was saved with use_zero1_dcp, which is not supported; convert the weights by --weights-only"
            )
        if not names:
            raise CheckpointError(f"{folder} holds no rank file, such as {rank_file(tp=0, pp=0)}")
        dp, tp, pp = (max(numbers) + 1 for numbers in zip(*ranks, strict=True))
        grid = Grid(folder, dp, tp, pp)
        wanted = [rank_file(dp=d, tp=t, pp=p) for p, t, d in product(range(pp), range(tp), range(dp))]
        missing = [name for name in wanted if name not in names]
        if missing:
            raise CheckpointError(f"{folder} lacks {len(missing)} of {len(wanted)} rank files, such as {missing[0]}")
        return grid

    def reader(self) -> Callable[[int, int, int], Mapping[str, Any]]:
        """Return a function that opens rank files by dp, tp and pp rank, and caches the files of about one stage."""

        @lru_cache(maxsize=self.dp * self.tp)
        def opened(dp: int, tp: int, pp: int) -> Mapping[str, Any]:
            return open_file(self.folder / rank_file(dp=dp, tp=tp, pp=pp))

        return opened


class TensorReference:
    """Placeholder for a tensor in files of torch-xla's serialization; `tid` is the number of the tensor's own file."""

    tid: int


def open_file(path: Path) -> dict[str, Any]:
    """Open an NxD file: tensors are memory-mapped, and pickled code is not executed."""
    content = _load(path)
    if not isinstance(content, dict):
        raise CheckpointError(f"{path} does not contain a dictionary, as a file of NeuronX Distributed must")
    return {key: _resolved(value, path) for key, value in content.items()}


def _resolved(value: Any, path: Path) -> Any:
    if isinstance(value, dict):
        return {key: _resolved(part, path) for key, part in value.items()}
    if isinstance(value, TensorReference):
        if not isinstance(value.tid, int):
            raise CheckpointError(f"{path} refers to tensor {value.tid!r}, but tensors have integer numbers")
        tensor = _load(path.with_name(f"{path.name}.tensors") / f"tensor_{value.tid}.pt")
        if not isinstance(tensor, Tensor):
            raise CheckpointError(
                f"{path} refers to tensor {value.tid}, but the file of tensor {value.tid} contains no tensor"
            )
        return tensor
    return value


def _load(path: Path) -> Any:
    references: list[Any] = [(TensorReference, "torch_xla.utils.serialization.TensorReference")]
    try:
        require_regular(path)
        with torch.serialization.safe_globals(references):
            return torch.load(path, map_location="cpu", mmap=True, weights_only=True)
    except (OSError, RuntimeError, EOFError, pickle.UnpicklingError) as error:
        first = str(error).splitlines()[0]
        raise CheckpointError(f"cannot read {path}: {first}") from error
