"""The attacks of `attacks.py`: a folder of good inputs, the named attacks on it, and generated ones."""

import contextlib
import json
import os
import random
import sys
from collections.abc import Callable, Iterator, Sequence
from functools import partial
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
sys.path.insert(0, str(ROOT))

from benchmarks import attack_spoiling as spoiling
from benchmarks.attack_runner import KEY, Attack
from benchmarks.attack_spoiling import Spoil

DIGITS, ESCAPE = "9" * 400, "\x1b[2J"
READ = ["--agent.chunk_tokens", "8", "--agent.memory_tokens", "4", "--agent.answer_tokens", "3", "--agent.question_tokens", "6"]
INFER = ["infer", "text.txt", "-q", "code name ?", "--model", "model", "--device", "cpu"]
EVAL = ["eval", "--model", "model", "--task", "data.jsonl", "--samples", "2", "--out", "out", "--device", "cpu"]
DRY_RUN = ["train", "--config", "config.yaml", "--dry_run"]
TRAIN = ["train", "--config", "config.yaml", "--run_dir", "run"]
HOTPOT = ["data", "hotpotqa", "hotpot.json", "--documents", "4", "--repeat", "report", "--out", "new.jsonl"]
SQUAD = ["data", "squad", "squad.json", "--documents", "2", "--repeat", "report", "--out", "new.jsonl"]
MUSIQUE = ["data", "musique", "musique.jsonl", "--documents", "5", "--repeat", "report", "--out", "new.jsonl"]
TRACE = ["trace", "rollouts.jsonl", "--out", "page.html"]
REPORT = ["report", "results", "--out", "report"]
CURVES = ["curves", "curves", "--out", "curves.png"]
REMOTE = ["eval", "--model", "fake", "--endpoint", "{url}", "--tokenizer", "model", "--task", "data.jsonl", "--samples", "1"]
REMOTE += ["--out", "out", *READ, "--agent.prompts", "prompts.yaml"]

# --- the folder -------------------------------------------------------------------------------------------------


def make_world(folder: Path, with_run: bool = True) -> None:
    """Good inputs of every command, and a training run of two steps."""
    import pyarrow as pa
    import pyarrow.parquet as pq

    from tests.test_report import make_row, write_folder
    from tests.test_sources import hotpot_item, json_lines, musique_item, squad_file
    from tests.tiny_run import make_run

    with contextlib.chdir(folder) if sys.version_info >= (3, 11) else nowhere(folder):
        make_run(Path("."), rl={"steps": 2}, checkpoint={"every": 1})
        rows = [json.loads(line) for line in Path("data.jsonl").read_text().splitlines()]
        rows = [row | {"id": f"q{i}", "match": "any", "depths": [0.5], "note": {"a": ["x", None]}} for i, row in enumerate(rows)]
        Path("data.jsonl").write_text(json_lines(rows))
        pq.write_table(pa.Table.from_pylist(rows), "data.parquet")
        Path("text.txt").write_text("red stone . code name is blue . " * 4)
        Path("hotpot.json").write_text(json.dumps([hotpot_item(i) for i in range(3)]))
        Path("squad.json").write_text(json.dumps(squad_file()))
        Path("musique.jsonl").write_text(json_lines(musique_item(i) for i in range(3)))
        write_folder(Path("results"), [make_row(index=i, score=i % 2) for i in range(6)])
        Path("curves").mkdir()
        metrics = {"reward/strict": 0.5, "loss/kl": 0.1, "optim/grad_norm": 1.0}
        Path("curves", "metrics.jsonl").write_text(json_lines(metrics | {"step": i} for i in range(1, 5)))
        turns = [{"kind": "memory", "response": "a", "prompt": "p"}, {"kind": "answer", "response": "a"}]
        rollout = {"question": "q", "answers": ["a"], "reward": 1.0, "scores": {"strict": 1.0}, "group_rewards": [1.0, 0.0]}
        Path("rollouts.jsonl").write_text(json_lines(rollout | {"step": i, "turns": turns} for i in range(1, 4)))
        Path("eval.yaml").write_text("model: model\ntask: data.jsonl\nsamples: 2\nmethods: memory\ndevice: cpu\ncache_gib: 1.0\n")
        if with_run:
            if pid := os.fork():
                assert os.waitpid(pid, 0)[1] == 0, "the run of two steps failed"
            else:
                train_and_exit()


@contextlib.contextmanager
def nowhere(folder: Path) -> Iterator[None]:
    """contextlib.chdir, which Python 3.10 has not."""
    before = os.getcwd()
    os.chdir(folder)
    try:
        yield
    finally:
        os.chdir(before)


def train_and_exit() -> None:
    from memrl.__main__ import main

    sink = os.open(os.devnull, os.O_WRONLY)
    os.dup2(sink, 1)
    os.dup2(sink, 2)
    os._exit(main(TRAIN))


# --- generated attacks ------------------------------------------------------------------------------------------

OWN = ("run/",)  # what a resumed run may change
BYTES, KIND = spoiling.spoil_bytes, spoiling.spoil_kind
JSON = (BYTES, spoiling.spoil_json, spoiling.spoil_json, spoiling.spoil_json, spoiling.spoil_json, KIND)
LINES = (BYTES, spoiling.spoil_line, spoiling.spoil_line, spoiling.spoil_line, KIND)
YAML = (BYTES, spoiling.spoil_yaml, spoiling.spoil_yaml, spoiling.spoil_yaml, KIND)
RUN = ("run/inputs.json", "run/checkpoints/step-2/state.json", "run/checkpoints/step-2/SHA256SUMS")

# Reader: files of which one is spoilt, ways to spoil it, command lines of which one is run.
READERS: dict[str, tuple[tuple[str, ...], tuple[Spoil, ...], tuple[list[str], ...]]] = {
    "config.json": (("model/config.json",), JSON, (INFER, [*DRY_RUN, "--model.path", "model"])),
    "generation_config.json": (("model/generation_config.json",), JSON, (INFER,)),
    "tokenizer": (("model/tokenizer.json", "model/tokenizer_config.json"), JSON, (INFER,)),
    "safetensors": (
        ("model/model.safetensors",),
        (BYTES, spoiling.spoil_safetensors, spoiling.spoil_safetensors, KIND),
        (INFER,),
    ),
    "chat template": (("model/chat_template.jinja",), (spoiling.spoil_template,), (INFER,)),
    "prompts": (
        ("prompts.yaml", "model/memrl_agent.yaml"),
        YAML,
        ([*INFER, "--agent.prompts", "prompts.yaml"], INFER),
    ),
    "document": (("text.txt",), (BYTES, spoiling.spoil_text, spoiling.spoil_text, KIND), (INFER,)),
    "data .jsonl": (
        ("data.jsonl",),
        LINES,
        (["data", "check", "data.jsonl"], EVAL, ["data", "convert", "data.jsonl", "--out", "new.parquet"]),
    ),
    "data .parquet": (
        ("data.parquet",),
        (spoiling.spoil_parquet, spoiling.spoil_parquet, spoiling.spoil_parquet, BYTES, KIND),
        (["data", "check", "data.parquet"], ["data", "convert", "data.parquet", "--out", "new.jsonl"]),
    ),
    "hotpotqa": (("hotpot.json",), JSON, (HOTPOT,)),
    "squad": (("squad.json",), JSON, (SQUAD,)),
    "musique": (("musique.jsonl",), LINES, (MUSIQUE,)),
    "settings of train": (("config.yaml",), YAML, (DRY_RUN,)),
    "settings of eval": (("eval.yaml",), YAML, (["eval", "--config", "eval.yaml", "--out", "out"],)),
    "metrics.jsonl": (("curves/metrics.jsonl",), LINES, (CURVES,)),
    "rollouts.jsonl": (("rollouts.jsonl",), LINES, (TRACE,)),
    "results": (("results/samples.jsonl",), LINES, (REPORT,)),
    "eval_config.json": (("results/eval_config.json",), JSON, (REPORT,)),
    "run folder": (RUN, JSON, (TRAIN,)),
    "logs of a run": (("run/metrics.jsonl", "run/rollouts.jsonl"), LINES, (TRAIN,)),
}
WORDS = [
    *(
        "0",
        "-1",
        "1e29",
        "1e308",
        "nan",
        "inf",
        "9" * 20,
        DIGITS,
        "9" * 5000,
        "",
        " ",
        "null",
        "[]",
        "{}",
        "[" * 20_000,
        "*a",
        "--",
    ),
    *(
        "/dev/zero",
        "/dev/full",
        "/proc/self/mem",
        "model",
        "data.jsonl",
        "text.txt",
        ".",
        "x" * 5000,
        "a\nb",
        ESCAPE,
        "\udcff",
        "é" * 300,
    ),
    *(
        "1,2",
        "1," * 10_000,
        "32k",
        "0.5",
        "true",
        "%s%n",
        "$\\frac{",
        "!!python/object/apply:os.mkdir [proof]",
        "{a: 1}",
        "model/config.json",
    ),
]
LINES_OF_OPTIONS = (INFER, EVAL, DRY_RUN, HOTPOT, TRACE, REPORT, CURVES, ["data", "check", "data.jsonl"], MUSIQUE)


def spoil(folder: Path, file: str, how: Spoil, seed: str) -> None:
    with contextlib.suppress(json.JSONDecodeError, UnicodeDecodeError):  # not a second spoiling of the same file
        how(folder / file, random.Random(seed))


def options_of(command: Sequence[str]) -> list[str]:
    """The options that the command's --help lists."""
    import io
    import re

    from memrl.__main__ import main

    text = io.StringIO()
    words = command[: 2 if command[0] == "data" else 1]
    with contextlib.redirect_stdout(text), contextlib.suppress(SystemExit):
        main([*words, "--help"])
    return sorted(set(re.findall(r"(?m)^\s+(--[a-z][\w.]*)", text.getvalue())) - {"--help", "--print_config", "--config"})


def hostile_reply(rng: random.Random) -> Callable[[bytes], bytes]:
    """What a server answers: the list of models may be good; a completion is spoilt."""
    message = {"choices": [{"index": 0, "message": {"role": "assistant", "content": "red"}, "finish_reason": "stop"}]}
    good = json.dumps(message | {"id": "x", "model": "fake", "usage": {"prompt_tokens": 1, "completion_tokens": 1}})
    models = json.dumps({"object": "list", "data": [{"id": "fake", "object": "model"}]})
    spoilt_models = spoiling.spoil_json_text(models, rng) if rng.random() < 0.3 else models
    body = rng.choice([spoiling.spoil_json_text(good, rng)] * 3 + [good, "<h1>no</h1>", "", good[: rng.randrange(len(good))]])
    status = rng.choice(["200 OK"] * 4 + ["500 No", "400 No", "302 Found", "999 No", "429 Wait", "99999 x", "abc"])
    odd = [
        "Retry-After: " + rng.choice(["1e9", "-1", "nan", DIGITS, "Fri, 31 Dec 9999 23:59:59 GMT", ESCAPE]),
        "Location: {url}/a",
    ]
    odd += [
        "Content-Encoding: gzip",
        "Transfer-Encoding: chunked",
        "Content-Type: text/html",
        "x" * 5000 + ": y",
        "Content-Length: " + DIGITS,
    ]
    headers = rng.sample(odd, rng.choice([0, 0, 1, 2]))

    def reply(request: bytes) -> bytes:
        listing = request.startswith(b"GET")
        content = (spoilt_models if listing else body).encode("utf-8", "surrogatepass")
        head = [f"HTTP/1.1 {'200 OK' if listing else status}", "Connection: close", f"Content-Length: {len(content)}"]
        return "\r\n".join([*head, *([] if listing else headers), "", ""]).encode() + content

    return reply


def generated(seed: int, count: int, quick: bool = False) -> Iterator[Attack]:
    """`count` attacks that depend on the seed alone, the readers in turn; `quick` leaves out those that take seconds."""
    names = [name for name in READERS if not (quick and READERS[name][2] == (TRAIN,))] + ["options", "options", "endpoint"]
    found: dict[str, list[str]] = {}
    for number in range(count):
        reader, key = names[number % len(names)], f"{seed}-{number}"
        rng = random.Random(key)
        if reader == "options":
            command = rng.choice(LINES_OF_OPTIONS)
            options = found.setdefault(" ".join(command), options_of(command))
            more = [
                word
                for name in rng.sample(options, min(len(options), rng.choice([1, 1, 2])))
                for word in (name, rng.choice(WORDS))
            ]
            yield Attack(reader, f"{key} {command[0]} {' '.join(more)[:70]!r}", [*command, *more])
        elif reader == "endpoint":
            yield Attack(reader, key, REMOTE, serve=hostile_reply(rng), environment={"OPENAI_API_KEY": KEY})
        else:
            files, ways, commands = READERS[reader]
            file, way, command = rng.choice(files), rng.choice(ways), rng.choice(commands)
            if way is not KIND and file == RUN[2]:
                way = BYTES
            name = f"{key} {way.__name__} {file}: {' '.join(command[:2])}"
            yield Attack(reader, name, command, partial(spoil, file=file, how=way, seed=key), own=OWN if command == TRAIN else ())
