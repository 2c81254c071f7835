"""RULER's made-up tasks from within: what stands in the documents, and solvers that read the answers out of them."""

import collections
import math
import random
import re

import pytest

from memrl.data.ruler import make_ruler
from memrl.data.ruler.counts import zeta_counts
from memrl.data.ruler.draws import distinct_letters, shuffle, uuid
from memrl.data.ruler.needles import KINDS
from memrl.types import Sample
from tests.test_ruler import files, make_essay, tokenizer  # noqa: F401 (fixtures)

NEEDLE = re.compile(r"A hidden (number|UUID) of (\S+) is (\S+)\.(?=\s|$)")
UUID = re.compile(r"[0-9a-f]{8}-[0-9a-f]{4}-4[0-9a-f]{3}-[89ab][0-9a-f]{3}-[0-9a-f]{12}")


def contained(response: str, sample: Sample) -> float:
    """The share of gold answers that the response contains; the best of them where each alone is right."""
    found = [answer.lower() in response.lower() for answer in sample.answers]
    return sum(found) / len(found) if sample.match == "all" else float(any(found))


# --- solvers: question and context in, response out ---------------------------------------------------------


def solve_needles(question: str, context: str) -> str:
    keys = re.split(r", | and ", re.search(r"of (.+?)\? ", question)[1])
    return ", ".join(value for _, key, value in NEEDLE.findall(context) if key in keys)


def solve_chain(question: str, context: str) -> str:
    held: dict[str, str] = {}
    for name, source in re.findall(r"^LET (\w+) = (\w+)$", context, re.MULTILINE):
        held[name] = held.get(source, source)
    value = re.search(r"\d+", question)[0]
    return ", ".join(name for name, what in held.items() if what == value)


def solve_common(question: str, context: str) -> str:
    counts = collections.Counter(re.findall(r"^\d+\. (\S+)$", context, re.MULTILINE))
    return ", ".join(word for word, _ in counts.most_common(10))


def solve_frequent(question: str, context: str) -> str:
    counts = collections.Counter(one for one in context.split() if one != "...")
    return ", ".join(word for word, _ in counts.most_common(3))


SOLVERS = {**dict.fromkeys(KINDS, solve_needles), "vt": solve_chain, "cwe": solve_common, "fwe": solve_frequent}


@pytest.mark.parametrize("name", SOLVERS)
def test_question_and_document_alone_give_the_full_score(name, tokenizer, files):  # noqa: F811
    task = make_ruler(name, tokenizer, files)
    for index, length in enumerate([1500, 2500, 4999, 9000, 9000, 20_000]):
        sample = task.sample(length, index, 0)
        response = SOLVERS[name](sample.question, sample.context)
        assert contained(response, sample) == 1
        assert len(response.split(", ")) == len(sample.answers)  # nothing besides the gold answers fits the question
        assert contained(SOLVERS[name](sample.question, task.sample(length, index, 1).context), sample) == 0


# --- needles ------------------------------------------------------------------------------------------------

EXPECTED = {  # keys, values, needles of each key, keys asked for
    "niah_single_1": ("word", "number", 1, 1, 1),
    "niah_single_2": ("word", "number", 1, 1, 1),
    "niah_single_3": ("word", "uuid", 1, 1, 1),
    "niah_multikey_1": ("word", "number", 4, 1, 1),
    "niah_multikey_2": ("word", "number", None, 1, 1),
    "niah_multikey_3": ("uuid", "uuid", None, 1, 1),
    "niah_multivalue": ("word", "number", 1, 4, 1),
    "niah_multiquery": ("word", "number", 4, 1, 4),
}
FORMS = {"word": re.compile(r"[a-z]+-[a-z]+"), "number": re.compile(r"[1-9]\d{6}"), "uuid": UUID}


@pytest.mark.parametrize("name", EXPECTED)
def test_needles_stand_once_where_the_depths_say(name, tokenizer, files):  # noqa: F811
    key_form, value_form, num_keys, num_values, num_asked = EXPECTED[name]
    task = make_ruler(name, tokenizer, files)
    assert task.answer_tokens == 128 and task.num_questions is None
    for index in range(5):
        sample = task.sample(6000, index, 0)
        needles = NEEDLE.findall(sample.context)
        keys, values = [key for _, key, _ in needles], [value for *_, value in needles]
        assert all(FORMS[key_form].fullmatch(key) for key in keys) and all(FORMS[value_form].fullmatch(value) for value in values)
        assert set(collections.Counter(keys).values()) == {num_values} and len(set(values)) == len(values)
        assert len(set(keys)) == num_keys if num_keys else len(set(keys)) > 20
        assert len(sample.answers) == len(sample.metadata["depths"]) == num_asked * num_values
        assert sample.match == ("all" if num_asked * num_values == 4 else "any")
        for answer, depth in zip(sample.answers, sample.metadata["depths"], strict=True):
            assert sample.context.count(answer) == 1
            begin = round(depth * len(sample.context))
            assert NEEDLE.match(sample.context, begin)[3] == answer
            assert begin == 0 or sample.context[begin - 1] in " \n"
        others = sample.metadata.get("other_depths", [])
        assert len(others) == (3 if name == "niah_multikey_1" else 0)
        assert all(NEEDLE.match(sample.context, round(depth * len(sample.context))) for depth in others)


@pytest.mark.parametrize("name", ["niah_single_2", "niah_multivalue"])
def test_without_its_needles_a_document_is_the_users_text(name, tokenizer, files):  # noqa: F811
    sample = make_ruler(name, tokenizer, files).sample(8000, 1, 0)
    bare = re.sub(NEEDLE.pattern + r"\s?", "", sample.context).strip()
    assert bare in f"{make_essay(3000)} {make_essay(3000)}"


@pytest.mark.parametrize("name", ["niah_multikey_2", "niah_multikey_3"])
def test_a_haystack_of_needles_holds_nothing_else(name, tokenizer, files):  # noqa: F811
    sample = make_ruler(name, tokenizer, files).sample(8000, 1, 0)
    *lines, last = sample.context.split("\n")
    assert all(NEEDLE.fullmatch(line) for line in lines)
    assert last.startswith("A hidden"[: len(last)])  # it may break off


def test_values_that_the_text_holds_by_chance_are_passed_over(tokenizer, tmp_path):  # noqa: F811
    from memrl.data.ruler import RulerFiles

    (tmp_path / "essay.txt").write_text(make_essay(500))
    own = RulerFiles(essays=str(tmp_path))
    task = make_ruler("niah_single_2", tokenizer, own)
    taken = task.sample(4096, 0, 0)
    key = re.search(r"of (\S+)\?", taken.question)[1]
    (tmp_path / "essay.txt").write_text(f"{make_essay(500)} He wrote {taken.answers[0]} on the {key}.")
    other = make_ruler("niah_single_2", tokenizer, own).sample(4096, 0, 0)
    assert other.answers != taken.answers and key not in other.question
    assert solve_needles(other.question, other.context) == other.answers[0]


@pytest.mark.parametrize("name", ["niah_single_1", "niah_single_2", "niah_multikey_2", "niah_multivalue", "vt"])
def test_depths_are_uniform(name, tokenizer, files):  # noqa: F811
    """Chi-square against ten equal classes: 27.9 is exceeded once in a thousand (9 degrees of freedom)."""

    class Characters:  # quick, and the places do not depend on it
        vocab_size = 256

        def encode(self, text):
            return range(len(text))

    task = make_ruler(name, Characters(), files)
    found = [depth for index in range(400) for depth in task.sample(20_000, index, 0).metadata["depths"]]
    assert len(found) == 400 * {"niah_multivalue": 4, "vt": 5}.get(name, 1)
    classes = collections.Counter(min(9, int(10 * depth)) for depth in found)
    expected = len(found) / 10
    assert sum((classes[number] - expected) ** 2 / expected for number in range(10)) < 27.9
    assert len({round(depth, 4) for depth in found}) > 0.8 * min(len(found), 150)  # no grid


# --- chains -------------------------------------------------------------------------------------------------


def test_a_chain_goes_through_five_variables_in_order(tokenizer, files):  # noqa: F811
    task = make_ruler("vt", tokenizer, files)
    assert task.answer_tokens == 30
    for index in range(20):
        sample = task.sample(4096, index, 0)
        lines = [line for line in sample.context.split("\n") if line.startswith("LET")]
        names = [line.split()[1] for line in lines]
        value = lines[0].split()[-1]
        assert tuple(names) == sample.answers and len(set(names)) == 5 and sample.match == "all"
        assert all(re.fullmatch("[A-Z]{5}", name) for name in names)
        assert 10_000 <= int(value) <= 99_998 and value in sample.question and sample.context.count(value) == 1
        assert [line.split()[-1] for line in lines[1:]] == names[:-1]
        places = [round(depth * len(sample.context)) for depth in sample.metadata["depths"]]
        assert places == sorted(places) and [sample.context[place:].split("\n")[0] for place in places] == lines
        assert not any(name in sample.question for name in names)


# --- counts -------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(("length", "common", "other"), [(2048, 6, 1), (4095, 6, 1), (5000, 30, 3), (12_000, 30, 3)])
def test_common_words_occur_ten_times_as_often_as_others(length, common, other, tokenizer, files):  # noqa: F811
    task = make_ruler("cwe", tokenizer, files)
    sample = task.sample(length, 0, 0)
    items = [line.split(". ") for line in sample.context.split("\n")]
    assert [int(number) for number, _ in items] == list(range(1, len(items) + 1))
    counts = collections.Counter(word for _, word in items)
    assert {word for word, count in counts.items() if count == common} == set(sample.answers) and len(sample.answers) == 10
    assert set(counts.values()) == {common, other}
    assert task.answer_tokens == 120 and sample.match == "all" and sample.metadata["depths"] == []


def test_the_vocabulary_of_the_list_grows_with_the_length(tokenizer, files):  # noqa: F811
    task = make_ruler("cwe", tokenizer, files)
    lists = [task.sample(length, 0, 0).context.split("\n") for length in (10_000, 40_000)]
    short, long = (len({line.split()[1] for line in lines}) for lines in lists)
    assert long > 4 * short


@pytest.mark.parametrize("length", [1000, 4096, 16_000])
def test_coded_words_are_zeta_distributed(length, tokenizer, files):  # noqa: F811
    sample = make_ruler("fwe", tokenizer, files).sample(length, 0, 0)
    counts = collections.Counter(sample.context.split())
    ranked = [count for _, count in counts.most_common()]
    assert counts["..."] == ranked[0] and all(re.fullmatch("[a-z]{6}", word) for word in counts if word != "...")
    first = next(size for size in range(10, 10_000) if zeta_counts(size) == ranked)  # one nominal size explains all counts
    assert sum(ranked) <= first
    assert [counts[word] for word in sample.answers] == ranked[1:4] and len(set(ranked[:5])) == 5
    assert sample.match == "all" and sample.metadata["depths"] == []


def test_zeta_counts_by_hand():
    # 1000 / zeta(2) = 607.93: over 1, 4, 9, 16, ... 24^2 = 576.
    counts = zeta_counts(1000)
    assert counts[:5] == [607, 151, 67, 37, 24] and counts[-1] == 1 and len(counts) == 24
    assert counts == [math.floor(1000 / 1.6449340668482264 / rank**2) for rank in range(1, 25)]
    assert all(len(set(zeta_counts(size)[1:5])) == 4 for size in range(100, 5000))


# --- draws --------------------------------------------------------------------------------------------------


def test_draws_are_what_they_say():
    rng = random.Random(0)
    assert all(UUID.fullmatch(uuid(rng)) for _ in range(200))
    names = distinct_letters(random.Random(1), 1, 26)
    assert sorted(names) == list("ABCDEFGHIJKLMNOPQRSTUVWXYZ") and distinct_letters(random.Random(1), 1, 5) == names[:5]
    orders = collections.Counter()
    for _ in range(6000):
        items = [0, 1, 2]
        shuffle(rng, items)
        orders[tuple(items)] += 1
    chi_square = sum((count - 1000) ** 2 / 1000 for count in orders.values())
    assert len(orders) == 6 and chi_square < 20.5  # 0.1% at 5 degrees of freedom
