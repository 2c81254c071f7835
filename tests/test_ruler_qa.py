"""RULER's question answering at a number of tokens, and RULER-HotpotQA at a number of documents."""

import json

import pytest

from memrl.data.ruler import RulerFiles, make_ruler
from memrl.data.ruler.task import RESERVE
from memrl.data.ruler_hotpotqa import RulerHotpotQA
from tests.test_sources import hotpot_item


class Words:
    """A word is a token."""

    vocab_size = 1

    def encode(self, text: str) -> list[int]:
        return [len(word) for word in text.split()]


def squad_articles(count: int) -> dict:
    """Articles of four paragraphs with a question on each."""

    def paragraph(name: str, words: int) -> dict:
        answers = [{"text": f"answer {name}", "answer_start": 0}, {"text": f"or {name}", "answer_start": 0}]
        question = {"id": f"q{name}", "question": f"What is {name}?", "answers": answers}
        return {"context": f"It is {name}." + " word" * words, "qas": [question]}

    articles = [
        {"title": f"Article_{i}", "paragraphs": [paragraph(f"{i}.{j}", 9 + (11 * i + 31 * j) % 50) for j in range(4)]}
        for i in range(count)
    ]
    return {"data": articles}


@pytest.fixture
def files(tmp_path) -> RulerFiles:
    """40 SQuAD articles of about 5,600 words together, 30 HotpotQA questions, and no pool."""
    (tmp_path / "squad.json").write_text(json.dumps(squad_articles(40)))
    (tmp_path / "hotpotqa.json").write_text(json.dumps([hotpot_item(i) for i in range(30)]))
    return RulerFiles(squad=str(tmp_path / "squad.json"), hotpotqa=str(tmp_path / "hotpotqa.json"))


@pytest.fixture(scope="module")
def public(shared_data) -> RulerFiles:
    """The public files; SQuAD's paragraphs, and Wikipedia's as a pool."""
    paths = {"squad": "squad/dev-v1.1.rebuilt.json.gz", "hotpotqa": "hotpotqa/hotpot_dev_distractor.subset100.json.gz"}
    pool = shared_data / "hotpotqa" / "2wikimultihopqa_corpus.json.gz"
    found = {name: shared_data / path for name, path in paths.items()}
    for path in (*found.values(), pool):
        if not path.is_file():
            pytest.skip(f"the public file {path.name} is not there")
    return RulerFiles(**{name: str(path) for name, path in found.items()}, pool=[str(pool)])


def titles(context: str) -> list[str]:
    return [document.split("\n")[1] for document in context.split("\n\n")]


def test_qa_1_fills_the_length_with_room_for_question_answer_and_prompt(files):
    task = make_ruler("qa_1", Words(), files)
    assert (task.num_questions, task.answer_tokens) == (160, 32)
    for index in range(0, 160, 7):
        sample = task.sample(2000, index, seed=0)
        used = len(sample.context.split()) + len(sample.question.split()) + 32 + RESERVE
        assert 1980 <= used <= 2000
        assert sum(sample.metadata["tokens"].values()) == used
        assert sample.metadata["tokens"]["context"] == len(sample.context.split())


def test_qa_1_has_the_rest_of_the_article_no_titles_and_every_answer(files):
    sample = make_ruler("qa_1", Words(), files).sample(2000, 5, seed=0)
    assert sample.question == "What is 1.1?"
    assert (sample.answers, sample.match) == (("answer 1.1", "or 1.1"), "any")
    assert all(sample.context.count(f"It is 1.{j}.") == 1 for j in range(4))
    assert "Article" not in sample.context
    (evidence,) = sample.metadata["evidence"]
    assert sample.context[evidence["begin"] :].startswith(f"Document {evidence['document']}:\nIt is 1.1.")
    assert sample.metadata["depths"] == [evidence["begin"] / len(sample.context)]
    assert (sample.metadata["task"], sample.metadata["length"], sample.metadata["question_id"]) == ("qa_1", 2000, "q1.1")


def test_qa_2_asks_hotpotqa_with_titles(files):
    sample = make_ruler("qa_2", Words(), files).sample(600, 3, seed=0)
    assert sample.question == "Question 3?"
    assert {f"T3.{i}" for i in range(4)} <= set(titles(sample.context))
    assert len(sample.metadata["evidence"]) == 2


def test_a_sample_is_a_function_of_its_arguments(files):
    first, second = make_ruler("qa_1", Words(), files), make_ruler("qa_1", Words(), files)
    assert [first.sample(1000, i, 0) for i in range(9)] == [second.sample(1000, i, 0) for i in range(9)[::-1]][::-1]
    assert first.sample(1000, 0, 0).context != first.sample(1000, 0, 1).context
    assert len({first.sample(length, i, 0).id for length in (1000, 2000) for i in range(9)}) == 18


def test_the_version_tells_the_files_and_the_tokenizer(files, tmp_path):
    class Letters(Words):
        def encode(self, text: str) -> list[int]:
            return list(text.encode())

    (tmp_path / "pool.json").write_text(json.dumps([{"title": "A", "text": "a"}]))
    more = RulerFiles(squad=files.squad, hotpotqa=files.hotpotqa, pool=[str(tmp_path / "pool.json")])
    versions = [make_ruler("qa_1", Words(), files).version, make_ruler("qa_1", Words(), more).version]
    versions += [make_ruler("qa_2", Words(), files).version, make_ruler("qa_1", Letters(), files).version]
    versions += [RulerHotpotQA(files).version, RulerHotpotQA(more).version]
    assert len(set(versions)) == 6
    assert versions[0] == make_ruler("qa_1", Words(), files).version


def test_a_length_that_the_paragraphs_do_not_fill_is_refused_or_repeated(files):
    with pytest.raises(ValueError, match=r"qa_1: a length of 20000 has 163 tokens .*question 'q0.0' has 4 .* 160 in all"):
        make_ruler("qa_1", Words(), files).sample(20_000, 0, seed=0)
    files.repeat = "report"
    sample = make_ruler("qa_1", Words(), files).sample(20_000, 0, seed=0)
    assert 19_800 <= sum(sample.metadata["tokens"].values()) <= 20_000
    assert sample.metadata["repeated"] == sample.metadata["num_documents"] - 160


def test_mistakes_are_named(files):
    task = make_ruler("qa_2", Words(), files)
    with pytest.raises(ValueError, match="qa_2: there is no question 30; the file has 30"):
        task.sample(1000, 30, seed=0)
    with pytest.raises(ValueError, match=r"qa_2: a length of 100 .* the 2 gold paragraphs of question 'q0' take"):
        task.sample(100, 0, seed=0)
    with pytest.raises(ValueError, match="ruler_hotpotqa: there is no question -1"):
        RulerHotpotQA(files).sample(10, -1, seed=0)
    with pytest.raises(ValueError, match=r"121 documents: .* 120 in all"):
        RulerHotpotQA(files).sample(121, 0, seed=0)
    for make in (lambda: make_ruler("qa_1", Words(), RulerFiles()), lambda: make_ruler("qa_2", Words(), RulerFiles())):
        with pytest.raises(ValueError, match=r"qa_[12] asks the questions of a published file; give --(squad|hotpotqa) FILE"):
            make()
    with pytest.raises(ValueError, match="give --hotpotqa FILE"):
        RulerHotpotQA(RulerFiles())


def test_ruler_hotpotqa_asks_the_same_questions_at_each_length(files):
    task = RulerHotpotQA(files)
    assert (task.num_questions, task.answer_tokens) == (30, 32)
    for index in range(30):
        short, long = task.sample(20, index, seed=0), task.sample(60, index, seed=0)
        assert (short.id, short.question, short.answers) == (long.id, long.question, long.answers)
        assert short.question == f"Question {index}?"
        assert (len(titles(short.context)), len(titles(long.context))) == (20, 60)
        assert set(titles(short.context)) < set(titles(long.context))


def test_public_files_at_4k_and_16k_with_the_qwen_tokenizer(public, shared_data):
    folder = shared_data / "tokenizer" / "qwen2.5-instruct"
    if not folder.is_dir():
        pytest.skip("the Qwen2.5 tokenizer is not there")
    from memrl.tokenizer import load_tokenizer

    tokenizer = load_tokenizer(folder)
    for name in ("qa_1", "qa_2"):
        task = make_ruler(name, tokenizer, public)
        for length, count in ((4096, 8), (16_384, 1)):
            for index in range(count):
                sample = task.sample(length, index, seed=0)
                used = len(tokenizer.encode(sample.context)) + len(tokenizer.encode(sample.question)) + 32 + RESERVE
                assert 0.99 * length <= used <= length
                assert sample.metadata["repeated"] == 0


def test_public_files_at_50_to_6400_documents(public):
    task = RulerHotpotQA(public)
    lengths = (50, 200, 800, 6400)
    for index in (0, 99):
        samples = [task.sample(length, index, seed=0) for length in lengths]
        assert [sample.context.count("\n\nDocument ") + 1 for sample in samples] == list(lengths)
        assert len({sample.question for sample in samples}) == 1
        assert [sample.metadata["repeated"] for sample in samples] == [0, 0, 0, 0]
    own = RulerFiles(hotpotqa=public.hotpotqa)
    with pytest.raises(ValueError, match=r"6400 documents: .*, 99\d in all"):
        RulerHotpotQA(own).sample(6400, 0, seed=0)
    own.repeat = "report"
    repeated = RulerHotpotQA(own).sample(6400, 0, seed=0).metadata["repeated"]
    assert 5400 < repeated < 5420
