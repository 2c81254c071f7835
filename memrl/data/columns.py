"""Write rows of the custom format as a parquet file, with a column type for each metadata name."""

import json
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq

GROUP_BYTES = 2**24  # size of a row group, as JSON
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
