"""RULER's made-up tasks: exact lengths, functions of the arguments alone, refusals, the command (inside: test_ruler_tasks.py)."""

import gzip
import hashlib
import random
from pathlib import Path

import pytest

from memrl.__main__ import main
from memrl.commands.build_dataset import parse_tasks
from memrl.data.ruler import TASKS, RulerFiles, make_ruler
from memrl.data.ruler.fitting import Document, TooShort, fit
from memrl.data.ruler.haystack import NOISE, Haystack, read_essays
from memrl.data.ruler.task import FORMAT, RESERVE
from memrl.data.ruler.words import ADJECTIVES, NOUNS, word
from memrl.tokenizer import Tokenizer, load_tokenizer

MADE_UP = TASKS[:11]
SUBJECTS, VERBS = "Nobody;The old captain;My sister's cat;A stranger".split(";"), "saw;forgot;carried;sold".split(";")
THINGS = "the map of the island;two letters;a lamp, a rope and some bread;nothing at all".split(";")


def make_essay(num_sentences: int, seed: int = 0) -> str:
    rng = random.Random(seed)
    return " ".join(f"{rng.choice(SUBJECTS)} {rng.choice(VERBS)} {rng.choice(THINGS)}." for _ in range(num_sentences))


def build_tokenizer():
    """A byte-level BPE of some hundred merges: digits stand alone, words take two or three tokens."""
    from tokenizers import Regex, decoders, models, pre_tokenizers, trainers
    from tokenizers import Tokenizer as Backend
    from transformers import PreTrainedTokenizerFast

    backend = Backend(models.BPE())
    digits = pre_tokenizers.Split(Regex(r"[0-9]"), "isolated")
    backend.pre_tokenizer = pre_tokenizers.Sequence([digits, pre_tokenizers.ByteLevel(add_prefix_space=False)])
    backend.decoder = decoders.ByteLevel()
    texts = [NOISE, make_essay(50), " ".join(ADJECTIVES), " ".join(NOUNS)]
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    trainer = trainers.BpeTrainer(vocab_size=900, initial_alphabet=alphabet, special_tokens=["<|end|>"], show_progress=False)
    backend.train_from_iterator(texts, trainer)
    hf = PreTrainedTokenizerFast(tokenizer_object=backend, eos_token="<|end|>")
    hf.chat_template = "{% for message in messages %}{{ message.content }}{% endfor %}"
    return hf


@pytest.fixture(scope="module")
def tokenizer() -> Tokenizer:
    return Tokenizer(build_tokenizer())


@pytest.fixture(scope="module")
def qwen(shared_data) -> Tokenizer:
    folder = shared_data / "tokenizer" / "qwen2.5-instruct"
    if not folder.is_dir():
        pytest.skip(f"no Qwen2.5 tokenizer at {folder}")
    return load_tokenizer(folder)


@pytest.fixture(scope="module")
def files(tmp_path_factory) -> RulerFiles:
    path = tmp_path_factory.mktemp("essays") / "essay.txt"
    path.write_text(make_essay(3000), encoding="utf-8")
    return RulerFiles(essays=str(path))


def total_tokens(tokenizer: Tokenizer, task, sample) -> int:
    return len(tokenizer.encode(sample.context)) + len(tokenizer.encode(sample.question)) + task.answer_tokens + RESERVE


# --- lengths ------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", MADE_UP)
def test_a_sample_fills_its_length_and_never_exceeds_it(name, tokenizer, files):
    task = make_ruler(name, tokenizer, files)
    lengths = (4999, 20_000) if name == "cwe" else (4096, 4999, 20_000)
    for length in lengths:
        for index in range(2):
            sample = task.sample(length, index, 1)
            assert 0.99 * length <= total_tokens(tokenizer, task, sample) <= length
            assert sum(sample.metadata["tokens"].values()) == total_tokens(tokenizer, task, sample)


@pytest.mark.parametrize("name", MADE_UP)
def test_lengths_are_exact_with_the_real_tokenizer(name, qwen, files):
    task = make_ruler(name, qwen, files)
    for index, length in enumerate((4096, 4097, 5000, 40_000)):
        sample = task.sample(length, index, 0)
        assert 0.99 * length <= total_tokens(qwen, task, sample) <= length


@pytest.mark.parametrize("name", MADE_UP)
def test_short_lengths_are_filled_as_far_as_whole_units_allow(name, tokenizer, files):
    task = make_ruler(name, tokenizer, files)
    for length in (1500, 2000, 3000):
        sample = task.sample(length, 0, 0)
        assert length - 48 <= total_tokens(tokenizer, task, sample) <= length


@pytest.mark.parametrize("name", MADE_UP)
def test_a_length_too_short_is_refused_and_the_length_named_works(name, tokenizer, files):
    task = make_ruler(name, tokenizer, files)
    with pytest.raises(ValueError, match=f"^{name}: a length of 60 tokens is too short; give \\d+ or more$") as refusal:
        task.sample(60, 0, 0)
    needed = int(str(refusal.value).split()[-3])
    for index in range(20):
        assert total_tokens(tokenizer, task, task.sample(needed, index, 0)) <= needed
    with pytest.raises(ValueError, match="too short"):
        task.sample(needed // 2, 0, 0)


def test_the_budget_of_the_frequent_words_answer_is_kept_free(tokenizer, files):
    task = make_ruler("fwe", tokenizer, files)
    tokens = task.sample(4096, 0, 0).metadata["tokens"]
    assert tokens["answer_budget"] == task.answer_tokens == 50 and tokens["reserve"] == RESERVE == 128
    assert tokens["context"] + tokens["question"] <= 4096 - 50 - 128


def test_more_keys_than_there_are_are_refused(tokenizer, files, monkeypatch):
    monkeypatch.setattr("memrl.data.ruler.needles.NUM_WORDS", 100)
    with pytest.raises(ValueError, match=r"niah_multikey_2: the length needs .* keys, and there are only 100; give fewer tokens"):
        make_ruler("niah_multikey_2", tokenizer, files).sample(8192, 0, 0)
    monkeypatch.setattr("memrl.data.ruler.counts.NUM_WORDS", 100)
    with pytest.raises(ValueError, match="cwe: 30000 tokens need more than the 100 words"):
        make_ruler("cwe", tokenizer, files).sample(30_000, 0, 0)


GROWTHS = [lambda n: n, lambda n: 7 * n + 300, lambda n: n + n // 50 % 3, lambda n: int(2 * n + n**0.8)]


@pytest.mark.parametrize("length_of", GROWTHS)
@pytest.mark.parametrize("budget", [1000, 4321, 250_000])
def test_a_fit_is_close_below_the_budget_after_few_passes(length_of, budget):
    counted = []

    def count(text: str) -> int:
        counted.append(len(text))
        return len(text)

    document, tokens = fit(lambda units: Document("x" * length_of(units)), count, budget, smallest=10, step=20)
    assert len(document.context) == tokens <= budget
    assert tokens >= 0.998 * budget - 8
    assert sum(counted) <= 5 * budget


def test_a_budget_just_above_the_smallest_document_keeps_to_it():
    def build(units: int) -> Document:
        assert units <= 1500
        return Document("x" * (units // 100 * 100))

    document, tokens = fit(build, len, 1010, smallest=1000, step=500)
    assert tokens == len(document.context) == 1000


def test_documents_that_grow_in_jumps_still_fit():
    document, tokens = fit(lambda units: Document("x" * (units // 40 * 700)), len, 10_000, smallest=0, step=100)
    assert tokens == len(document.context) == 9800
    with pytest.raises(TooShort) as refusal:
        fit(lambda units: Document("x" * (700 + units)), len, 699, smallest=0, step=10)
    assert refusal.value.tokens == 700


# --- arguments ----------------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", MADE_UP)
def test_a_sample_is_a_function_of_its_arguments(name, tokenizer, files):
    task, again = make_ruler(name, tokenizer, files), make_ruler(name, tokenizer, files)
    sample = task.sample(6000, 3, 7)
    assert task.version == again.version
    again.sample(9000, 1, 2)  # what was made before must not matter
    assert again.sample(6000, 3, 7) == sample
    others = [task.sample(6000, 4, 7), task.sample(6000, 3, 8), task.sample(6001, 3, 7)]
    assert len({one.id for one in [sample, *others]}) == 4
    for other in others:
        assert other.context != sample.context and other.answers != sample.answers


@pytest.mark.parametrize("name", [*MADE_UP[:8], "vt"])
def test_lengths_share_no_positions(name, tokenizer, files):
    task = make_ruler(name, tokenizer, files)
    first, second = ([task.sample(length, index, 0).metadata["depths"][0] for index in range(8)] for length in (4096, 6144))
    assert all(abs(one - other) > 1e-6 for one, other in zip(first, second, strict=True))


def test_samples_stay_what_they_are_or_the_format_is_raised(files):
    """Pins every task's sample. Where this fails on purpose, raise `memrl.data.ruler.task.FORMAT` and pin the new samples."""

    class Characters:
        vocab_size = 256

        def encode(self, text):
            return list(text.encode())

    digest = hashlib.sha256()
    for name in MADE_UP:
        sample = make_ruler(name, Characters(), files).sample(9000, 2, 5)
        digest.update(repr((sample.question, sample.context, sample.answers, sample.match, sample.metadata)).encode())
    assert (FORMAT, digest.hexdigest()[:16]) == ("1", "5c5e5945e2fa99e8")


def test_the_version_tells_tasks_texts_and_tokenizers_apart(tokenizer, files, tmp_path):
    task = make_ruler("niah_single_2", tokenizer, files)
    (tmp_path / "essay.txt").write_text(make_essay(3000, seed=1))
    other_text = make_ruler("niah_single_2", tokenizer, RulerFiles(essays=str(tmp_path)))
    other_task = make_ruler("niah_single_3", tokenizer, files)
    hf = build_tokenizer()
    hf.add_tokens(["burns on"])
    other_tokenizer = Tokenizer(hf)
    versions = {one.version for one in (task, other_text, other_task, make_ruler("niah_single_2", other_tokenizer, files))}
    assert len(versions) == 4


def test_all_thirteen_names_are_known_and_others_refused(tokenizer):
    assert len(set(TASKS)) == len(TASKS) == 13
    with pytest.raises(ValueError, match="there is no RULER task 'niah'; the tasks are niah_single_1, "):
        make_ruler("niah", tokenizer, RulerFiles())


# --- texts --------------------------------------------------------------------------------------------------


def test_a_missing_text_names_the_option(tokenizer, tmp_path):
    with pytest.raises(ValueError, match=r"^niah_single_2 hides its needles in a text of yours; give --essays FOLDER"):
        make_ruler("niah_single_2", tokenizer, RulerFiles())
    with pytest.raises(ValueError, match=f"--essays {tmp_path}: there is no text here"):
        read_essays(tmp_path)
    with pytest.raises(ValueError, match="there is no text here"):
        read_essays(tmp_path / "absent")
    (tmp_path / "a.txt").write_text(" \r\n ")
    with pytest.raises(ValueError, match="only white space"):
        read_essays(tmp_path)
    (tmp_path / "a.txt").write_bytes(b"caf\xe9")
    with pytest.raises(ValueError, match=r"a\.txt: byte 3 is not UTF-8"):
        read_essays(tmp_path)
    (tmp_path / "a.txt.gz").write_bytes(gzip.compress(b"text" * 99)[:-9])
    (tmp_path / "a.txt").unlink()
    with pytest.raises(ValueError, match=r"a\.txt\.gz: is not a whole gzip file"):
        read_essays(tmp_path)


def test_texts_are_read_in_the_order_of_their_paths_with_any_line_ends(tmp_path):
    (tmp_path / "sub").mkdir()
    (tmp_path / "b.txt").write_bytes(b"\xef\xbb\xbfSecond\r\nline.\r\n\r\n")
    (tmp_path / "a.txt.gz").write_bytes(gzip.compress("First \u00e9.".encode()))
    (tmp_path / "sub" / "c.txt").write_text("Third.\n")
    (tmp_path / "notes.md").write_text("not read")
    assert read_essays(tmp_path).text == "First \u00e9. Second line. Third. "
    assert read_essays(tmp_path / "b.txt").text == "Second line. "


def test_a_short_text_is_repeated_and_the_metadata_says_so(tokenizer, tmp_path):
    (tmp_path / "short.txt").write_text(make_essay(40))
    task = make_ruler("niah_single_2", tokenizer, RulerFiles(essays=str(tmp_path)))
    sample = task.sample(8192, 0, 0)
    assert sample.metadata["haystack_rounds"] == pytest.approx(len(sample.context) / len(make_essay(40)), rel=0.02)
    assert sample.metadata["haystack_rounds"] > 5


def test_a_window_goes_on_from_the_end_to_the_beginning():
    haystack = Haystack("One two. Three four. Five six.", " ")
    assert haystack.start(0.99) == len("One two. Three four. ")
    assert haystack.window(haystack.start(0.99), 26) == "Five six. One two. Three"
    text, (place,) = haystack.hide(["NEEDLE."], [0.5], haystack.start(0.99), 26)
    assert text == "Five six. NEEDLE. One two. Three" and text[place:].startswith("NEEDLE")


def test_a_needle_never_stands_behind_a_sentence_that_breaks_off():
    haystack = Haystack("One two three four. Five.", " ")
    assert haystack.hide(["NEEDLE."], [0.99], 0, 16) == ("NEEDLE. One two three", [0])


@pytest.mark.parametrize("text", ["word " * 5000, "x" * 20_000, "\u6771\u4eac\u3002" * 5000, "a. " * 5000])
def test_texts_of_any_kind_take_needles(text, tokenizer):
    haystack = Haystack(text.strip(), " ")
    context, places = haystack.hide(["AAA.", "BBB."], [0.7, 0.3], haystack.start(0.4), 9000)
    assert [context[place : place + 4] for place in places] == ["AAA.", "BBB."]
    assert abs(places[0] / len(context) - 0.7) < 0.12 and abs(places[1] / len(context) - 0.3) < 0.12
    assert len(context) <= 9012


def test_no_word_of_the_lists_stands_within_another():
    assert len(set(ADJECTIVES)) == len(ADJECTIVES) >= 500 and len(set(NOUNS)) == len(NOUNS) >= 500
    assert all(text.isascii() and text.isalpha() and text.islower() for text in [*ADJECTIVES, *NOUNS])
    assert not [one for one in ADJECTIVES for other in ADJECTIVES if one != other and one.endswith(other)]
    assert not [one for one in NOUNS for other in NOUNS if one != other and one.startswith(other)]
    assert word(0) == f"{ADJECTIVES[0]}-{NOUNS[0]}" and word(len(NOUNS)) == f"{ADJECTIVES[1]}-{NOUNS[0]}"


# --- the command --------------------------------------------------------------------------------------------


@pytest.fixture
def run_command():
    def run_command(*arguments: str | Path) -> None:
        main(["data", "ruler", *map(str, arguments)])

    return run_command


@pytest.fixture(scope="module")
def tokenizer_folder(tmp_path_factory) -> Path:
    folder = tmp_path_factory.mktemp("tokenizer")
    build_tokenizer().save_pretrained(folder)
    return folder


def test_the_command_writes_a_file_for_each_task_and_length(run_command, tokenizer, tokenizer_folder, files, tmp_path):
    from memrl.data import load_samples

    out = tmp_path / "new" / "folder"
    names = ("niah_multivalue", "vt", "fwe")
    common = ("--tasks", ",".join(names), "--lengths", "6k,2k", "--samples", 2, "--tokenizer", tokenizer_folder)
    for form in ("parquet", "jsonl"):
        run_command(*common, "--out", out, "--essays", files.essays, "--seed", 3, "--format", form)
    expected = {f"{name}_{length}.{form}" for name in names for length in (2048, 6144) for form in ("parquet", "jsonl")}
    assert {path.name for path in out.iterdir() if path.suffix != ".json"} == expected
    for name in names:
        task = make_ruler(name, tokenizer, files)
        for length in (2048, 6144):
            made = [task.sample(length, index, 3) for index in range(2)]
            for form in ("parquet", "jsonl"):
                assert list(load_samples(out / f"{name}_{length}.{form}")) == made


def test_mistakes_in_the_command_are_told_in_one_line(run_command, tokenizer_folder, tmp_path, capsys):
    common = ("--lengths", "2k", "--tokenizer", tokenizer_folder, "--out", tmp_path / "out")
    for tasks, problem in (("vt,vtt", "no task 'vtt'"), ("all", "--essays FOLDER"), ("qa_1", "--squad")):
        with pytest.raises(SystemExit) as end:
            run_command("--tasks", tasks, *common)
        printed = capsys.readouterr().err
        assert end.value.code == 2 and problem in printed and printed.count("\n") == 1
    assert not (tmp_path / "out").exists()


def test_task_lists_are_checked():
    assert parse_tasks("all") == list(TASKS) and parse_tasks("vt, cwe") == ["vt", "cwe"]
    with pytest.raises(ValueError, match="vt is given twice"):
        parse_tasks("vt,cwe,vt")
