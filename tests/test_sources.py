"""Published files read as questions: HotpotQA, SQuAD, MuSiQue and plain paragraphs, recognised by their content."""

import gzip
import json
import tracemalloc
from pathlib import Path

import pytest

from memrl.__main__ import main
from memrl.data.corpora import read_pool, read_source, read_sources, source_files
from memrl.data.corpora.items import read_items
from memrl.data.paragraphs import Paragraph
from memrl.data.ruler import RulerFiles
from memrl.data.ruler_hotpotqa import RulerHotpotQA


def hotpot_item(number: int) -> dict:
    """A made-up HotpotQA item with two gold paragraphs and two distractors."""
    context = [[f"T{number}.{i}", [f"First of {number}.{i}.", f" Second of {number}.{i}."]] for i in range(4)]
    facts = [[f"T{number}.1", 1], [f"T{number}.0", 0]]
    texts = {"_id": f"q{number}", "question": f"Question {number}?", "answer": f"Answer {number}"}
    return {**texts, "type": "bridge", "level": "hard", "supporting_facts": facts, "context": context}


def hub_row(item: dict) -> dict:
    """The same item in the columns of the hub's parquet."""
    titles, numbers = zip(*item["supporting_facts"], strict=True)
    names, sentences = zip(*item["context"], strict=True)
    changed = {
        "id": item["_id"],
        "supporting_facts": {"title": list(titles), "sent_id": list(numbers)},
        "context": {"title": list(names), "sentences": list(sentences)},
    }
    return {**{key: value for key, value in item.items() if key != "_id"}, **changed}


def squad_question(name: str, *answers: str, **more) -> dict:
    return {"id": name, "question": f"{name}?", "answers": [{"text": text, "answer_start": 0} for text in answers], **more}


def squad_file() -> dict:
    v2 = {"is_impossible": True, "plausible_answers": [{"text": "x", "answer_start": 0}]}
    first = {"context": "Alpha.", "qas": [squad_question("a", "Al", "Alpha", "Al"), squad_question("b", **v2)]}
    second = {"context": "Beta.", "qas": [squad_question("c", "Be", is_impossible=False)]}
    unasked = {"context": "Gamma.", "qas": []}
    articles = [{"title": "Greek_letters", "paragraphs": [first, second, unasked]}]
    articles.append({"title": "Rome", "paragraphs": [{"context": "Forum.", "qas": [squad_question("d", "Forum")]}]})
    return {"version": "v2.0", "data": articles}


def squad_rows() -> list[dict]:
    """The questions of `squad_file` as rows of the hub's parquet."""
    return [
        {
            "id": asked["id"],
            "title": article["title"],
            "context": paragraph["context"],
            "question": asked["question"],
            "answers": {
                "text": [answer["text"] for answer in asked["answers"]],
                "answer_start": [answer["answer_start"] for answer in asked["answers"]],
            },
        }
        for article in squad_file()["data"]
        for paragraph in article["paragraphs"]
        for asked in paragraph["qas"]
    ]


def musique_item(number: int, **changes) -> dict:
    paragraphs = [
        {"idx": i, "title": f"T{i // 2}", "paragraph_text": f"Text {number}.{i}.", "is_supporting": i in (0, 3)} for i in range(5)
    ]
    item = {"id": f"2hop__{number}", "paragraphs": paragraphs, "question": f"Question {number}?", "question_decomposition": []}
    return {**item, "answer": "One", "answer_aliases": ["1", "One", ""], "answerable": True, **changes}


def json_lines(items) -> str:
    return "".join(json.dumps(item, ensure_ascii=False) + "\n" for item in items)


@pytest.fixture
def write(tmp_path):
    def write(content, name: str = "file") -> Path:
        text = content if isinstance(content, str) else json.dumps(content)
        (tmp_path / name).write_bytes(gzip.compress(text.encode()) if name.endswith(".gz") else text.encode())
        return tmp_path / name

    return write


@pytest.fixture
def write_parquet(tmp_path):
    def write_parquet(rows) -> Path:
        pyarrow = pytest.importorskip("pyarrow")
        from pyarrow import parquet

        parquet.write_table(pyarrow.Table.from_pylist(rows), tmp_path / "rows")
        return tmp_path / "rows"

    return write_parquet


def test_kinds_are_told_by_content_not_by_name(write, write_parquet):
    items = [hotpot_item(0), hotpot_item(1)]
    assert read_source(write(items, "a.jsonl")).kind == "hotpotqa"
    assert read_source(write(json_lines(items), "a.json")).kind == "hotpotqa"
    assert read_source(write_parquet([hub_row(item) for item in items])).kind == "hotpotqa"
    assert read_source(write_parquet(squad_rows())).kind == "squad"
    assert read_source(write(squad_file(), "a.txt.gz")).kind == "squad"
    assert read_source(write(json.dumps(squad_file(), indent=1))).kind == "squad"
    assert read_source(write(json_lines([musique_item(0)]))).kind == "musique"
    assert read_source(write([{"title": "A", "text": "a"}])).kind == "paragraphs"


def test_hotpotqa_of_the_hub_is_the_official_one(write, write_parquet):
    items = [hotpot_item(i) for i in range(3)]
    official = read_source(write(items), "hotpotqa")
    assert read_source(write_parquet([hub_row(item) for item in items]), "hotpotqa") == official
    assert read_source(write([hub_row(item) for item in items]), "hotpotqa") == official
    first = official.questions[0]
    assert (first.id, first.question, first.answers) == ("q0", "Question 0?", ("Answer 0",))
    assert [paragraph.title for paragraph in first.gold] == ["T0.0", "T0.1"]
    assert [paragraph.title for paragraph in first.near] == ["T0.2", "T0.3"]
    assert first.gold[0].text == "First of 0.0. Second of 0.0."
    facts = [{"title": "T0.0", "sentences": [0]}, {"title": "T0.1", "sentences": [1]}]
    assert first.metadata == {"type": "bridge", "level": "hard", "supporting_facts": facts}


def test_hotpotqa_accepts_flattened_facts_and_titles_alone(write):
    forms = {"0": [["T0.1", 1], ["T0.0", 0], ["T0.1", 0]], "1": ["T0.1", 1, "T0.0", 0, "T0.1", 0]}
    for name, facts in forms.items():
        question = read_source(write([{**hotpot_item(0), "supporting_facts": facts}], name)).questions[0]
        both = [{"title": "T0.0", "sentences": [0]}, {"title": "T0.1", "sentences": [0, 1]}]
        assert question.metadata["supporting_facts"] == both
    question = read_source(write([{**hotpot_item(0), "supporting_facts": ["T0.1"]}])).questions[0]
    assert [paragraph.title for paragraph in question.gold] == ["T0.1"]
    assert question.metadata["supporting_facts"] == [{"title": "T0.1", "sentences": []}]


def test_squad_gold_is_the_paragraph_and_the_rest_of_the_article_is_near(write):
    source = read_source(write(squad_file()), "squad")
    assert [question.id for question in source.questions] == ["a", "c", "d"]
    first = source.questions[0]
    assert first.gold == (Paragraph("Greek letters", "Alpha."),)
    assert [paragraph.text for paragraph in first.near] == ["Beta.", "Gamma."]
    assert source.questions[2].near == ()
    assert len(source.paragraphs) == 4


def test_squad_has_each_answer_once_and_counts_what_has_none(write):
    source = read_source(write(squad_file()), "squad")
    assert source.questions[0].answers == ("Al", "Alpha")
    assert source.num_unanswerable == 1


def test_squad_of_the_hub_asks_the_official_questions(write, write_parquet):
    official = read_source(write(squad_file()), "squad")
    for path in (write_parquet(squad_rows()), write(json_lines(squad_rows()), "rows.jsonl")):
        source = read_source(path, "squad")
        assert [question.id for question in source.questions] == ["a", "c", "d"]
        # A paragraph that nothing is asked about is in no row.
        assert [question.near for question in source.questions[:2]] == [
            (Paragraph("Greek letters", text),) for text in ("Beta.", "Alpha.")
        ]
        same = ("question", "answers", "gold", "metadata")
        for found, wanted in zip(source.questions, official.questions, strict=True):
            assert [getattr(found, name) for name in same] == [getattr(wanted, name) for name in same]
        assert (source.num_unanswerable, len(source.paragraphs)) == (1, 3)


def test_several_files_are_one_source_and_share_no_id(write):
    one, two = write([hotpot_item(0)], "one"), write([hotpot_item(1)], "two")
    both, whole = read_sources([one, two], "hotpotqa"), read_source(write([hotpot_item(0), hotpot_item(1)], "both"))
    assert both == whole
    with pytest.raises(ValueError, match="both: the id 'q0' occurs twice"):
        read_sources([one, one.with_name("both")], "hotpotqa")


def test_a_folder_stands_for_its_parquet_files_in_order(tmp_path):
    for name in ("b.parquet", "a.parquet", "c.txt"):
        (tmp_path / name).touch()
    assert source_files([tmp_path, Path("x")]) == [tmp_path / "a.parquet", tmp_path / "b.parquet", Path("x")]
    (tmp_path / "empty").mkdir()
    with pytest.raises(ValueError, match=r"empty: a folder without \.parquet files"):
        source_files([tmp_path / "empty"])


@pytest.mark.parametrize("block", [1, 7, 64, 1000])
def test_a_list_is_the_same_in_blocks_of_any_size(write, monkeypatch, block):
    items = [{"title": f"T{i}", "text": '[x], "y\\ ' * i} for i in range(1, 9)]
    monkeypatch.setattr("memrl.data.corpora.items._BLOCK", block)
    for text in (json.dumps(items), "\ufeff\n  " + json.dumps(items, indent=3) + " \n"):
        assert read_source(write(text)).paragraphs == [(item["title"], item["text"]) for item in items]


def test_of_a_list_no_more_than_a_block_is_held_as_text(write, monkeypatch):
    path = write([{"title": f"T{i}", "text": "x" * 1000} for i in range(3000)])
    monkeypatch.setattr("memrl.data.corpora.items._BLOCK", 2**14)
    tracemalloc.start()
    try:
        assert sum(1 for _ in read_items(path)) == 3000
        assert tracemalloc.get_traced_memory()[1] < 300_000
    finally:
        tracemalloc.stop()


def test_musique_gold_is_told_by_paragraph_because_titles_repeat(write):
    source = read_source(write(json_lines([musique_item(0), musique_item(1)]), "m.jsonl.gz"), "musique")
    first = source.questions[0]
    assert [paragraph.text for paragraph in first.gold] == ["Text 0.0.", "Text 0.3."]
    assert [paragraph.title for paragraph in first.near] == ["T0", "T1", "T2"]
    assert first.answers == ("One", "1")


def test_musique_leaves_out_the_unanswerable_twin_of_a_question(write):
    source = read_source(write(json_lines([musique_item(0), musique_item(0, answerable=False), musique_item(1)])), "musique")
    assert [question.id for question in source.questions] == ["2hop__0", "2hop__1"]
    assert source.num_unanswerable == 1
    assert len(source.paragraphs) == 15


def test_a_file_without_any_answerable_question_is_refused(write):
    path = write(json_lines([musique_item(0, answerable=False)]))
    with pytest.raises(ValueError, match="holds no question that can be used: 1 without an answer are left out"):
        read_source(path, "musique")
    assert len(read_pool([path])) == 5


def test_hotpotqas_fullwiki_file_gives_its_questions_with_gold_and_all_paragraphs(write, write_parquet, tmp_path, capsys):
    items = [hotpot_item(0), hotpot_item(1), hotpot_item(2)]
    items[1]["supporting_facts"].append(["Elsewhere", 0])
    for path in (write(items), write_parquet([hub_row(item) for item in items])):
        source = read_source(path, "hotpotqa")
        assert [question.id for question in source.questions] == ["q0", "q2"]
        assert (source.num_without_gold, source.num_unanswerable, len(source.paragraphs)) == (1, 0, 12)
        assert len(read_pool([path])) == 12
    assert (
        main(["data", "hotpotqa", str(write(items)), "--out", str(tmp_path / "out.jsonl"), "--documents", "5"]) == 0
        and "2 questions, 5 documents each; 1 whose gold paragraphs are not all in their context are left out"
        in capsys.readouterr().out
    )
    RulerHotpotQA(RulerFiles(hotpotqa=str(write(items))))
    assert "2 questions; 1 whose gold paragraphs are not all in their context are left out" in capsys.readouterr().err


def test_hotpotqas_test_file_is_a_pool_only(write):
    path = write([{name: value for name, value in hotpot_item(0).items() if name in ("_id", "question", "context")}])
    assert len(read_pool([path])) == 4
    with pytest.raises(ValueError, match="no question that can be used: 1 without an answer are left out"):
        read_source(path, "hotpotqa")


def test_a_pool_takes_any_kind_of_file(write):
    paths = [
        write([{"title": "A", "text": "a"}], "plain"),
        write(json_lines([{"title": "B", "text": "b\u2028c"}]), "lines"),
        write([hotpot_item(0)], "hotpot"),
        write(squad_file(), "squad"),
        write(json_lines([musique_item(0)]), "musique"),
    ]
    paragraphs = read_pool(paths)
    assert paragraphs[:2] == [("A", "a"), ("B", "b\u2028c")]
    assert len(paragraphs) == 1 + 1 + 4 + 4 + 5


def test_another_kind_than_the_one_asked_for_is_named(write):
    with pytest.raises(ValueError, match="holds SQuAD, but HotpotQA is needed"):
        read_source(write(squad_file()), "hotpotqa")
    with pytest.raises(ValueError, match="holds plain paragraphs, but MuSiQue is needed"):
        read_source(write([{"title": "A", "text": "a"}]), "musique")
    with pytest.raises(ValueError, match=r"item 0: its fields are of no known kind.* it has 'question', 'answer'"):
        read_source(write([{"question": "?", "answer": "yes"}]))


def with_change(make, *path, value):
    """What `make` makes, with the value at the path replaced, or removed where it is Ellipsis."""
    content = make()
    place = content
    for step in path[:-1]:
        place = place[step]
    if value is ...:
        del place[path[-1]]
    else:
        place[path[-1]] = value
    return content


def two_hotpot() -> list:
    return [hotpot_item(0), hotpot_item(1)]


def two_musique() -> list:
    return [musique_item(0), musique_item(1)]


QUESTION = ("data", 0, "paragraphs", 0, "qas", 0)
MISTAKES = {
    # name: (maker, path of the change, value, what the message must name)
    "hotpotqa: no id": (two_hotpot, (1, "_id"), None, ["item 1: _id"]),
    "hotpotqa: id twice": (two_hotpot, (1, "_id"), "q0", ["'q0'", "twice"]),
    "hotpotqa: no answer": (two_hotpot, (1, "answer"), None, ["item 1 (q1): answer"]),
    "hotpotqa: question blank": (two_hotpot, (1, "question"), " ", ["item 1 (q1): question"]),
    "hotpotqa: no context": (two_hotpot, (1, "context"), [], ["q1", "context: a list", "[]"]),
    "hotpotqa: context of texts": (two_hotpot, (1, "context"), ["T1.0", "T1.1"], ["q1", "context", "T1.0"]),
    "hotpotqa: sentences not texts": (two_hotpot, (1, "context"), [["T1.0", [1]]], ["q1", "context"]),
    "hotpotqa: columns of two lengths": (two_hotpot, (1, "context"), {"title": ["A"], "sentences": []}, ["q1", "context"]),
    "hotpotqa: no facts": (two_hotpot, (1, "supporting_facts"), [], ["q1", "supporting_facts: a list", "[]"]),
    "hotpotqa: facts begin with a number": (two_hotpot, (1, "supporting_facts"), [0, "T1.0"], ["q1", "supporting_facts"]),
    "hotpotqa: facts of truth values": (two_hotpot, (1, "supporting_facts"), ["T1.0", True], ["q1", "supporting_facts"]),
    "hotpotqa: half a surrogate": (two_hotpot, (1, "answer"), "\ud800", ["item 1 (q1): answer", "surrogate"]),
    "hotpotqa: an item that is a list": (two_hotpot, (1,), ["x"], ["item 1", "object"]),
    "squad: no title": (squad_file, ("data", 1, "title"), ..., ["article 1: title"]),
    "squad: no paragraphs": (squad_file, ("data", 1, "paragraphs"), [], ["article 1 (Rome): paragraphs"]),
    "squad: no text": (squad_file, ("data", 0, "paragraphs", 1, "context"), "", ["(Greek_letters), paragraph 1: context"]),
    "squad: no id": (squad_file, (*QUESTION, "id"), 5, ["article 0 (Greek_letters), paragraph 0, question 0: id"]),
    "squad: no question": (squad_file, (*QUESTION, "question"), ..., ["paragraph 0, question 0 (a): question"]),
    "squad: no answers": (squad_file, (*QUESTION, "answers"), [], ["question 0 (a): answers"]),
    "squad: blank answer": (squad_file, (*QUESTION, "answers", 1, "text"), "", ["question 0 (a), answer 1: text"]),
    "squad rows: answers": (squad_rows, (1, "answers"), None, ["item 1 (b): answers"]),
    "squad rows: blank answer": (squad_rows, (2, "answers", "text", 0), " ", ["item 2 (c): answers"]),
    "squad: no articles": (squad_file, ("data",), [], ["data: a list of objects"]),
    "musique: no id": (two_musique, (1, "id"), ..., ["item 1: id"]),
    "musique: no answer": (two_musique, (1, "answer"), ..., ["item 1 (2hop__1): answer"]),
    "musique: aliases": (two_musique, (1, "answer_aliases"), [1], ["(2hop__1): answer_aliases"]),
    "musique: paragraph": (two_musique, (1, "paragraphs", 2, "paragraph_text"), 7, ["(2hop__1), paragraph 2: paragraph_text"]),
    "musique: support": (two_musique, (1, "paragraphs", 2, "is_supporting"), 1, ["(2hop__1), paragraph 2: is_supporting"]),
    "musique: no support": (two_musique, (1, "paragraphs"), [two_musique()[0]["paragraphs"][1]], ["(2hop__1): paragraphs: none"]),
    "musique: answerable": (two_musique, (1, "answerable"), "yes", ["(2hop__1): answerable"]),
}


@pytest.mark.parametrize("name", MISTAKES)
def test_a_mistake_is_named_with_file_item_and_field(write, name):
    make, place, value, words = MISTAKES[name]
    path = write(with_change(make, *place, value=value))
    with pytest.raises(ValueError) as caught:
        read_source(path)
    assert all(word in str(caught.value) for word in (str(path), *words)), caught.value


def test_a_broken_line_is_named_by_its_number(write):
    path = write(json_lines([musique_item(0)]) + "\n{\n")
    with pytest.raises(ValueError, match="line 3: not JSON"):
        read_source(path)
    path = write(json_lines([musique_item(0), musique_item(1, answer=3)]))
    with pytest.raises(ValueError, match=r"line 2 \(2hop__1\): answer"):
        read_source(path)


def test_files_that_are_something_else_are_refused(write, tmp_path):
    cut = write([hotpot_item(0)], "cut.gz")
    cut.write_bytes(cut.read_bytes()[:40])
    (tmp_path / "latin").write_bytes(b'[{"title": "caf\xe9"}]')
    (tmp_path / "PAR1").write_bytes(b"PAR1 and nothing else")
    mistakes = {
        "cannot be read": [cut, tmp_path / "none", tmp_path, tmp_path / "PAR1"],
        "not JSON": [
            write('[{"title": "A", "text": "a"}, '),
            write('[{"title": "A", "text": "a"', "torn"),
            write('[{"title": "A", "text": "a"} {}]', "comma"),
            write('[{"title": "A", "text": "a"}] {}', "behind"),
            write('{"data": [{}]}\n{}', "objects"),
            write("", "empty"),
        ],
        "at least one item": [write("[]", "list"), write("3", "number")],
        "an object is needed": [write("[3]", "numbers")],
        "is not UTF-8": [tmp_path / "latin"],
    }
    for words, paths in mistakes.items():
        for path in paths:
            with pytest.raises(ValueError, match=words) as caught:
                read_source(path)
            assert str(path) in str(caught.value)


def test_real_squad_has_one_gold_paragraph_that_holds_every_answer(shared_data):
    path = shared_data / "squad" / "dev-v1.1.rebuilt.json.gz"
    if not path.is_file():
        pytest.skip(f"the public SQuAD file {path.name} is not there")
    source = read_source(path, "squad")
    assert (len(source.questions), source.num_unanswerable, len(set(source.paragraphs))) == (10_570, 0, 2067)
    assert all(answer in question.gold[0].text for question in source.questions for answer in question.answers)
    assert source.questions[0].answers == ("Denver Broncos",)
