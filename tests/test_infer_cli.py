"""infer.py as people use it: answers, files, mistakes, and Ctrl-C."""

import importlib
import json
import os
import random
import re
import signal
import subprocess
import sys
import time
from html.parser import HTMLParser
from pathlib import Path

import pytest

from memrl.agents import memory_agent
from memrl.reading.open_model import ReaderOptions, load_settings, open_llm
from memrl.reading.reader import Reading, Step, chunk_pace, read_documents
from memrl.reading.text_files import read_text
from memrl.report.trace_page import changes, write_trace
from memrl.types import Sample
from tests.tiny_folder import CHAT, WORDS, make_folder

ROOT = Path(__file__).resolve().parent.parent
Q = "name ?"


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    return make_folder(tmp_path_factory.mktemp("infer") / "model")


@pytest.fixture(scope="module")
def text_file(tmp_path_factory):
    path = tmp_path_factory.mktemp("texts") / "text.txt"
    path.write_text(" ".join(random.Random(0).choices(WORDS, k=203)))
    return path


@pytest.fixture
def infer(folder, capsys):
    """infer(arguments) -> exit code, standard output, lines on standard error; in this process."""
    module = importlib.import_module("memrl.commands.infer")

    def infer(*arguments, model=folder):
        try:
            code = module.main([*map(str, arguments), "--model", str(model)])
        except SystemExit as stop:
            code = stop.code
        captured = capsys.readouterr()
        return code, captured.out, captured.err.splitlines()

    return infer


def test_every_question_is_asked_of_every_file(infer, text_file, tmp_path):
    other = tmp_path / "other.txt"
    other.write_bytes(b"\xef\xbb\xbfred blue\r\ngreen\r\n")
    out = tmp_path / "answers.json"
    code, printed, errors = infer(text_file, other, "-q", Q, "-q", "code ?", "--json", out, "--temperature", 1)
    answers = json.loads(out.read_text())
    assert code == 0
    assert [(a["file"], a["question"]) for a in answers] == [(str(f), q) for f in (text_file, other) for q in (Q, "code ?")]
    assert set(answers[0]) == {"question", "answer", "response", "memory", "chunks", "tokens", "seconds", "file"}
    assert [(a["chunks"], a["tokens"]) for a in answers] == [(26, 203), (26, 203), (1, 3), (1, 3)]
    for answer in answers:
        assert f"question: {answer['question']}\nanswer: {answer['answer'] or '(nothing)'}" in printed
        assert answer["memory"].strip() in printed
    assert any("54/54 chunks" in line and "tokens 412" in line and "answers 4/4" in line for line in errors)
    assert re.search(r"54 chunks, 412 tokens in .*first tenth .*, last tenth .*peak memory", errors[-1])


def test_an_answer_does_not_depend_on_what_else_is_read(infer, text_file, tmp_path):
    out = tmp_path / "answers.json"

    def memories(*arguments):
        assert infer(*arguments, "--json", out, "--temperature", 1)[0] == 0
        return {a["question"]: (a["memory"], a["response"]) for a in json.loads(out.read_text())}

    together = memories(text_file, "-q", Q, "-q", "code ?", "-q", "who ?")
    assert len(set(together.values())) == 3
    assert memories(text_file, "-q", "code ?", "--max_rows", "1") == {"code ?": together["code ?"]}


def test_memory_can_be_left_out(infer, text_file):
    code, printed, _ = infer(text_file, "-q", Q, "--show_memory", "false")
    assert code == 0 and "memory" not in printed


def test_words_that_the_model_does_not_know_are_warned_about_once(infer, tmp_path):
    path = tmp_path / "prose.txt"
    path.write_text("It was a bright cold day in April , red and blue .")
    code, _, errors = infer(path, "-q", Q, "-q", "code ?")
    warnings = [line for line in errors if line.startswith("warning")]
    assert code == 0 and len(warnings) == 1 and "prose.txt" in warnings[0]


def write_bad_files(folder: Path) -> dict[str, tuple[Path, str]]:
    contents = {
        "empty": (b"", "is empty"),
        "blank": (b" \n\t\r\n", "is empty"),
        "zero": (b"text\0text", "zero byte at offset 4"),
        "latin": ("Stra\u00dfe".encode("latin-1"), "WINDOWS-1252"),
        "utf16": ("text".encode("utf-16"), "UTF-16"),
        "pdf": (b"%PDF-1.7\n\xff", "PDF"),
        "cut": ("caf\u00e9".encode()[:-1], "byte 0xc3 at offset 3"),
    }
    files = {}
    for name, (content, message) in contents.items():
        files[name] = (folder / f"{name}.txt", message)
        files[name][0].write_bytes(content)
    return files | {"missing": (folder / "missing.txt", "no such file"), "folder": (folder, "is a folder")}


def test_mistakes_are_one_line_and_exit_code_2(infer, text_file, tmp_path):
    cases = [((path, "-q", Q), message) for path, message in write_bad_files(tmp_path).values()]
    cases += [
        ((text_file, tmp_path / "missing.txt", "-q", Q), "missing.txt"),
        ((text_file, "-q", "red " * 7), "7 tokens, and the cap is 6"),
        ((text_file, "-q", "  "), "question is empty"),
        ((text_file,), "question"),
        (("-q", Q), "files"),
        ((text_file, "-q", Q, "--json", tmp_path), "cannot be written"),
        ((text_file, "-q", Q, "--trace", tmp_path / "none" / "x.html"), "cannot be written"),
        ((text_file, "-q", Q, "--jsn", "x"), "jsn"),
        ((text_file, "-q", Q, "--temperature", "-1"), "temperature"),
        ((text_file, "-q", Q, "--device", "cuda:77"), "cuda:77"),
        ((text_file, "-q", Q, "--agent.chunk_tokens", "0"), "chunk_tokens"),
        ((text_file, "-q", Q, "--seed", "-1"), "seed is -1"),
        ((text_file, "-q", Q, "--seed", 2**63), f"seed is {2**63}"),
        ((text_file, "-q", Q, "--cache_gib", "inf"), "cache_gib"),
        ((text_file, "-q", Q, "--cache_gib", "0.000005"), "--cache_gib"),
        ((text_file, "-q", Q, "--attention", "flash"), "flash-attn needs a CUDA device"),
        ((text_file, "-q", Q, "--attention", "fast"), "attention"),
        ((text_file, "-q", Q, "--min_p", "2"), "min_p is 2"),
        ((text_file, "-q", Q, "--max_memory", "cpu=1GiB"), "only --device map uses"),
        ((text_file, "-q", Q, "--device", "map", "--max_memory", "plenty"), "give for example 0=70GiB"),
        ((text_file, "-q", Q, "--device", "map", "--max_memory", "64=1GiB"), "names GPU 64"),
        ((text_file, "-q", Q, "--device", "map", "--max_memory", "cpu=1GiB,cpu=2GiB"), "cpu twice"),
    ]
    for arguments, message in cases:
        code, printed, errors = infer(*arguments)
        assert (code, printed, len(errors)) == (2, "", 1), (arguments, errors)
        assert message in errors[0], (message, errors)


def test_bad_files_are_found_before_a_bad_model(infer, tmp_path):
    assert "no such file" in infer(tmp_path / "missing.txt", "-q", Q, model=tmp_path / "nowhere")[2][0]
    good = tmp_path / "good.txt"
    good.write_text("red")
    for model, message in ((tmp_path / "nowhere", "no model folder"), (tmp_path, "tokenizer")):
        code, _, errors = infer(good, "-q", Q, model=model)
        assert (code, len(errors)) == (2, 1) and message in errors[0]


def test_the_start_says_what_was_loaded_and_what_computes_attention(infer, text_file):
    code, _, errors = infer(text_file, "-q", Q)
    assert code == 0
    assert re.fullmatch(r"loaded qwen2 [\d.]+ K parameters, float32, .* in [\d.]+ s", errors[0])
    assert errors[1].startswith("attention: sdpa (PyTorch's fused attention")
    assert infer(text_file, "-q", Q, "--attention", "eager")[2][1] == "attention: eager (chosen by the settings)"


def test_backend_sharing_device_map_and_budget_do_not_change_the_answer(infer, text_file, tmp_path):
    def answer(*options):
        code, _, errors = infer(text_file, "-q", Q, "--json", tmp_path / "a.json", *options)
        assert code == 0, errors
        return [(entry["response"], entry["memory"]) for entry in json.loads((tmp_path / "a.json").read_text())]

    expected = answer()
    for options in (
        ("--attention", "eager"),
        ("--share_prefixes", "false"),
        ("--max_step_tokens", 5),
        ("--device", "map", "--max_memory", "cpu=1GiB"),
        ("--device", "map", "--max_memory", "cpu=20KB"),  # some of it on disk
    ):
        assert answer(*options) == expected, options


def test_document_that_fails_fails_alone(infer, text_file, tmp_path, monkeypatch):
    async def agent(llm, sample, config):
        if "text.txt" in sample.id:
            raise RuntimeError("the memory is full")
        return await memory_agent(llm, sample, config)

    monkeypatch.setattr("memrl.reading.reader.run_agent", agent)
    (tmp_path / "other.txt").write_text("red blue")
    out = tmp_path / "answers.json"
    code, printed, _ = infer(text_file, tmp_path / "other.txt", "-q", Q, "--json", out)
    assert code == 1 and "failed: RuntimeError: the memory is full" in printed
    failed, read = json.loads(out.read_text())
    assert failed["error"] == "RuntimeError: the memory is full" and "error" not in read and read["chunks"] == 1


def test_cache_is_compared_with_what_the_documents_need(infer, text_file, tmp_path):
    short = tmp_path / "short.txt"
    short.write_text("red blue")
    options = ("-q", Q, "--agent.chunk_tokens", 100, "--cache_gib", 64 * 256 / 2**30)
    assert infer(short, *options)[0] == 0  # a full chunk would not fit, but there is none
    code, printed, errors = infer(short, text_file, *options)
    assert (code, printed, len(errors)) == (2, "", 1)
    assert "a cache of 128 tokens" in errors[0] and "allows 64" in errors[0]
    enough = re.search(r"--cache_gib (\S+) or more", errors[0])[1]
    assert infer(short, text_file, *options[:-1], enough)[0] == 0


def test_answers_file_is_replaced_whole_or_not_at_all(infer, text_file, tmp_path, monkeypatch):
    out, link = tmp_path / "answers.json", tmp_path / "link.json"
    earlier = '[\n  {\n    "question": "earlier"\n  }\n]'
    out.write_text(earlier)
    link.symlink_to(out)

    def full_disk(descriptor):
        raise OSError(28, "No space left on device")

    with monkeypatch.context() as patch:
        patch.setattr(os, "fsync", full_disk)
        code, printed, errors = infer(text_file, "-q", Q, "--json", out)
    assert code == 1 and "answer:" in printed, "what was read must not be lost with the file"
    assert any("No space left on device" in line for line in errors)
    assert out.read_text() == earlier
    assert infer(text_file, "-q", Q, "--json", link)[0] == 0
    assert link.is_symlink() and len(json.loads(out.read_text())) == 1
    assert sorted(path.name for path in tmp_path.iterdir()) == ["answers.json", "link.json"]


def test_answers_can_go_into_a_pipe(infer, text_file, tmp_path):
    pipe = tmp_path / "pipe"
    os.mkfifo(pipe)
    reader = os.open(pipe, os.O_RDONLY | os.O_NONBLOCK)
    try:
        assert infer(text_file, "-q", Q, "--json", pipe)[0] == 0
        assert len(json.loads(os.read(reader, 2**16))) == 1
    finally:
        os.close(reader)
    assert pipe.is_fifo()


def test_chat_template_that_cannot_be_used_is_one_line(text_file, tmp_path, infer):
    model = make_folder(tmp_path / "model")
    files = [path for path in model.iterdir() if "CHAT" in path.name or CHAT in path.read_text(errors="ignore")]
    template = model / "chat_template.jinja"
    assert files == [template]
    twice = CHAT.replace("{{ m.content }}", "{{ m.content }} {{ m.content }}")
    for text, named in ((twice, "2 times"), ("{{ raise_exception('no users') }}", "no users")):
        template.write_text(text)
        code, printed, errors = infer(text_file, "-q", Q, model=model)
        assert (code, printed, len(errors)) == (2, "", 1)
        assert "chat template" in errors[0] and named in errors[0]


@pytest.mark.parametrize(("number", "code"), [(signal.SIGINT, 130), (signal.SIGTERM, 143)])
def test_ctrl_c_and_sigterm_print_what_is_finished_and_keep_the_rest(folder, tmp_path, number, code):
    (tmp_path / "short.txt").write_text("red blue")
    (tmp_path / "long.txt").write_text("red blue green grey " * 40_000)
    out, page = tmp_path / "answers.json", tmp_path / "trace.html"
    # Progress lines every 0.1 s instead of 10 s, so that the test need not wait for one.
    script = "import sys; from memrl.utils.progress import Progress; Progress.__init__.__kwdefaults__['every'] = 0.1\n"
    script += "from memrl.commands.infer import main; sys.exit(main(sys.argv[1:]))"
    command = [sys.executable, "-c", script, tmp_path / "long.txt", tmp_path / "short.txt", "-q", Q, "--model", folder]
    command += ["--json", out, "--trace", page, "--device", "cpu", "--threads", 1]
    # A shell's background jobs, perhaps these tests, ignore Ctrl-C, and children inherit that, but never a handler.
    signal.signal(signal.SIGINT, signal.default_int_handler)
    pipes = {"stderr": subprocess.PIPE, "stdout": subprocess.PIPE, "text": True}
    process = subprocess.Popen([str(part) for part in command], cwd=ROOT, **pipes)
    deadline, lines = time.monotonic() + 60, []
    while time.monotonic() < deadline and not any("answers 1/2" in line for line in lines):
        lines.append(process.stderr.readline())
    process.send_signal(number)
    printed, rest = process.communicate(timeout=60)
    assert process.returncode == code
    assert printed.startswith(f"file: {tmp_path / 'short.txt'}") and "long.txt" not in printed and "Traceback" not in rest
    assert rest.splitlines()[-1] == f"interrupted: 1 of 2 answers, saved in {out}"
    cut, done = json.loads(out.read_text())
    assert (Path(cut["file"]).name, Path(done["file"]).name) == ("long.txt", "short.txt") and "error" not in done
    assert re.fullmatch(r"interrupted after \d+ of 20000 chunks", cut["error"]) and "memory" in cut
    assert "interrupted after" in page.read_text() and "Chunk 1 of 1" in page.read_text()


# --- the library below -----------------------------------------------------------------------------------------------------


def test_read_documents_keeps_order_and_reports_every_chunk(folder):
    reader = ReaderOptions(device="cpu", max_rows=2)
    agent, tokenizer = load_settings(folder, reader)
    llm = open_llm(folder, tokenizer, agent, reader)
    samples = [Sample(f"s{n}", Q, " ".join(WORDS[:n])) for n in (20, 0, 9)]
    seen = []
    readings = read_documents(llm, iter(samples), agent, lambda r: seen.append((r.sample.id, r.chunks_read, r.done)))
    assert [(r.sample.id, r.num_chunks, r.document_tokens) for r in readings] == [("s20", 3, 20), ("s0", 0, 0), ("s9", 2, 9)]
    assert [s for s in seen if s[0] == "s9"] == [
        ("s9", 0, False),
        ("s9", 1, False),
        ("s9", 2, False),
        ("s9", 2, False),
        ("s9", 2, True),
    ]
    for reading in readings:
        assert [step.kind for step in reading.steps] == ["memory"] * reading.num_chunks + ["answer"]
        assert reading.error is None and reading.response == reading.steps[-1].text
    assert readings[0].memory == readings[0].steps[-2].text and readings[1].memory == "none"


def test_line_ends_and_byte_order_mark_do_not_reach_the_model(tmp_path):
    path = tmp_path / "dos.txt"
    path.write_bytes(b"\xef\xbb\xbfone\r\ntwo\rthree\n")
    assert read_text(path) == "one\ntwo\nthree\n"


def test_pace_compares_first_and_last_tenth():
    steps = [Step("memory", "", 1, "stop", float(n)) for n in range(1, 41)] + [Step("answer", "", 1, "stop", 99.0)]
    assert chunk_pace([Reading(Sample("a", Q, ""), 8, steps=steps)]) == (2.5, 38.5)
    assert chunk_pace([Reading(Sample("a", Q, ""), 8, steps=steps[:19])]) is None


def test_changes_show_the_words_that_came_and_went():
    runs = changes("the red fox\nsleeps", "the old red fox\nsleeps well")
    assert [(kind, text.strip()) for kind, text in runs] == [
        ("keep", "the"),
        ("add", "old"),
        ("keep", "red fox\nsleeps"),
        ("add", "well"),
    ]
    assert changes("", "") == [] and changes("a b", "") == [("drop", "a b")]


class Tags(HTMLParser):
    def __init__(self):
        super().__init__()
        self.tags, self.text, self.open = set(), "", []

    def handle_starttag(self, tag, attrs):
        self.tags.add(tag)
        if tag != "meta":
            self.open.append(tag)

    def handle_endtag(self, tag):
        assert self.open.pop() == tag

    def handle_data(self, data):
        self.text += data


def test_trace_is_escaped_and_needs_nothing_from_outside(tmp_path):
    attack = "</div><script>alert(1)</script><img src=http://x/y onerror=z> \ud800 &amp;"
    steps = [
        Step("memory", f"first {attack}", 9, "length", 0.1, f"first {attack}"),
        Step("memory", f"first {attack}", 9, "stop", 0.1, f"first {attack}"),
        Step("answer", rf"\boxed{{{attack}}}", 5, "stop", 0.1),
    ]
    sample = Sample("id", attack, "", metadata={"file": attack})
    done = Reading(sample, 8, 12, 2, 2, steps, steps[-1].text, steps[1].text, 9, done=True)
    failed = Reading(sample, 8, error=attack, done=True)
    write_trace(tmp_path / "trace.html", [done, failed])
    page = (tmp_path / "trace.html").read_text(encoding="utf-8")
    parser = Tags()
    parser.feed(page)
    assert parser.open == []
    assert not parser.tags & {"script", "img", "link", "iframe"}
    assert parser.text.count("alert(1)") >= 8 and "cut off by the token cap" in page and "memory unchanged" in page


@pytest.mark.parametrize(
    ("dtype", "has_products", "said"), [("bfloat16", False, 1), ("bfloat16", True, 0), ("float32", False, 0)]
)
def test_slow_bfloat16_is_said_with_what_to_do(infer, tmp_path, monkeypatch, dtype, has_products, said):
    monkeypatch.setattr("memrl.kernels.logprob.multiplies_bf16", lambda device: has_products)
    (tmp_path / "short.txt").write_text("red stone .")
    code, _, errors = infer(tmp_path / "short.txt", "-q", "name ?", "--dtype", dtype)
    assert code == 0 and sum("--dtype float32 is several times faster" in line for line in errors) == said
