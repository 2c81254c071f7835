"""Long documents: which paragraphs, in which order, and how many tokens."""

import math
from itertools import pairwise

import pytest

from memrl.data.corpora import read_source
from memrl.data.documents import LongDocuments, TokenCounter, heading
from memrl.data.paragraphs import Paragraph, Pool, Question, sample_seed

# Degrees of freedom -> the quantile 0.999 of the chi-square distribution: where positions are uniform, 1 in 1,000 is above it.
CRITICAL = {9: 27.877, 19: 43.820, 49: 85.351}


class Characters:
    """A tokenizer of which the parts of a text do not add up to the whole: three characters are a token, rounded up or down."""

    vocab_size = 1

    def __init__(self, up: bool):
        self.up = up
        self.encoded: list[str] = []

    def encode(self, text: str) -> list[int]:
        self.encoded.append(text)
        return [0] * (math.ceil(len(text) / 3) if self.up else len(text) // 3)


class Words:
    """A tokenizer of which the parts add up exactly: a word is a token."""

    vocab_size = 1

    def encode(self, text: str) -> list[int]:
        return [0] * len(text.split())


def make_question(number: int, num_gold: int = 2, num_near: int = 2) -> Question:
    own = [Paragraph(f"T{number}.{i}", f"Text of {number}.{i}." + " word" * (7 * i % 5)) for i in range(num_gold + num_near)]
    return Question(f"q{number}", f"Question {number}?", (f"Answer {number}",), tuple(own[:num_gold]), tuple(own[num_gold:]))


@pytest.fixture(scope="module")
def questions() -> list[Question]:
    return [make_question(i) for i in range(30)]


@pytest.fixture(scope="module")
def pool(questions) -> Pool:
    return Pool(paragraph for question in questions for paragraph in question.gold + question.near)


def wordy_pool(count: int) -> Pool:
    """Paragraphs of 8 to 67 words."""
    return Pool(Paragraph(f"P{i}", "word " * (8 + 37 * i % 60)) for i in range(count))


def shown(sample) -> list[Paragraph]:
    """The paragraphs of a document, in order; checks the headings."""
    documents = sample.context.split("\n\n")
    assert [document.split("\n")[0] for document in documents] == [f"Document {i}:" for i in range(1, len(documents) + 1)]
    return [Paragraph(*document.split("\n")[1:]) for document in documents]


def chi_square(counts, expected) -> float:
    """Pearson's statistic, the sum over the cells of (observed - expected)^2 / expected."""
    return sum((count - mean) ** 2 / mean for count, mean in zip(counts, expected, strict=True))


def position_statistic(samples, num_documents: int) -> float:
    """Chi-square of the place of one gold paragraph of each sample against the uniform distribution."""
    counts = [0] * num_documents
    total = 0
    for sample in samples:
        first = min(sample.metadata["evidence"], key=lambda piece: piece["title"])
        counts[first["document"] - 1] += 1
        total += 1
    return chi_square(counts, [total / num_documents] * num_documents)


# --- which paragraphs ---------------------------------------------------------------------------------------


def test_a_document_holds_all_own_paragraphs_and_others_once(questions, pool):
    for question in questions:
        sample = LongDocuments(pool).of_documents(question, 20, seed=0)
        found = shown(sample)
        assert len(found) == len(set(found)) == sample.metadata["num_documents"] == 20
        assert set(question.gold + question.near) <= set(found) <= set(pool.paragraphs)
        assert (sample.id, sample.question, sample.answers) == (question.id, question.question, question.answers)
        assert sample.metadata["repeated"] == 0


def test_evidence_and_depths_say_where_the_gold_paragraphs_stand(questions, pool):
    for question in questions:
        sample = LongDocuments(pool).of_documents(question, 20, seed=0)
        evidence = sample.metadata["evidence"]
        texts = [sample.context[piece["begin"] : piece["end"]] for piece in evidence]
        assert sorted(texts) == sorted(
            f"Document {piece['document']}:\n{gold.title}\n{gold.text}"
            for gold in question.gold
            for piece in evidence
            if piece["title"] == gold.title
        )
        assert sample.metadata["depths"] == [piece["begin"] / len(sample.context) for piece in evidence]
        assert evidence == sorted(evidence, key=lambda piece: piece["document"])


def test_two_gold_paragraphs_may_share_a_title(pool):
    gold = (Paragraph("Same", "One."), Paragraph("Same", "Two."))
    sample = LongDocuments(pool).of_documents(Question("q", "?", ("a",), gold, (Paragraph("Same", "Three."),)), 10, seed=0)
    texts = {sample.context[piece["begin"] : piece["end"]].split("\n")[2] for piece in sample.metadata["evidence"]}
    assert texts == {"One.", "Two."}


def test_samples_depend_on_seed_and_id_alone(questions, pool):
    documents = LongDocuments(pool)
    first = [documents.of_documents(question, 20, seed=3) for question in questions]
    other = LongDocuments(Pool(reversed(pool.paragraphs)))
    assert [other.of_documents(question, 20, seed=3) for question in reversed(questions)] == first[::-1]
    turned = Question("q0", "Question 0?", ("Answer 0",), questions[0].gold[::-1], questions[0].near[::-1])
    assert other.of_documents(turned, 20, seed=3) == first[0]
    assert len({frozenset(shown(sample)) for sample in first}) == 30
    assert all(documents.of_documents(question, 20, seed=4) != sample for question, sample in zip(questions, first, strict=True))


def test_a_longer_document_holds_the_shorter_one_in_another_order(questions, pool):
    documents = LongDocuments(pool)
    for question in questions:
        sizes = [shown(documents.of_documents(question, count, seed=0)) for count in (3, 4, 20, 50, 120)]
        for short, long in pairwise(sizes):
            assert set(short) < set(long)
        assert sizes[2] != [paragraph for paragraph in sizes[3] if paragraph in sizes[2]]


def test_fewer_documents_than_own_keep_the_gold(questions, pool):
    samples = [LongDocuments(pool).of_documents(question, 3, seed=0) for question in questions]
    assert all(len(shown(sample)) == 3 and len(sample.metadata["evidence"]) == 2 for sample in samples)
    assert {paragraph.title.split(".")[1] for sample in samples for paragraph in shown(sample)} == {"0", "1", "2", "3"}


def test_all_paragraphs_can_be_asked_for_but_not_one_more(questions, pool):
    documents = LongDocuments(pool)
    assert len(set(shown(documents.of_documents(questions[0], 120, seed=0)))) == 120
    with pytest.raises(ValueError, match=r"121 documents: .*'q0' has 4 .* and 116 others.* 120 in all.*repeat"):
        documents.of_documents(questions[0], 121, seed=0)
    with pytest.raises(ValueError, match=r"1 documents: question 'q0' needs 2"):
        documents.of_documents(questions[0], 1, seed=0)


def test_another_version_of_an_own_paragraph_is_never_drawn(questions):
    own = questions[0].gold[0]
    versions = [own, Paragraph(own.title, "another version of it"), Paragraph("another title", own.text)]
    others = [Paragraph("New", "x"), Paragraph("New", "x"), Paragraph("New", "y"), Paragraph("Blank", " "), Paragraph("", "z")]
    documents = LongDocuments(Pool([*versions, *others]), repeat="report")
    assert documents.pool.num_others(questions[0].gold) == 3
    sample = documents.of_documents(questions[0], 40, seed=0)
    assert "another" not in sample.context
    assert sample.context.count(own.text) == 1


def test_paragraphs_repeat_when_asked_and_are_counted(questions, pool):
    documents = LongDocuments(pool, repeat="report")
    question = questions[0]
    for count, repeated in ((120, 0), (121, 1), (400, 280)):
        sample = documents.of_documents(question, count, seed=0)
        found = shown(sample)
        assert (len(found), sample.metadata["repeated"]) == (count, repeated)
        assert all(found.count(paragraph) == 1 for paragraph in question.gold + question.near)
        times = [found.count(paragraph) for paragraph in pool.paragraphs if paragraph not in question.gold + question.near]
        assert max(times) - min(times) <= 1
    assert set(shown(documents.of_documents(question, 60, 0))) == set(shown(LongDocuments(pool).of_documents(question, 60, 0)))


def test_repetition_without_anything_to_repeat_is_refused(questions):
    documents = LongDocuments(Pool(questions[0].gold), repeat="report")
    with pytest.raises(ValueError, match=r"0 others to draw from, 4 in all; give a smaller number, add a pool of paragraphs$"):
        documents.of_documents(questions[0], 5, seed=0)


def test_documents_without_titles(questions, pool):
    sample = LongDocuments(pool, titles=False).of_documents(questions[0], 4, seed=0)
    assert all(document.split("\n")[1].startswith("Text of 0.") for document in sample.context.split("\n\n"))


def test_sample_seed_is_the_same_in_every_process_and_python():
    assert sample_seed(0, "q0") == 0x4D0AC3D4F0C655A1
    assert len({sample_seed(seed, *parts) for seed in range(5) for parts in (("q0",), ("q1",), ("q0", "order"), ("q0", 1))}) == 20


# --- where the evidence stands ------------------------------------------------------------------------------


def test_the_place_of_the_evidence_is_uniform(pool):
    # The released data has one permutation for all samples of a length: a model can learn where to look.
    documents = LongDocuments(pool)
    samples = [documents.of_documents(make_question(i), 20, seed=0) for i in range(3000)]
    assert position_statistic(samples, 20) < CRITICAL[19]


def test_the_place_of_the_evidence_is_uniform_over_seeds(questions, pool):
    documents = LongDocuments(pool)
    samples = (documents.of_documents(questions[0], 20, seed) for seed in range(3000))
    assert position_statistic(samples, 20) < CRITICAL[19]


def test_the_place_of_the_evidence_is_uniform_in_documents_of_so_many_tokens():
    documents = LongDocuments(wordy_pool(200), Words())
    counts, expected = [0] * 10, [0.0] * 10
    for i in range(2500):
        sample = documents.of_tokens(make_question(i), 600, seed=1)
        size = sample.metadata["num_documents"]
        first = min(sample.metadata["evidence"], key=lambda piece: piece["title"])
        counts[(first["document"] - 1) * 10 // size] += 1
        for place in range(size):
            expected[place * 10 // size] += 1 / size
    assert chi_square(counts, expected) < CRITICAL[9]


def test_the_statistic_tells_a_permutation_that_all_samples_share():
    evidence = [{"title": "T", "document": 7}]
    samples = [type("S", (), {"metadata": {"evidence": evidence}}) for _ in range(100)]
    assert position_statistic(samples, 20) == pytest.approx(1900)


# --- tokens -------------------------------------------------------------------------------------------------


TOKENIZERS = {"exact": Words(), "fewer": Characters(up=True), "more": Characters(up=False)}
SIZES = [("exact", 400), *((name, length) for name in TOKENIZERS for length in (1000, 5000))]


@pytest.mark.parametrize(("name", "length"), SIZES)
def test_a_document_has_at_most_so_many_tokens_and_at_most_a_hundredth_less(name, length, questions):
    tokenizer = TOKENIZERS[name]
    documents = LongDocuments(wordy_pool(1000), tokenizer)
    for question in questions:
        sample = documents.of_tokens(question, length, seed=0)
        found = len(tokenizer.encode(sample.context))
        assert sample.metadata["num_tokens"] == found
        assert 0.99 * length <= found <= length
        assert set(question.gold) <= set(shown(sample))
        assert sample.metadata["num_documents"] == len(set(shown(sample)))


def test_each_paragraph_is_tokenised_once_and_a_document_a_few_times(questions):
    tokenizer = Characters(up=True)
    documents = LongDocuments(wordy_pool(300), tokenizer)
    for question in questions[:10]:
        documents.of_tokens(question, 3000, seed=0)
    parts = [text for text in tokenizer.encoded if len(text) < 3000]
    assert len(parts) == len(set(parts)) + parts.count("Document 1:\n") - 1
    assert len(tokenizer.encoded) - len(parts) <= 40


def test_digits_of_the_headings_are_counted():
    class Digits(Words):
        def encode(self, text: str) -> list[int]:
            return [0] * (len(text.split()) + sum(character.isdigit() for character in text))

    paragraphs = [Paragraph("T", "word")] * 1200
    whole = "".join(f"{heading(number)}T\nword\n\n" for number in range(1, 1201))
    assert TokenCounter(Digits(), titles=True).total(paragraphs) == len(Digits().encode(whole))


def test_a_shorter_document_in_tokens_is_within_the_longer_one_but_for_its_last(questions):
    documents = LongDocuments(wordy_pool(1000), Words())
    for question in questions:
        sizes = [set(shown(documents.of_tokens(question, length, seed=0))) for length in (500, 1000, 2000, 8000)]
        assert all(len(short - long) <= 1 for short, long in pairwise(sizes))
        assert len(sizes[0] - sizes[-1]) == 0


def test_documents_and_tokens_draw_the_same_paragraphs(questions):
    documents = LongDocuments(wordy_pool(1000), Words())
    by_tokens = set(shown(documents.of_tokens(questions[0], 1000, seed=0)))
    by_number = set(shown(documents.of_documents(questions[0], len(by_tokens), seed=0)))
    assert len(by_tokens - by_number) <= 1 + 3


def test_gold_that_does_not_fit_is_refused(questions):
    with pytest.raises(ValueError, match=r"10 tokens: the 2 gold paragraphs of question 'q0' take 1\d; give a larger number"):
        LongDocuments(wordy_pool(10), Words()).of_tokens(questions[0], 10, seed=0)


def test_too_few_paragraphs_for_the_tokens_are_refused_or_repeated(questions):
    pool = wordy_pool(20)
    with pytest.raises(ValueError, match=r"5000 tokens: question 'q0' has 4 .* 20 others .* 24 in all with \d+ tokens; give"):
        LongDocuments(pool, Words()).of_tokens(questions[0], 5000, seed=0)
    sample = LongDocuments(pool, Words(), repeat="report").of_tokens(questions[0], 5000, seed=0)
    assert 4950 <= sample.metadata["num_tokens"] <= 5000
    assert sample.metadata["repeated"] == sample.metadata["num_documents"] - 24 > 0


def test_all_paragraphs_together_may_just_make_the_length(questions):
    documents = LongDocuments(wordy_pool(20), Words())
    everything = len(Words().encode(documents.of_documents(questions[0], 24, seed=0).context))
    for length in (everything, everything + 5):
        assert documents.of_tokens(questions[0], length, seed=0).metadata["num_documents"] == 24


# --- the public files ---------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("name", "count", "documents"),
    [("hotpot_train.subset.json.gz", 200, 50), ("hotpot_dev_distractor.subset100.json.gz", 100, 200)],
)
def test_real_hotpotqa_files_become_documents(shared_data, name, count, documents):
    path = shared_data / "hotpotqa" / name
    if not path.is_file():
        pytest.skip(f"the public HotpotQA file {name} is not there")
    source = read_source(path, "hotpotqa")
    maker = LongDocuments(Pool(source.paragraphs))
    positions = set()
    for question in source.questions:
        sample = maker.of_documents(question, documents, seed=0)
        assert sample.context.count("\n\nDocument ") == documents - 1
        assert len(sample.metadata["evidence"]) == 2
        by_title = {paragraph.title: paragraph.text for paragraph in question.gold}
        for piece in sample.metadata["evidence"]:
            text = sample.context[piece["begin"] : piece["end"]]
            assert text == f"Document {piece['document']}:\n{piece['title']}\n{by_title[piece['title']]}"
        positions.add(tuple(piece["document"] for piece in sample.metadata["evidence"]))
    assert len(source.questions) == count
    assert len(positions) > 0.9 * count


def test_real_hotpotqa_positions_are_uniform(shared_data):
    path = shared_data / "hotpotqa" / "hotpot_dev_distractor.subset100.json.gz"
    if not path.is_file():
        pytest.skip(f"the public HotpotQA file {path.name} is not there")
    questions = read_source(path).questions
    maker = LongDocuments(Pool(paragraph for question in questions for paragraph in question.gold + question.near))
    samples = (maker.of_documents(question, 50, seed) for seed in range(20) for question in questions)
    assert position_statistic(samples, 50) < CRITICAL[49]
