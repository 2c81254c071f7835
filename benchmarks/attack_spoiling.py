"""Ways to spoil a file: bytes, JSON, YAML, parquet and safetensors, at random but the same for the same random numbers."""

import json
import os
import random
import re
import socket
import struct
from collections.abc import Callable
from pathlib import Path
from typing import Any

Spoil = Callable[[Path, random.Random], None]
ESCAPE = "\x1b[2J"
DEEP = 100_000

NUMBERS = ["9" * 400, "1e999", "-1", "0", "1" + "0" * 18, "-" + "9" * 30, "NaN", "-Infinity", "1e-320", str(2**63), "0.5", "-0.0"]
VALUES = [
    *(*NUMBERS, "null", "true", "[]", "{}", '""', '" "', "[[[]]]", '{"a": {"a": 1}}', '[null, 1, "a"]', "]", ""),
    *("[" * DEEP + "]" * DEEP, '{"a":' * DEEP, "[" * 900 + "]" * 900, '"' + "x" * 10**6 + '"', "[" + "1," * 10**6 + "1]"),
    *(r'"\ud800"', r'"\u001b[2J"', r'"\u0000"', r'"$\\frac{"', '"../../etc/passwd"', '"/dev/zero"', '"<img src=x>"', r'"a\nb"'),
    *('"(a+)+$"', '"{{ 1/0 }}"', '"%s%n{0}"', '"9999999999"', '"nan"', '"auto"', '"os:system"', "1" * 5000),
]
SCALARS = [
    *(
        *NUMBERS,
        "null",
        "true",
        "[]",
        "{}",
        "''",
        "[" * 5000,
        "{a: " * 5000,
        "*a",
        "&a [*a]",
        "!!python/object/apply:os.mkdir [proof]",
    ),
    *(
        "2024-02-30",
        "0x" + "f" * 400,
        ".inf",
        ".nan",
        "1:60:60",
        "'\"",
        "|",
        ">-",
        "? a",
        "[1, 2]",
        "{a: 1}",
        "\t- a",
        "\x07",
        "x" * 10**6,
    ),
    "&a [x,x,x,x,x,x,x,x,x]\nb: &b [*a,*a,*a,*a,*a,*a,*a,*a,*a]\n"
    + "".join(f"{chr(99 + i)}: &{chr(99 + i)} [{', '.join([f'*{chr(98 + i)}'] * 9)}]\n" for i in range(12)),
    *("!!binary aGk=", "!!set {a}", "<<: *a", "{<<: [{a: 1}]}", '"\\ud800"', '"\\e[2J"', "$\\frac{"),
]


def replace(path: Path, content: bytes) -> None:
    path.write_bytes(content)


def spoil_bytes(path: Path, rng: random.Random) -> None:
    content = bytearray(path.read_bytes())
    at = rng.randrange(len(content) or 1)
    match rng.randrange(10):
        case 0:
            content = content[:at]
        case 1:
            for _ in range(rng.randint(1, 20)):
                content[rng.randrange(len(content))] = rng.randrange(256)
        case 2:
            content[at:at] = rng.randbytes(rng.choice([1, 10, 1000]))
        case 3:
            content[at:at] = content[at : at + rng.randint(1, 500)] * rng.randint(1, 200)
        case 4:
            content = bytearray(len(content))
        case 5:
            content = (
                bytearray(b"\xff\xfe" + content) if rng.random() < 0.5 else bytearray("".join(map(chr, content)).encode("utf-16"))
            )
        case 6:
            content = bytearray(rng.randbytes(rng.choice([0, 1, 7, 8, 100, 10**5])))
        case 7:
            content[at:at] = rng.choice([b"[", b"{", b'{"a":', b"- ", b"(", b"\n", b" "]) * rng.choice([1, 1000, 200_000])
        case 8:
            del content[at : at + rng.randint(1, 50)]
        case _:
            content = bytearray(
                rng.choice([b"", b"\n", b"null", b"[]", b"{}", b"\0", b'"a"', b"0", b"\xef\xbb\xbf", b"%PDF-1.4", b"PAR1"])
            )
    replace(path, bytes(content))


def spoil_kind(path: Path, rng: random.Random) -> None:
    """Put something that is no regular file, or one of absurd size, in the file's place."""
    path.unlink()
    match rng.randrange(8):
        case 0:
            os.mkfifo(path)
        case 1:
            path.mkdir()
        case 2:
            path.symlink_to("/dev/zero")
        case 3:
            path.symlink_to(path.name)
        case 4:
            path.symlink_to("nowhere")
        case 5:
            socket.socket(socket.AF_UNIX).bind(os.path.relpath(path))
        case 6:
            with path.open("wb") as file:
                file.truncate(2**40)
        case _:
            path.touch(mode=0)


def places(value: Any) -> list[tuple[Any, Any]]:
    """Every (container, key) below a JSON value."""
    items = value.items() if isinstance(value, dict) else enumerate(value) if isinstance(value, list) else ()
    return [place for key, inner in items for place in [(value, key), *places(inner)]]


def spoil_json_text(text: str, rng: random.Random) -> str:
    value = [json.loads(text)]
    for _ in range(rng.choice([1, 1, 1, 2, 4])):
        container, key = rng.choice(places(value))
        how = rng.randrange(8)
        if how == 0 and container is not value:
            del container[key]
        elif how == 1 and isinstance(container, dict):
            container[rng.choice([ESCAPE, "", "$\\frac{", "__class__", "x" * 5000, "\ud800"])] = container.pop(key)
        elif how == 2 and isinstance(container[key], list):
            container[key] = container[key] * rng.choice([0, 2, 100])
        else:
            container[key] = f"@@{rng.randrange(len(VALUES))}@@"
    spoilt = json.dumps(value)[1:-1]
    return re.sub(r'"@@(\d+)@@"', lambda found: VALUES[int(found[1])], spoilt)


def spoil_json(path: Path, rng: random.Random) -> None:
    replace(path, spoil_json_text(path.read_text(), rng).encode("utf-8", "surrogatepass"))


def spoil_line(path: Path, rng: random.Random) -> None:
    """Spoil one line of JSON lines."""
    lines = path.read_text().splitlines()
    at = rng.randrange(len(lines))
    lines[at] = spoil_json_text(lines[at], rng).replace("\n", " ")
    replace(path, "\n".join([*lines, ""]).encode("utf-8", "surrogatepass"))


def spoil_yaml(path: Path, rng: random.Random) -> None:
    lines = path.read_text().splitlines()
    for _ in range(rng.choice([1, 1, 2])):
        at = rng.choice([i for i, line in enumerate(lines) if ":" in line])
        key, _, _ = lines[at].partition(":")
        lines[at] = rng.choice(
            [
                f"{key}: {rng.choice(SCALARS)}",
                f"{key}: {rng.choice(SCALARS)}",
                f"{key}{ESCAPE}: 1",
                key,
                f"{lines[at]}\n{lines[at]}",
            ]
        )
    replace(path, "\n".join([*lines, ""]).encode())


def spoil_parquet(path: Path, rng: random.Random) -> None:
    """Give a column another type, or spoil the file's metadata."""
    import pyarrow as pa
    import pyarrow.parquet as pq

    if rng.random() < 0.5:
        content = bytearray(path.read_bytes())
        for _ in range(rng.randint(1, 8)):
            content[rng.randrange(len(content) // 2, len(content))] = rng.randrange(256)
        return replace(path, bytes(content))
    table = pq.read_table(path)
    deep = pa.array([1] * len(table))
    for _ in range(rng.choice([1, 60, 400])):
        deep = pa.StructArray.from_arrays([deep], names=["a"])
    others = [
        *(pa.array([2**62] * len(table)), pa.array([float("nan")] * len(table)), pa.array([b"\xff"] * len(table)), deep),
        *(
            pa.nulls(len(table)),
            pa.array([[["x"]]] * len(table)),
            pa.array([ESCAPE] * len(table)),
            pa.array([{"a": 1}] * len(table)),
        ),
        *(pa.array([2**62] * len(table), pa.timestamp("ns")), pa.array(["x"] * len(table)).dictionary_encode()),
    ]
    name = rng.choice([*table.column_names, ESCAPE, "", "x" * 10_000])
    if name in table.column_names and rng.random() < 0.7:
        table = table.set_column(table.column_names.index(name), name, rng.choice(others))
    else:  # a second column of the name
        table = table.append_column(name, rng.choice(others))
    pq.write_table(table, path)


def spoil_safetensors(path: Path, rng: random.Random) -> None:
    content = path.read_bytes()
    (size,) = struct.unpack("<Q", content[:8])
    header, body = content[8 : 8 + size].decode(), bytearray(content[8 + size :])
    match rng.randrange(4):
        case 0:
            header = spoil_json_text(header, rng)
        case 1:
            at = rng.randrange(len(body) - 4)
            body[at : at + 4] = rng.choice([b"\xff\xff\xff\x7f", b"\0\0\x80\x7f", b"\xff\xff\x7f\x7f"])
        case 2:
            del body[rng.randrange(len(body)) :]
        case _:
            size = rng.choice([0, 1, 2**63, 2**64 - 1, size - 1, size + 1, 2**31])
            return replace(path, struct.pack("<Q", size) + content[8:])
    encoded = header.encode("utf-8", "surrogatepass")
    replace(path, struct.pack("<Q", len(encoded)) + encoded + bytes(body))


EXPRESSIONS = [
    *("{{ 1 / 0 }}", "{% for i in range(10**9) %}{% endfor %}", "{{ 'a' * 10**10 }}", "{{ messages.__class__.__mro__ }}"),
    *(
        "{% macro f() %}{{ f() }}{% endmacro %}{{ f() }}",
        "{% include 'x' %}",
        "{% import 'os' as os %}{{ os.system('touch proof') }}",
    ),
    *(
        "{{ raise_exception('x\ny') }}",
        "{{ '%1000000000d' % 1 }}",
        "{{ 9**9**9 }}",
        "{{ range(10**9) | list }}",
        "{{ nothing.x }}",
    ),
    *(
        "{{ cycler.__init__.__globals__.os.system('touch proof') }}",
        "{{ lipsum(100000) }}",
        f"{{{{ '{ESCAPE}' }}}}",
        "{" * 20_000,
    ),
    *(
        "{% for i in range(99999) %}{{ 'a' * 4000 }}{% endfor %}",
        "{{ (" + "(" * 20_000,
        "{% if %}",
        "{{ messages | tojson | list }}",
    ),
    *(
        "{% set x = [1] %}{% for i in range(60) %}{% set x = x.extend(x) %}{% endfor %}",
        "\0",
        "{{ '\\ud800' }}",
        "{{ [].append }}",
    ),
    *("{{ strftime_now('%Y' * 10**6) }}", "{{ 'a'.join(range(10**8) | map('string')) }}", "{{ namespace(a=1).a.b }}", "{# ", ""),
    *(
        "{{ ('a' * 30) ~ 'b' | replace('a', 'a' * 10**6) }}",
        "{{ self }}",
        "{{ dict(a=1).items() | sort | random }}",
        "{{ -(2**100000) }}",
    ),
]


def spoil_template(path: Path, rng: random.Random) -> None:
    parts = [path.read_text(), *rng.sample(EXPRESSIONS, rng.choice([1, 1, 2]))]
    rng.shuffle(parts)
    replace(path, "".join(parts if rng.random() < 0.7 else parts[:1]).encode("utf-8", "surrogatepass"))


def spoil_text(path: Path, rng: random.Random) -> None:
    words = path.read_text()
    part = rng.choice(
        [" ", "\n", "\0", "x", "<|im_end|>", "<|unk|>", ESCAPE, "\u202e", "\u0300", "\r", "1", "\U0001d54f", "\ufeff"]
    )
    content = (words + part * rng.choice([1, 1000, 20_000]) + words).encode()
    replace(
        path,
        content if rng.random() < 0.8 else content + rng.choice([b"\xff", b"\xed\xa0\x80", b"\xc3", b"\xf8\x88\x80\x80\x80"]),
    )
