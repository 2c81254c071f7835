r"""Every score of a response against tables written by hand, and what must hold between them on any text."""

import time

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from memrl.scoring.scores import SCORES, score_response, verifier_scores

THIRD = pytest.approx(1 / 3)

ANY = [
    # (response, gold answers, strict, lenient, exact, f1, ruler)
    (r"so \boxed{Paris}", ["Paris"], 1, 1, 1, 1, 1),
    (r"so \boxed{PARIS}", ["Paris"], 1, 1, 1, 1, 1),
    (r"\boxed{ Paris" + "\n}", ["Paris"], 1, 1, 1, 1, 1),
    ("Paris", ["Paris"], 0, 1, 1, 1, 1),
    ("It is Paris.", ["Paris"], 0, 1, 0, 0.5, 1),
    (r"Paris? No: \boxed{London}", ["Paris"], 0, 0, 0, 0, 0),
    (r"\boxed{London} \boxed{Paris}", ["Paris"], 1, 1, 1, 1, 1),
    (r"\boxed{Paris} \boxed{London}", ["Paris"], 0, 0, 0, 0, 0),
    (r"\boxed{\text{Paris}}", ["Paris"], 1, 1, 1, 1, 1),
    (r"\boxed{a \boxed{Paris} b}", ["Paris"], 1, 1, 1, 1, 1),
    (r"\boxed{Paris", ["Paris"], 0, 1, 0, pytest.approx(2 / 3), 1),
    (r"\boxed{}", ["Paris"], 0, 0, 0, 0, 0),
    ("", ["Paris"], 0, 0, 0, 0, 0),
    ("", [""], 0, 0, 0, 0, 0),
    (r"\boxed{x}", [" "], 0, 0, 0, 0, 0),
    (r"\boxed{x}", [], 0, 0, 0, 0, 0),
    (r"\boxed{Paris}", "Paris", 1, 1, 1, 1, 1),
    # articles and punctuation
    (r"\boxed{The Beatles}", ["Beatles"], 0, 1, 1, 1, 1),
    (r"\boxed{Beatles}", ["The Beatles"], 0, 1, 1, 1, 0),
    (r"\boxed{Paris.}", ["Paris"], 0, 1, 1, 1, 1),
    (r"\boxed{well-known}", ["wellknown"], 0, 1, 1, 1, 0),
    (r"\boxed{Ed Wood, director}", ["Ed Wood"], 0, 1, 0, 0.8, 1),
    (r"\boxed{A}", ["A"], 1, 1, 1, 1, 1),
    (r"\boxed{NewYork}", ["New York"], 1, 1, 1, 0, 0),  # strictly equal by letters, so equal for those by words too
    (r"\boxed{+}", ["+"], 1, 0, 0, 0, 1),
    # characters against words
    (r"\boxed{not mentioned}", ["no"], 0, 0, 0, 0, 1),
    (r"\boxed{unknown}", ["no"], 0, 0, 0, 0, 1),
    (r"\boxed{no}", ["no"], 1, 1, 1, 1, 1),
    (r"\boxed{e}", ["Chief of Protocol"], 0, 0, 0, 0, 0),
    (r"\boxed{17}", ["7"], 0, 0, 0, 0, 1),
    # numbers
    (r"\boxed{1462}", ["1,462"], 0, 1, 1, 1, 0),
    (r"\boxed{3.5}", ["35"], 0, 0, 0, 0, 0),
    (r"\boxed{50\%}", ["50%"], 1, 1, 1, 1, 0),
    # several gold answers, each right alone
    (r"\boxed{Ed}", ["Edward", "Ed"], 1, 1, 1, 1, 1),
    (r"\boxed{Ed and Edward}", ["Edward", "Ed"], 0, 1, 0, 0.5, 1),
    # Unicode
    ("\\boxed{STRASSE}", ["Stra\u00dfe"], 1, 1, 1, 1, 0),  # RULER lowers, the others fold
    ("\\boxed{Rodri\u0301guez}", ["Rodr\u00edguez"], 1, 1, 1, 1, 0),
    ("\\boxed{\u5317\u4eac\u5e02}", ["\u5317\u4eac"], 0, 1, 0, 0.8, 1),
]

ALL = [
    (r"\boxed{17, 23}", ["17", "23"], 1, 1, 1, 1, 1),
    (r"\boxed{23, 17}", ["17", "23"], 1, 1, 1, 1, 1),
    (r"\boxed{23 17}", ["17", "23"], 1, 1, 1, 1, 1),
    (r"\boxed{23;17}", ["17", "23"], 1, 1, 1, 1, 1),
    ("\\boxed{23\n17}", ["17", "23"], 1, 1, 1, 1, 1),
    (r"\boxed{23 and 17}", ["17", "23"], 1, 1, 1, 1, 1),
    (r"\boxed{5, 23, and 17}", ["17", "23", "5"], 1, 1, 1, 1, 1),
    (r"\boxed{5, 23 \text{ and } 17}", ["17", "23", "5"], 1, 1, 1, 1, 1),
    (r"\boxed{17}", ["17", "23"], 0, 0, 0, pytest.approx(2 / 3), 0.5),
    (r"\boxed{17}", ["17", "23", "5"], 0, 0, 0, 0.5, THIRD),
    (r"\boxed{17, 23, 42}", ["17", "23"], 0, 1, 0, 0.8, 1),
    (r"\boxed{17, 23, 23}", ["17", "23"], 0, 1, 0, 0.8, 1),
    (r"\boxed{1723}", ["17", "23"], 0, 0, 0, 0, 1),  # RULER's by characters
    (r"\boxed{[17, 23]}", ["17", "23"], 0, 1, 1, 1, 1),
    (r"\boxed{17. 23.}", ["17", "23"], 0, 1, 1, 1, 1),
    (r"\boxed{17 or 23}", ["17", "23"], 0, 1, 0, 0.8, 1),
    ("The numbers are 17 and 23.", ["17", "23"], 0, 1, 0, pytest.approx(2 * 2 / 6), 1),  # "the" is no word
    ("17, 23", ["17", "23"], 0, 1, 1, 1, 1),
    (r"17, 23 \boxed{17}", ["17", "23"], 0, 0, 0, pytest.approx(2 / 3), 0.5),
    (r"\boxed{17} \boxed{23}", ["17", "23"], 0, 0, 0, pytest.approx(2 / 3), 0.5),
    (r"\boxed{}", ["17", "23"], 0, 0, 0, 0, 0),
    ("", ["17", "23"], 0, 0, 0, 0, 0),
    (r"\boxed{17}", [], 0, 0, 0, 0, 0),
    (r"\boxed{17}", ["17"], 1, 1, 1, 1, 1),
    (r"\boxed{17}", ["17", "17"], 1, 1, 1, pytest.approx(2 / 3), 1),
    (r"\boxed{17}", ["17", ""], 0, 0, 0, 1, 0.5),
    (r"\boxed{123,456}", ["123", "456"], 1, 1, 1, 0, 1),  # by words it is one number
    (r"\boxed{abc DEF}", ["DEF", "ABC"], 1, 1, 1, 1, 1),
    (r"\boxed{New York, Paris}", ["Paris", "New York"], 1, 1, 1, 1, 1),
    (r"\boxed{Paris New" + "\n" + r"York}", ["Paris", "New York"], 1, 1, 1, 1, 0.5),
    (r"\boxed{Paris York New}", ["Paris", "New York"], 0, 0, 0, 1, 0.5),
    (r"\boxed{York, New York}", ["York", "New York"], 1, 1, 1, 1, 1),
    (r"\boxed{New York}", ["York", "New York"], 0, 1, 0, 0.8, 1),
    (r"\boxed{New, New York}", ["New", "New York"], 1, 1, 1, 1, 1),
    (r"\boxed{New York, New}", ["New", "New York"], 1, 1, 1, 1, 1),
    (r"\boxed{salt and pepper, and}", ["and", "salt", "pepper"], 1, 1, 1, pytest.approx(6 / 7), 1),
    (r"\boxed{salt, and, pepper}", ["and", "salt", "pepper"], 1, 1, 1, 1, 1),
    (r"\boxed{the cat, a dog}", ["cat", "dog"], 0, 1, 1, 1, 1),
    (r"\boxed{no, 5}", ["not", "5"], 0, 0, 0, 0.5, 0.5),
]


@pytest.mark.parametrize(("match", "case"), [("any", case) for case in ANY] + [("all", case) for case in ALL])
def test_scores_table(match, case):
    response, gold, *expected = case
    assert score_response(response, gold, match) == dict(zip(SCORES, expected, strict=True))


def test_another_match_is_refused():
    with pytest.raises(ValueError, match="match is 'each'; it must be 'any' or 'all'"):
        score_response("x", ["x"], "each")


def test_without_a_gold_answer_everything_scores_nothing():
    for match in ("any", "all"):
        assert verifier_scores("\\boxed{x}", [], match) == {"strict": 0.0, "lenient": 0.0}


property_test = settings(max_examples=200, deadline=None, derandomize=True, database=None)
pieces = [
    "\\boxed{",
    "}",
    "{",
    "\\",
    ",",
    ";",
    " ",
    "\n",
    "and",
    " and ",
    "the ",
    "a",
    "b",
    "a b",
    "1",
    "1,234",
    "No",
    "</think>",
    "北",
    "ß",
]
wild = st.text(max_size=30) | st.lists(st.sampled_from(pieces) | st.text(max_size=2), max_size=15).map("".join)
matches = st.sampled_from(["any", "all"])
words = st.text("abcdeABCDE123", min_size=1, max_size=5).filter(lambda word: word.lower() not in ("a", "and"))
listed = st.lists(words, min_size=1, max_size=5, unique_by=str.lower)


@given(wild, st.lists(wild, max_size=3), matches)
@property_test
def test_any_text_scores_and_the_scores_are_in_order(response, gold, match):
    scores = score_response(response, gold, match)
    assert list(scores) == list(SCORES) and all(0.0 <= score <= 1.0 for score in scores.values())
    assert all(scores[name] in (0.0, 1.0) for name in ("strict", "lenient", "exact"))
    assert scores["exact"] <= scores["lenient"]
    if all(any(char.isalnum() for char in answer) for answer in gold):
        assert scores["strict"] <= scores["exact"]


@given(wild, st.lists(wild, max_size=3), matches)
@property_test
def test_training_and_evaluation_score_alike(response, gold, match):
    scores = score_response(response, gold, match)
    assert verifier_scores(response, gold, match) == {name: scores[name] for name in ("strict", "lenient")}


@given(st.text(st.characters(), max_size=30), st.text(st.characters(), max_size=30), matches)
@property_test
def test_surrogates_and_controls_score_without_raising(content, gold, match):
    assert set(score_response(f"\\boxed{{{content}}}", [gold, "x"], match)) == set(SCORES)


@given(wild, st.lists(wild, min_size=1, max_size=3), wild)
@property_test
def test_one_more_answer_that_is_right_alone_never_lowers_a_score(response, gold, more):
    fewer, many = score_response(response, gold), score_response(response, [*gold, more])
    assert all(fewer[name] <= many[name] for name in SCORES)


@given(wild, listed, words)
@property_test
def test_one_more_answer_that_has_to_be_named_never_makes_a_wrong_list_right(response, gold, more):
    fewer, many = score_response(response, gold, "all"), score_response(response, [*gold, more], "all")
    assert many["lenient"] <= fewer["lenient"]


@given(wild, wild)
@property_test
def test_of_one_answer_any_is_all(response, answer):
    one, every = score_response(response, [answer], "any"), score_response(response, [answer], "all")
    assert all(one[name] == every[name] for name in ("strict", "lenient", "exact", "ruler"))


@given(listed, st.randoms(use_true_random=False), st.lists(st.sampled_from([", ", ",", "; ", "\n", " and ", "  "]), min_size=5))
@property_test
def test_a_list_of_all_answers_is_right_in_any_order_case_and_with_any_separators(gold, random, separators):
    order = random.sample(gold, len(gold))
    body = order[0] + "".join(
        separator + random.choice([word, word.upper(), word.lower()])
        for separator, word in zip(separators, order[1:], strict=False)
    )
    scores = score_response(f"I think \\boxed{{{body}}}.", gold, "all")
    assert scores["strict"] == scores["exact"] == scores["lenient"] == scores["ruler"] == 1.0


@given(listed, words)
@property_test
def test_a_list_with_one_missing_or_one_too_many_is_not_strictly_right(gold, more):
    scores = score_response(f"\\boxed{{{', '.join(gold[1:])}}}", gold, "all")
    assert scores["strict"] == scores["exact"] == 0.0
    if more.lower() not in {word.lower() for word in gold}:
        assert score_response(f"\\boxed{{{', '.join([*gold, more])}}}", gold, "all")["strict"] == 0.0


@given(listed, matches, st.sampled_from(["\u00a0", "  ", "\n", "\t "]))
@property_test
def test_case_and_kind_of_white_space_change_no_verdict(gold, match, space):
    response = f"\\boxed{{{' '.join(gold)}}}"
    other = f"\\boxed{{{space}{space.join(gold).upper()}{space}}}"
    before, after = score_response(response, gold, match), score_response(other, gold, match)
    assert before == after


@pytest.mark.parametrize("match", ["any", "all"])
@pytest.mark.parametrize(
    "text", ["and " * 50_000, "a, " * 60_000, "\\boxed{" + "x y " * 40_000 + "}", ", ;" * 60_000, "1," * 80_000]
)
def test_hostile_text_takes_linear_time(text, match):
    # Linear time is 0.2 s; quadratic time would be minutes.
    began = time.process_time()
    score_response(text, ["x y", "and and", "x", "1", "the a b"], match)
    assert time.process_time() - began < 3.0
