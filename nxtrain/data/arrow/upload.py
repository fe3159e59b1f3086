"""Upload of a prepared corpus to object storage, from which runs on other machines read it."""

from __future__ import annotations

from nxtrain.common.errors import ConfigError
from nxtrain.common.io.bucket import BucketPath
from nxtrain.common.io.checksummed_file import digest_of
from nxtrain.common.io.object_store import BucketStore, content_of
from nxtrain.common.process.progress import Progress
from nxtrain.data.arrow.work import Outputs


def upload(outputs: Outputs, root: BucketPath) -> bool:
    """Upload a finished corpus below an address, with the same file names as on the disk.

    The summary is uploaded last, so that an equal summary in the bucket means that the whole corpus is there. Each
    block is verified when it is read, and the service verifies the received bytes.

    Args:
        root: Prefix for the corpus, its summary and its bad rows.

    Returns:
        True if any file was uploaded.

    Raises:
        ConfigError: The prefix has another corpus with this name.
        BackendError: The service refuses the request, or its client is not installed.
        StorageError: The storage fails.
    """
    store, summary = BucketStore(root), content_of(outputs.summary)
    there = store.sizes()
    if outputs.summary.name in there:
        if content_of(root / outputs.summary.name) == summary:
            return False
        reason = f"{root / outputs.summary.name} is of another corpus, and a run may read it"
        raise ConfigError(f"--upload {root}: {reason}; choose another prefix or --out, or delete it there first")
    files = [outputs.out]
    if outputs.out.is_dir():
        files = sorted(path for path in outputs.out.iterdir() if path.is_file())
    if outputs.bad.exists():
        files.append(outputs.bad)
    with Progress(f"copying {outputs.out.name} to {root}", sum(file.stat().st_size for file in files)) as progress:
        done = 0
        for file in files:
            store.upload(file.relative_to(outputs.out.parent).as_posix(), file, digest_of(file))
            done += file.stat().st_size
            progress.show(done)
    store.put(outputs.summary.name, summary)
    return True
