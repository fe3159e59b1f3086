"""Arrow files that grow batch by batch are those that pyarrow reads, at any number of batches."""

from __future__ import annotations

import pyarrow as pa
import pytest
from hypothesis import given
from hypothesis import strategies as st

from nxtrain.data.arrow import ipc
from nxtrain.data.arrow.ipc import Block


def written(schema: pa.Schema, batches: list[pa.RecordBatch]) -> bytes:
    content, blocks = ipc.begin(schema), list[Block]()
    for batch in batches:
        message, block = ipc.message(batch, len(content))
        content += bytes(message)
        blocks.append(block)
    return content + ipc.END_OF_STREAM + ipc.end(schema, blocks)


@given(st.lists(st.lists(st.text(max_size=9), max_size=5), max_size=6), st.text(max_size=20))
def test_pyarrow_reads_every_batch_in_any_order(batches: list[list[str]], note: str) -> None:
    schema = pa.schema([("text", pa.large_string())], metadata={"note": note})
    content = written(schema, [pa.record_batch([pa.array(b, pa.large_string())], schema=schema) for b in batches])
    reader = pa.ipc.open_file(pa.BufferReader(content))
    assert reader.schema.equals(schema, check_metadata=True)
    assert reader.num_record_batches == len(batches)
    for number in reversed(range(len(batches))):
        batch = reader.get_batch(number)
        batch.validate(full=True)
        assert batch.column(0).to_pylist() == batches[number]
    stream = pa.ipc.open_stream(pa.BufferReader(content[8:]))
    assert [batch.column(0).to_pylist() for batch in stream] == batches


@pytest.mark.parametrize("item", [pa.uint16(), pa.uint32()])
def test_lists_of_ids_are_mapped_without_a_copy(item: pa.DataType) -> None:
    kind = pa.large_list(pa.field("item", item, nullable=False))
    schema = pa.schema([pa.field("ids", kind, nullable=False)])
    content = pa.py_buffer(written(schema, [pa.record_batch([pa.array([[1, 2], [3]], kind)], schema=schema)]))
    column = pa.ipc.open_file(pa.BufferReader(content)).get_batch(0).column(0)
    values = column.values.buffers()[1]
    assert content.address <= values.address < content.address + content.size
    assert values.address % 8 == content.address % 8
    assert column.to_pylist() == [[1, 2], [3]]
