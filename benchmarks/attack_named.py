"""The named attacks of `attacks.py`: what was seen to end badly in programs of this kind, or was thought of by hand."""

import json
import os
import random
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from typing import Any

from benchmarks.attack_cases import CURVES, DIGITS, DRY_RUN, ESCAPE, EVAL, INFER, OWN, READERS, REMOTE, REPORT, TRACE, TRAIN
from benchmarks.attack_runner import KEY, Attack, nothing
from benchmarks.attack_spoiling import DEEP, EXPRESSIONS, NUMBERS, SCALARS

Damage = Callable[[Path], None]
CHECK = ["data", "check", "data.jsonl"]
PARQUET = ["data", "check", "data.parquet"]
WINDOWS = "a" * 17 + "b"
ALIASES = next(text for text in SCALARS if text.startswith("&a [x"))


def named(quick: bool = False) -> Iterator[Attack]:
    """Every named attack; `quick` leaves out those that train or read long documents."""
    yield from model_folders()
    yield from data_sets()
    yield from options()
    yield from logs_and_results()
    yield from endpoints()
    if not quick:
        yield from long_texts()
        yield from runs()
    for reader, (_, _, commands) in READERS.items():
        for command in commands:
            if not (quick and command == TRAIN):
                yield Attack("nothing damaged", f"{reader}: {' '.join(command)}", command, codes=(0,), own=OWN)


# --- damage -----------------------------------------------------------------------------------------------------


def write(name: str, content: str | bytes) -> Damage:
    def damage(folder: Path) -> None:
        (folder / name).write_bytes(content.encode("utf-8", "surrogatepass") if isinstance(content, str) else content)

    return damage


def fifo(name: str) -> Damage:
    def damage(folder: Path) -> None:
        (folder / name).unlink(missing_ok=True)
        os.mkfifo(folder / name)

    return damage


def change(name: str, **changes: Any) -> Damage:
    """Set keys of a JSON file; of JSON lines, of the first line."""

    def damage(folder: Path) -> None:
        first, *rest = (folder / name).read_text().splitlines() if name.endswith("l") else [(folder / name).read_text()]
        raw = json.dumps(json.loads(first) | {key: f"@{key}@" for key in changes})
        for key, value in changes.items():
            raw = raw.replace(f'"@{key}@"', value if isinstance(value, str) else json.dumps(value))
        (folder / name).write_text("".join(f"{line}\n" for line in (raw, *rest)))

    return damage


def refuse(reader: str, name: str, command: list[str], damage: Damage = nothing, *says: str, **more: Any) -> Attack:
    return Attack(reader, name, command, damage, codes=(2,), says=says, **more)


# --- readers ----------------------------------------------------------------------------------------------------


def model_folders() -> Iterator[Attack]:
    config = partial(change, "model/config.json")
    for name, damage in {
        "sizes of 1e18": config(hidden_size=10**18, intermediate_size=10**18),
        "a size of 400 digits": config(hidden_size=DIGITS),
        "a float of 400 digits": config(rope_theta=DIGITS + ".5"),
        "nested deeply": write("model/config.json", "[" * DEEP),
        "nested deeply in a value": config(rope_scaling='{"a":' * 900 + "1" + "}" * 900),
        "layer_types is a number": config(layer_types=5),
        "layer_types of objects": config(layer_types=[{}]),
        "layer_types is a text": config(layer_types='"full_attention"'),
        "ten million layers": config(num_hidden_layers=10**7),
        "a pipe": fifo("model/config.json"),
    }.items():
        yield refuse("config.json", name, INFER, damage, "config.json")
        yield refuse("config.json", f"{name}, dry run", [*DRY_RUN, "--model.path", "model"], damage, "config.json")
    for expression in EXPRESSIONS:
        yield Attack("chat template", repr(expression[:60]), INFER, write("model/chat_template.jinja", expression), codes=(0, 2))
    yield Attack(
        "generation_config.json",
        "nested deeply",
        INFER,
        write("model/generation_config.json", '{"eos_token_id":' + "[" * DEEP),
        (2,),
    )
    for depth in (900, DEEP):
        yield refuse("tokenizer", f"nested {depth} deep", INFER, change("model/tokenizer.json", model="[" * depth + "]" * depth))
    yield Attack("tokenizer", "a regular expression that blows up", [*CHECK, "--tokenizer", "model"], split_by("(a+)+$"), (0, 2))


def split_by(pattern: str) -> Damage:
    def damage(folder: Path) -> None:
        step = {"type": "Split", "pattern": {"Regex": pattern}, "behavior": "Isolated", "invert": False}
        change("model/tokenizer.json", pre_tokenizer=step)(folder)
        change("data.jsonl", context=json.dumps(WINDOWS * 2000))(folder)

    return damage


def data_sets() -> Iterator[Attack]:
    for name in ("/etc/passwd", "/dev/zero", "/dev/stdin", "../../../../../../etc/passwd", "pipe", "loop", "out"):

        def damage(folder: Path, name: str = name) -> None:
            rows = [json.loads(line) for line in (folder / "data.jsonl").read_text().splitlines()]
            rows = [{key: value for key, value in row.items() if key != "context"} | {"file": name} for row in rows]
            write("data.jsonl", "".join(json.dumps(row) + "\n" for row in rows))(folder)
            fifo("pipe")(folder)
            (folder / "loop").symlink_to("loop")
            (folder / "out").symlink_to("/etc/passwd")

        for command in (CHECK, EVAL):
            yield refuse("data .jsonl", f"file: {name}, {command[0]}", command, damage, "data.jsonl")
    for name, fields in {
        "400 digits": {"note": DIGITS},
        "not a number": {"note": "NaN"},
        "nested deeply": {"note": "[" * DEEP + "]" * DEEP},
        "half a character": {"question": r'"\ud800"'},
        "an escape": {"question": '"\\u001b[2J"'},
    }.items():
        yield Attack("data .jsonl", name, CHECK, change("data.jsonl", **fields), (0, 2))
    yield refuse("data .jsonl", "a line without end", CHECK, lambda folder: os.truncate(folder / "data.jsonl", 2**36))
    yield refuse("data .jsonl", "a pipe", CHECK, fifo("data.jsonl"))
    yield refuse("data .parquet", "a pipe", PARQUET, fifo("data.parquet"))
    for name in (
        "two columns of a name",
        "json of numbers",
        "json nested deeply",
        "a column nested deeply",
        "times",
        "rows from nothing",
    ):
        codes = (0,) if name == "times" else (2,)
        yield Attack("data .parquet", name, PARQUET, partial(odd_parquet, name=name), codes)


def odd_parquet(folder: Path, name: str) -> None:
    import pyarrow as pa
    import pyarrow.parquet as pq

    table = pq.read_table(folder / "data.parquet")
    deep = pa.array([1] * len(table))
    for _ in range(200):
        deep = pa.StructArray.from_arrays([deep], names=["a"])
    json_type = pa.json_(pa.string())
    odd = {
        "two columns of a name": table["question"],
        "json of numbers": pa.ExtensionArray.from_storage(json_type, pa.array(["1e999"] * len(table))),
        "json nested deeply": pa.ExtensionArray.from_storage(json_type, pa.array(["[" * DEEP] * len(table))),
        "a column nested deeply": deep,
        "times": pa.array([2**62] * len(table), pa.timestamp("ms")),
    }
    if name == "rows from nothing":
        table = pa.table(
            {key: pa.array([table[key][0].as_py()] * 10**6).dictionary_encode() for key in ("question", "answers")[:1]}
        )
    else:
        table = table.append_column("question" if name == "two columns of a name" else "odd", odd[name])
    pq.write_table(table, folder / "data.parquet")


def options() -> Iterator[Attack]:
    for name, value in {
        "threads": "100000",
        "yarn": "1e308",
        "top_k": "9" * 20,
        "max_rows": "9" * 30,
        "cache_gib": "-1e300",
    }.items():
        yield refuse("options", f"infer --{name} {value}", [*INFER, f"--{name}", value], nothing, name)
    yield Attack("options", "infer --cache_gib 1e300", [*INFER, "--cache_gib", "1e300"], codes=(0, 2))
    yield refuse("options", "a question that is not UTF-8", ["infer", "text.txt", "-q", "caf\udce9", "--model", "model"])
    for words in (["--samples", "1e29"], ["--lengths", "10000000"], ["--lengths", DIGITS], ["--lengths", "1," * 100_000]):
        more = ["--task", "needle"] if words[0] == "--lengths" else []
        yield refuse("options", f"eval {words[0]} {words[1][:10]}", [*EVAL, *more, *words])
    for name, content in {
        "alias bomb": "a: " + ALIASES,
        "nested": "a: " + "[" * DEEP,
        "code": "rl: !!python/object/apply:os.mkdir [proof]",
    }.items():
        yield refuse("settings of train", name, DRY_RUN, write("config.yaml", content))
        yield refuse("settings of eval", name, ["eval", "--config", "eval.yaml"], write("eval.yaml", content))
        yield refuse("prompts", name, [*INFER, "--agent.prompts", "prompts.yaml"], write("prompts.yaml", content))
    yield refuse("settings of train", "a pipe", DRY_RUN, fifo("config.yaml"))
    yield refuse("settings of eval", "a pipe", ["eval", "--config", "eval.yaml"], fifo("eval.yaml"))
    yield refuse("prompts", "a pipe", [*INFER, "--agent.prompts", "prompts.yaml"], fifo("prompts.yaml"))
    for setting in ("rl.steps", "optim.lr", "rl.clip_high", "agent.chunk_tokens", "rollout.max_rows", "model.lora_rank"):
        for number in NUMBERS[:6]:
            yield Attack("options", f"train --{setting} {number[:10]}", [*DRY_RUN, f"--{setting}", number], codes=(0, 2))
    for command, name in ((TRACE, "--out"), (CURVES, "--out"), (INFER, "--json"), (INFER, "--trace")):
        for taken in ("data.jsonl", "model/config.json", "text.txt"):
            yield Attack("options", f"{command[0]} {name} {taken}", [*command, name, taken], codes=(2,))


def logs_and_results() -> Iterator[Attack]:
    for reader, file, command in (
        ("metrics.jsonl", "curves/metrics.jsonl", CURVES),
        ("rollouts.jsonl", "rollouts.jsonl", TRACE),
        ("results", "results/samples.jsonl", REPORT),
    ):
        for name, line in {
            "400 digits": '{"step": ' + DIGITS + "}",
            "no object": "[1]",
            "nested deeply": "[" * DEEP,
            "words for numbers": '{"step": "two", "reward": "high", "length": "x"}',
            "an escape": json.dumps({ESCAPE: 1, "step": 1}),
        }.items():
            yield Attack(reader, name, command, write(file, line + "\n" + '{"step": 2}\n'), codes=(0, 2))
        yield refuse(reader, "a pipe", command, fifo(file))
    for label in ("$\\frac{", "<img src=x>", "_x"):
        yield Attack(
            "results", f"a model called {label}", REPORT, change("results/samples.jsonl", model=label and json.dumps(label)), (0,)
        )
        yield Attack("metrics.jsonl", f"a run called {label}", ["curves", label, "--out", "curves.png"], renamed(label), (0,))


def renamed(label: str) -> Damage:
    def damage(folder: Path) -> None:
        (folder / "curves").rename(folder / label)

    return damage


MODELS = b'{"object": "list", "data": [{"id": "fake", "object": "model"}]}'


def answer(body: bytes, *headers: bytes, status: bytes = b"200 OK") -> Callable[[bytes], bytes]:
    """A server that lists its models, and answers all else with `body`."""

    def reply(request: bytes) -> bytes:
        listing = request.startswith(b"GET")
        content = MODELS if listing else body
        head = [b"HTTP/1.1 " + (b"200 OK" if listing else status), b"Connection: close", b"Content-Length: %d" % len(content)]
        return b"\r\n".join([*head, *([] if listing else headers), b"", b""]) + content

    return reply


def endpoints() -> Iterator[Attack]:
    key = {"OPENAI_API_KEY": KEY}
    busy = b"503 Busy"
    for name, reply in {
        "HTML": answer(b"<!DOCTYPE html><h1>hi</h1>", b"Content-Type: text/html"),
        "null choices": answer(b'{"choices": null}'),
        "malformed JSON": answer(b'{"choices": ['),
        "redirects for ever": answer(b"", b"Location: {url}/v1/chat/completions", status=b"307 Again"),
        "Retry-After of 1e9": answer(b"{}", b"Retry-After: 1000000000", status=busy),
        "Retry-After of words": answer(b"{}", b"Retry-After: soon\x1b[2J", status=busy),
        "Retry-After below zero": answer(b"{}", b"Retry-After: -5", status=busy),
        "nothing": lambda request: b"",
        "hangs": lambda request: answer(b"")(request) if request.startswith(b"GET") else b"hang",
        "echoes the key": answer(KEY.encode(), status=b"400 No"),
        "echoes the key as an answer": answer(b'{"choices": [{"message": {"content": "%b"}}]}' % KEY.encode()),
        "nested deeply": answer(b"[" * 10**6),
    }.items():
        yield Attack("endpoint", name, REMOTE, codes=(0, 1, 2), serve=reply, environment=key)
    with_key = [word.replace("{url}", f"{{url}}/v1?key={KEY}") for word in REMOTE]
    yield Attack("endpoint", "a key in the address", with_key, serve=answer(b"{}"))
    broken = {"OPENAI_API_KEY": f"{KEY}\nx: y"}
    yield Attack("endpoint", "a key with a line break", REMOTE, codes=(2,), serve=answer(b"{}"), environment=broken)


def long_texts() -> Iterator[Attack]:
    for name, text in {"blanks": " ", "line ends": "\n", "digits": "1", "words": "red "}.items():
        damage = change("data.jsonl", context=json.dumps(text * (12_000_000 // len(text))))
        yield Attack("document", f"12 million {name}", [*CHECK, "--tokenizer", "model"], damage, codes=(0, 2))


# --- training runs ----------------------------------------------------------------------------------------------

REWARDS = {
    "closes its files": "import os\ndef even(*a):\n    os.closerange(0, 1000)",
    "writes without end": "def even(*a):\n    while True: print('x' * 10**6)",
    "raises what cannot be printed": "class E(Exception):\n    def __str__(self): raise self\ndef even(*a):\n    raise E",
    "is absurd": "def even(*a):\n    return 1e39",
    "never ends": "def even(*a):\n    while True: pass",
}


def runs() -> Iterator[Attack]:
    checkpoint = "run/checkpoints/step-2"
    for name, damage in {
        "config.yaml nested deeply": write("run/config.yaml", "a: " + "[" * DEEP),
        "inputs.json nested deeply": write("run/inputs.json", "[" * DEEP),
        "metrics.jsonl without objects": write("run/metrics.jsonl", "[1]\n7\n" + '{"step": ' + DIGITS + "}\n"),
        "state.json with words": write(f"{checkpoint}/state.json", '{"step": "two", "world_size": "one"}'),
        "state.json is a pipe": fifo(f"{checkpoint}/state.json"),
        "a bit flipped in the optimizer": flipped(f"{checkpoint}/engine", "*optim_states.pt"),
        "a bit flipped in the weights": flipped(f"{checkpoint}/model", "*.safetensors"),
        "code in a checkpoint": partial(planted, folder_name=f"{checkpoint}/engine", sums=f"{checkpoint}/SHA256SUMS"),
    }.items():
        yield Attack("run folder", name, TRAIN, damage, codes=(0, 2), own=OWN)
    for name, code in REWARDS.items():
        more = ["--run_dir", "new", "--reward.timeout_s", "1", "--rl.steps", "1"]
        more += ["--rl.prompts_per_step", "2", "--rl.group_size", "2"]  # four calls that take a second each
        yield Attack("reward function", name, [*TRAIN[:3], *more], write("reward.py", code + "\n"), codes=(0, 1, 2))
    planted_module = write("json.py", "open('proof', 'w')\nraise SystemExit('taken from the current folder')\n")
    yield Attack("reward function", "json.py in the current folder", [*TRAIN[:3], "--run_dir", "new"], planted_module, (0,))
    yield refuse("run folder", "an empty run_dir", [*TRAIN[:3], "--run_dir", ""])
    yield refuse("run folder", "a model in the run", [*TRAIN, "--model.path", "run/model"])
    yield refuse("run folder", "a folder of others", [*TRAIN[:3], "--run_dir", "."], lambda folder: (folder / "best").mkdir())


def flipped(folder_name: str, pattern: str) -> Damage:
    def damage(folder: Path) -> None:
        (path,) = (folder / folder_name).glob(pattern)
        content = bytearray(path.read_bytes())
        content[random.Random(0).randrange(len(content))] ^= 4
        path.unlink()  # a hard link's other names keep the old content
        path.write_bytes(content)

    return damage


class Payload:
    def __reduce__(self) -> tuple:
        return os.mkdir, ("proof",)


def planted(folder: Path, folder_name: str, sums: str) -> None:
    """Put code into the optimizer's file, and correct its checksum."""
    import hashlib

    import torch

    (path,) = (folder / folder_name).glob("*optim_states.pt")
    before = path.read_bytes()
    content = torch.load(path, weights_only=False)
    path.unlink()
    torch.save(content | {"lr_scheduler": Payload()}, path)
    first, then = (hashlib.sha256(data).hexdigest() for data in (before, path.read_bytes()))
    text = (folder / sums).read_text()
    assert first in text
    (folder / sums).write_text(text.replace(first, then))
