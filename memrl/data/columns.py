"""Parquet files: rows of the custom format with a column type for each metadata name, and the rows of files from elsewhere."""

import json
from collections import Counter
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq

from memrl.data.json_values import shown

GROUP_BYTES = 2**24  # size of a row group, as JSON
ROWS_AT_ONCE = 256
FEW_ROWS = 10**5  # more than that, all alike, in a file of a few bytes are no data set but an attack
PANDAS_INDEX = "__index_level_"
JSON_COLUMN = {b"memrl": b"json"}  # marks a column of JSON texts, used if no parquet type fits all values


_FIRST = {
    "id": pa.string(),
    "question": pa.string(),
    "answers": pa.list_(pa.string()),
    "match": pa.string(),
    "context": pa.string(),
}


def schema_of(lines: Iterable[bytes]) -> pa.Schema:
    """The columns of rows: a parquet type for each metadata name, or JSON text if no type holds all values.

    A type is used only if every value is read back unchanged: whole numbers of 64 bits, floats, truth values, texts, lists of one
    type, and objects with the same names in the same order. Null, empty objects and mixtures become JSON.
    """
    types: dict[str, pa.DataType | None] = dict(_FIRST)
    for line in lines:
        for name, value in json.loads(line).items():
            if name not in _FIRST:
                kind = _type_of(value)
                types[name] = _common(types[name], kind) if name in types else kind
    return pa.schema(
        [
            pa.field(name, pa.string(), metadata=JSON_COLUMN) if kind is None else pa.field(name, kind)
            for name, kind in types.items()
        ]
    )


def _type_of(value: Any) -> pa.DataType | None:
    match value:
        case bool():
            return pa.bool_()
        case int() if -(2**63) <= value < 2**63:
            return pa.int64()
        case float():
            return pa.float64()
        case str():
            return pa.string()
        case list():
            item = pa.null()
            for entry in value:
                item = _common(item, _type_of(entry))
            return None if item is None else pa.list_(item)
        case dict() if value:  # parquet has no empty structs
            kinds = {name: _type_of(entry) for name, entry in value.items()}
            return None if None in kinds.values() else pa.struct(list(kinds.items()))
    return None


def _common(one: pa.DataType | None, other: pa.DataType | None) -> pa.DataType | None:
    """The type that holds values of both types; null, the item type of an empty list, goes with every type."""
    if one is None or other is None:
        return None
    if one == other or pa.types.is_null(other):
        return one
    if pa.types.is_null(one):
        return other
    if pa.types.is_list(one) and pa.types.is_list(other):
        item = _common(one.value_type, other.value_type)
        return None if item is None else pa.list_(item)
    if pa.types.is_struct(one) and pa.types.is_struct(other) and one.names == other.names:
        kinds = [_common(one.field(name).type, other.field(name).type) for name in one.names]
        return None if None in kinds else pa.struct(list(zip(one.names, kinds, strict=True)))
    return None


def write_parquet(path: Path, lines: Iterable[bytes], schema: pa.Schema) -> None:
    """Write rows, JSON objects of the custom format, as a parquet file; the same rows give the same bytes.

    A row group ends when its JSON reaches GROUP_BYTES, which bounds the writer's memory and what a reader reads for one row.
    """
    group, size = [], 0
    # No dictionary: documents hardly ever repeat.
    with pq.ParquetWriter(path, schema, compression="zstd", use_dictionary=False, version="2.6") as writer:
        for line in lines:
            row = {"match": "any", **json.loads(line)}
            for field in schema:
                if field.metadata == JSON_COLUMN and field.name in row:
                    row[field.name] = json.dumps(row[field.name], ensure_ascii=False)
            group.append(row)
            size += len(line)
            if size >= GROUP_BYTES:
                writer.write_table(pa.Table.from_pylist(group, schema))
                group, size = [], 0
        if group:
            writer.write_table(pa.Table.from_pylist(group, schema))


# --- reading ------------------------------------------------------------------------------------------------


@contextmanager
def readable(path: Path) -> Iterator[None]:
    """Turn what pyarrow raises into ValueErrors that name the file."""
    try:
        yield
    except (pa.ArrowException, OSError, MemoryError, UnicodeDecodeError) as error:
        raise ValueError(f"{path}: cannot be read as parquet: {one_line(error)}; download or write it again") from None


def one_line(error: Exception) -> str:
    return " ".join(str(error).split())[:300].rstrip(".")


def open_parquet(path: Path) -> pq.ParquetFile:
    """The file with its texts as dictionaries: a page that names one long text a thousand times holds it once.

    Raises:
        ValueError: the file cannot be read, or says that it has more rows than bytes.
    """
    with readable(path):
        opened = pq.ParquetFile(path)
        columns = [opened.schema.column(number) for number in range(len(opened.schema))]
        texts = [column.path for column in columns if column.logical_type.type == "STRING"]
        # Without a buffer, a row group's column is loaded as a whole.
        opened = pq.ParquetFile(path, metadata=opened.metadata, buffer_size=2**20, read_dictionary=texts)
        size = path.stat().st_size
    if opened.metadata.num_rows > max(size, FEW_ROWS):
        raise ValueError(f"{path}: says that it has {opened.metadata.num_rows} rows, in {size} bytes; write it again")
    return opened


def read_rows(path: Path) -> Iterator[dict[str, Any]]:
    """The rows of any parquet file as dicts."""
    opened = open_parquet(path)
    types, _ = column_types(path, opened.schema_arrow, strict=False)
    with readable(path):
        for batch in opened.iter_batches(ROWS_AT_ONCE, use_threads=False):
            yield from (row_values(batch, types, place) for place in range(len(batch)))


def row_values(batch: pa.RecordBatch, types: dict[str, pa.DataType], place: int) -> dict[str, Any]:
    """The values of one row. Others are not made Python objects beside it: each could be the same long text of a dictionary."""
    row = {}
    for name, kind in types.items():
        column = batch.column(name)
        row[name] = (column[place] if column.type in (kind, pa.string()) else column.slice(place, 1).cast(kind)[0]).as_py()
    return row


def column_types(path: Path, schema: pa.Schema, strict: bool = True) -> tuple[dict[str, pa.DataType], set[str]]:
    """The types to which the columns have to be converted, and the columns that hold JSON.

    Raises:
        ValueError: a name stands twice, or (`strict`) the values of a column are no JSON, so that no result file could hold them;
            else such columns are left out.
    """
    types, json_columns = {}, set()
    for name, count in Counter(schema.names).items():
        if count > 1:
            raise ValueError(f"{path}: has {count} columns named {shown(name)!r}; give each a name of its own")
        column = f"{path}: column {shown(name)!r}"
        kind, plain = schema.field(name).type, _plain_type(schema.field(name).type)
        if name.startswith(PANDAS_INDEX):
            continue
        if plain is not None:
            types[name] = plain
        elif strict:
            allowed = "texts, numbers, truth values, times, and lists and structs of them"
            raise ValueError(f"{column}: its type is {str(kind)[:60]}; allowed are {allowed}; convert or drop the column")
        if (schema.field(name).metadata or {}).items() >= JSON_COLUMN.items():
            json_columns.add(name)
            if not is_text(kind):
                raise ValueError(f"{column}: is marked as JSON, and its type is {str(kind)[:60]}; allowed is string")
    return types, json_columns


def is_text(kind: pa.DataType) -> bool:
    return (kind.value_type if pa.types.is_dictionary(kind) else kind) in (pa.string(), pa.large_string(), pa.string_view())


def _plain_type(kind: pa.DataType) -> pa.DataType | None:
    """The type itself where its values are JSON's; text for times and decimals; None for all others."""
    if is_text(kind) or pa.types.is_null(kind) or pa.types.is_boolean(kind) or pa.types.is_integer(kind):
        return kind
    if pa.types.is_floating(kind):
        return pa.float64() if kind == pa.float16() else kind
    if pa.types.is_timestamp(kind) or pa.types.is_date(kind) or pa.types.is_time(kind) or pa.types.is_decimal(kind):
        return pa.string()
    if pa.types.is_dictionary(kind):
        return _plain_type(kind.value_type)
    if pa.types.is_list(kind) or pa.types.is_large_list(kind) or pa.types.is_fixed_size_list(kind):
        item = _plain_type(kind.value_type)
        return item and (kind if item == kind.value_type else pa.list_(item))
    if pa.types.is_struct(kind) and len(set(kind.names)) == kind.num_fields:
        kinds = [_plain_type(kind.field(name).type) for name in kind.names]
        same = all(plain == kind.field(name).type for plain, name in zip(kinds, kind.names, strict=True))
        return None if None in kinds else kind if same else pa.struct(list(zip(kind.names, kinds, strict=True)))
    return None
