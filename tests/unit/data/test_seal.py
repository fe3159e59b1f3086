"""Checksums of prepared corpora: damage in any region is refused or changes nothing, and Arrow's readers see none.

A corpus has text or ids, with or without prompts, in one file or in shards. Each region of its files gets drawn bit
flips and a lost sector of zeros. Whatever training reads of a damaged file is compared with the undamaged one.
"""

from __future__ import annotations

import base64
import json
import struct
import zlib
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.dataset
import pytest
from xxhash import xxh3_64_intdigest

from nxtrain.common.errors import DataError
from nxtrain.data.arrow import preparation, seal
from nxtrain.data.arrow.inspection import inspect_corpus, verify_corpus
from nxtrain.data.arrow.prepared import PreparedCorpus
from nxtrain.data.arrow.seal import BLOCK_BYTES, ENTRY_BYTES, CheckedFile, Sealing
from nxtrain.data.storage import DataFile, read_exactly
from tests.support.corpora import documents, drop_checksums, prepare, texts_of, write_tokenizer

OLD = (
    "c-rk$y-or_5S|N&gq(T>F%%Y;tBJV-`O%KV!otLam{6L7UGyT{C3j0ijfshgl@CBCg%4n9W$knL1eSI<y9{svC3ZGWGR*F`Gqc0@"
    "vDE7IqlN=8LK|uT21v`mI;3C)(zrs?l2csA&m`e_O|HlOiT;Fc)852>2CX&1*U<gG2wl(Lj?UbW;r;;gjwx>+{n~1Kyu++L(-OQd"
    "th{M;JfBAhwB1g`aj!~GnwLVMHX<T8=e~EvLs@3s$VrX(U0evyKaC{*g7-~lM6WR3V$EI0v8!dLSmaf^Tq$wJm{YL}1-mF~HsZa4"
    "UfALhGN3CS(sbA4dm@#{-7LQygk4vR&$22vt7=vilLqk$SsAye4^Wf@jMvF2E_E7EFKIe#l2W?r2#F-*FjO^4K&5gttJLg}=1sxO"
    "67aKC=i(@Krp@(<+hjh6VuRv6#n-uhENJz*+!v;uaeZcfJPvL%Q_RUkesE#F5AMvx!@}%vNmlWjtR?9?%hH$Bm3~#X*g)wz`Q7Ts"
    "UP>uyj5S5|OoanHXmOVR-{W7tN7>_<^cYUw3GLr7*3^IN7Y;5FmH"
)
"""File of six documents that the release before the checksums has written."""

FLIPS = {"footer": 60}
"""Flips in a region of a file, `FEW` in any other: most bytes of a footer name things that training does not read."""

FEW = 6

SEAL_BYTES = 32

Read = list[tuple[bytes, int]]


@pytest.fixture(scope="module", params=["text", "ids", "text with prompts", "ids in shards", "text, prompts, shards"])
def corpus(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A prepared corpus of several batches, each of which covers more than one block."""
    folder, kind = tmp_path_factory.mktemp("corpus"), str(request.param)
    random = np.random.default_rng(0)
    rows = [
        {"prompt": f"prompt {number} \u2603", "text": f"{number} {random.bytes(900).hex()}"} for number in range(240)
    ]
    (folder / "a.jsonl").write_text("".join(f"{json.dumps(row)}\n" for row in rows))
    options: dict[str, Any] = {"shard_bytes": 150_000} if "shards" in kind else {}
    options |= {"tokenizer": write_tokenizer(folder / "tokenizer")} if "ids" in kind else {}
    options |= {"prompt": "prompt"} if "prompts" in kind else {}
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(preparation, "BATCH_BYTES", 100_000)
        prepare(folder / "a.jsonl", out=folder / "o.arrow", **options)
    return folder / "o.arrow"


def read(path: Path) -> tuple[Read, dict[bytes, bytes], str]:
    """All that training takes from a corpus."""
    result = PreparedCorpus(path)
    contents = [result.content(number) for number in range(len(result))]
    prompts = [result.prompt(number, content) for number, content in enumerate(contents)]
    return list(zip(contents, prompts, strict=True)), result.metadata, result.identity


def regions(path: Path, shard: int) -> Iterator[tuple[str, int, int]]:
    """Name, start and end of each region of a file."""
    result = PreparedCorpus(path)
    file = result.files[shard]
    assert isinstance(file, CheckedFile)
    num_bytes, covered, last = file.num_bytes, file._covered, 0
    footer = num_bytes - 10 - int.from_bytes(read_exactly(file, 4, num_bytes - 10), "little")
    for batch in (item for item in result._batches if item.file == shard):
        yield "begin and metadata", last, batch.offsets
        yield "offsets", batch.offsets, batch.offsets + 8 * (batch.rows + 1)
        yield "values", batch.values, batch.values + batch.size
        last = batch.values + batch.size
        for extra in batch.extra:
            yield "before prompts", last, extra
            last = extra + 8 * batch.rows
            yield "prompts", extra, last
    yield "end of stream", last, covered
    yield "table", covered, footer - SEAL_BYTES
    yield "seal", footer - SEAL_BYTES, footer
    yield "footer", footer, num_bytes - 10
    yield "length and magic", num_bytes - 10, num_bytes


def damages(path: Path, seed: int) -> Iterator[tuple[str, Path, bytes]]:
    """Damaged contents of a corpus's files, each with its region and file."""
    random = np.random.default_rng(seed)
    files = sorted(path.iterdir()) if path.is_dir() else [path]
    for shard in {0, len(files) - 1}:
        whole = files[shard].read_bytes()
        for name, begin, stop in regions(path, shard):
            for _ in range(FLIPS.get(name, FEW) if stop > begin else 0):
                content = bytearray(whole)
                content[random.integers(begin, stop)] ^= 1 << random.integers(8)
                yield name, files[shard], bytes(content)
            start = int(random.integers(begin, stop)) if stop > begin else begin
            lost = whole[:start] + bytes(len(whole[start : start + 512])) + whole[start + 512 :]
            if lost != whole:
                yield f"{name}, 512 zeros", files[shard], lost


def silent(path: Path, seed: int) -> list[str]:
    """Regions whose damage changes what training reads without an error."""
    wanted, actual = read(path), []
    for name, file, content in damages(path, seed):
        whole = file.read_bytes()
        file.write_bytes(content)
        try:
            if read(path) != wanted:
                actual.append(name)
        except DataError as error:
            assert "prepare" in str(error)
        finally:
            file.write_bytes(whole)
    return actual


def test_damage_of_no_region_is_trained_on(corpus: Path) -> None:
    assert silent(corpus, seed=1) == []


def unsealed(file: DataFile, footer_start: int) -> CheckedFile | None:
    """File without a comparison of its footer."""
    start = footer_start - SEAL_BYTES
    result = bytes(read_exactly(file, SEAL_BYTES, max(0, start)))
    magic, num_bytes = struct.unpack_from("<8sQ", result)
    return CheckedFile(file, num_bytes) if magic == b"NXTSEAL1" and num_bytes < file.num_bytes else None


MUTANTS: dict[str, tuple[str, Callable[..., Any]]] = {
    "values": ("nxtrain.data.arrow.seal.CheckedFile._verify", lambda self, block: None),
    "footer": ("nxtrain.data.arrow.opening.checked", unsealed),
}


@pytest.mark.parametrize("region", MUTANTS)
def test_without_a_verification_damage_is_trained_on(
    corpus: Path, region: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(*MUTANTS[region])
    assert region in silent(corpus, seed=1)


def test_a_verification_finds_every_damage_and_names_its_place(corpus: Path) -> None:
    def verified() -> None:
        verify_corpus(corpus)

    verified()
    for name, file, content in damages(corpus, seed=2):
        whole = file.read_bytes()
        file.write_bytes(content)
        with pytest.raises(DataError) as caught:
            verified()
        file.write_bytes(whole)
        if name in {"offsets", "values", "prompts"}:
            assert f"{file} is damaged: bytes " in str(caught.value)
            assert "documents " in str(caught.value)
    verified()


def test_a_block_is_read_for_its_checksum_once(corpus: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    result, verified = PreparedCorpus(corpus), list[int]()
    monkeypatch.setattr(seal, "xxh3_64_intdigest", _counting(xxh3_64_intdigest, verified))
    for _ in range(2):
        assert [len(result.content(number)) > 0 for number in range(len(result))] == [True] * 240
    num_blocks = sum(-(-file._covered // BLOCK_BYTES) for file in result.files if isinstance(file, CheckedFile))
    assert num_blocks - len(result.files) <= len(verified) <= num_blocks


def _counting(digest: Callable[[Any], int], calls: list[int]) -> Callable[[Any], int]:
    def counted(content: Any) -> int:
        calls.append(len(content))
        return digest(content)

    return counted


def test_readers_of_arrow_pass_over_the_checksums(corpus: Path) -> None:
    files = sorted(corpus.iterdir()) if corpus.is_dir() else [corpus]
    content = files[0].read_bytes()
    mapped = pa.py_buffer(content)
    reader = pa.ipc.open_file(pa.BufferReader(content))
    table = reader.read_all()
    table.validate(full=True)
    assert pa.ipc.open_stream(pa.BufferReader(content[8:])).read_all().equals(table)
    assert pyarrow.dataset.dataset(files, format="ipc").count_rows() == 240
    assert table.column_names[0] in {"text", "ids"}
    kind = table.schema.types[0]
    assert pa.types.is_large_string(kind) or pa.types.is_large_list(kind)
    assert {b"nxtrain.format", b"nxtrain.sources", b"nxtrain.settings"} <= table.schema.metadata.keys()
    values = pa.ipc.open_file(mapped).get_batch(0).column(0).buffers()[-1]
    assert mapped.address <= values.address < mapped.address + mapped.size, "mapped without a copy"
    assert values.address % 8 == mapped.address % 8
    first = PreparedCorpus(corpus).content(0)
    value = table.column(0)[0].as_py()
    assert (value.encode() if isinstance(value, str) else np.array(value, np.uint16).tobytes()) == first


def test_a_file_of_an_earlier_release_is_read_without_checksums(tmp_path: Path) -> None:
    path = tmp_path / "old.arrow"
    path.write_bytes(zlib.decompress(base64.b85decode("".join(OLD))))
    assert texts_of(path) == documents(6)
    assert not PreparedCorpus(path).has_checksums
    assert inspect_corpus(path, seq_len=4)["checksums"] is False
    with pytest.raises(DataError, match="has no checksums to compare, since an earlier release prepared it"):
        verify_corpus(path)


def test_a_dropped_table_is_damage_unless_the_file_is_of_an_earlier_release(corpus: Path, tmp_path: Path) -> None:
    file = min(corpus.iterdir()) if corpus.is_dir() else corpus
    content = file.read_bytes()
    (tmp_path / "o.arrow").write_bytes(content.replace(b"NXTSEAL1", b"NXTSEAL0"))
    with pytest.raises(DataError, match="its checksums are missing"):
        PreparedCorpus(tmp_path / "o.arrow")
    drop_checksums(tmp_path / "o.arrow")
    assert PreparedCorpus(tmp_path / "o.arrow").content(3) == PreparedCorpus(corpus).content(3)


@pytest.mark.parametrize("piece", [1000, BLOCK_BYTES - 1, BLOCK_BYTES, BLOCK_BYTES + 1, 10**7])
def test_checksums_do_not_depend_on_the_pieces(piece: int) -> None:
    content = np.random.default_rng(0).bytes(5 * BLOCK_BYTES + 77)
    sealing = Sealing()
    entries = b"".join(
        sealing.add(memoryview(content[start : start + piece])) for start in range(0, len(content), piece)
    )
    entries += sealing.finish(len(content), b"footer")[:ENTRY_BYTES]
    blocks = [content[start : start + BLOCK_BYTES] for start in range(0, len(content), BLOCK_BYTES)]
    assert entries == b"".join(struct.pack("<Q", xxh3_64_intdigest(block)) for block in blocks)
