r"""Verifiers against a table written by hand, and against random and hostile text."""

import time

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from memrl.scoring.scores import score_response
from memrl.scoring.verify import ANSWER_CHARACTERS, exact_match, extract_answer, last_boxed, lenient_match, strict_match, token_f1

BOXES = [
    # (text, content of the last box)
    ("", None),
    ("Paris", None),
    (r"\boxed", None),
    (r"\boxed{}", ""),
    (r"\boxed{Paris}", "Paris"),
    (r"so \boxed{ Paris } it is", " Paris "),
    (r"\boxed {Paris}", "Paris"),
    ("\\boxed\n{Paris}", "Paris"),
    (r"\boxed{a} and \boxed{b}", "b"),
    (r"\boxed{a} and \boxed{b", "a"),  # the answer that was finished counts
    (r"\boxed{Paris", None),
    (r"\boxed{a{b}", None),
    (r"\boxed{a{b}c}", "a{b}c"),
    (r"\boxed{\frac{1}{2}}", r"\frac{1}{2}"),
    (r"\boxed{\boxed{x}}", "x"),
    (r"\boxed{the answer is \boxed{x}, sure}", "x"),
    (r"\boxed{never closed, \boxed{x}", "x"),
    (r"{ stray \boxed{x}", "x"),
    (r"} stray \boxed{x} }}", "x"),
    (r"\boxed{\{1, 2\}}", r"\{1, 2\}"),
    (r"\boxed{a\}b}", r"a\}b"),
    (r"\boxed{a\}", None),
    (r"\boxed{a\\}", r"a\\"),  # an escaped backslash, then a real brace
    (r"\boxed{a\\\}b}", r"a\\\}b"),
    (r"\boxed{{{x}}}", "{{x}}"),
    (r"{{ \boxed{x}}} }", "x"),
    (r"\\boxed{x}", "x"),  # escaped once too often, as in JSON
    (r"\fbox{x}", "x"),
    (r"\boxed{x} \fbox{y}", "x"),  # a frame is a fallback only
    (r"\boxed{x \fbox{y}", "y"),
    (r"\boxedin{x}", None),
    (r"boxed{x}", None),
    (r"\boxed 42$", None),
    (r"\boxed{first} " + "I explain at length. " * 50, "first"),
    ("\\boxed{\u5317\u4eac}", "\u5317\u4eac"),
    ("\\boxed{two\nlines}", "two\nlines"),
]


@pytest.mark.parametrize(("text", "content"), BOXES)
def test_last_boxed_table(text, content):
    assert last_boxed(text) == content


BOXED = [
    # (content of the box, gold answers, strict, lenient)
    ("Paris", ["Paris"], 1, 1),
    ("paris", ["Paris"], 1, 1),
    ("PARIS", ["Paris"], 1, 1),
    ("  Paris\n", ["Paris"], 1, 1),
    ("London", ["Paris"], 0, 0),
    ("Paris", ["London", "Paris"], 1, 1),
    ("Paris", [], 0, 0),
    ("Paris", "Paris", 1, 1),  # a bare string is one answer, not five letters
    ("P", "Paris", 0, 0),
    # articles
    ("The Beatles", ["Beatles"], 0, 1),
    ("Beatles", ["the Beatles"], 0, 1),
    ("an apple", ["the apple"], 0, 1),
    ("theatre", ["atre"], 0, 0),
    ("The Who", ["The Who"], 1, 1),
    ("who", ["The Who"], 0, 1),
    ("The", ["The"], 1, 1),
    ("A", ["A"], 1, 1),
    ("the a", ["An"], 0, 0),
    ("a virus", ["A"], 0, 0),
    ("the", ["Paris"], 0, 0),
    # whitespace
    ("New York", ["NewYork"], 1, 1),
    ("New   York", ["New York"], 1, 1),
    ("New\nYork", ["New York"], 1, 1),
    ("New\u00a0York", ["New York"], 1, 1),
    ("New\u3000York", ["New York"], 1, 1),
    # punctuation
    ("Paris.", ["Paris"], 0, 1),
    ('"Paris"', ["Paris"], 0, 1),
    ("\u201cParis\u201d", ["Paris"], 0, 1),
    ("**Paris**", ["Paris"], 0, 1),
    ("Greenwich Village", ["Greenwich Village, New York City"], 0, 0),
    ("Greenwich Village New York City", ["Greenwich Village, New York City"], 0, 1),
    ("U.S.", ["US"], 0, 1),
    ("well-known", ["wellknown"], 0, 1),
    ("World\u2019s Best Goalkeeper", ["World's Best Goalkeeper"], 0, 1),
    ("Jamal O'Brien (actor)", ["Jamal O\u2019Brien"], 0, 1),
    ("Hawai\u02bbi", ["Hawai'i"], 0, 1),
    ("yes/no", ["yes"], 0, 1),
    ("Paris\u2014the capital", ["Paris"], 0, 1),
    ("player(s)", ["player"], 0, 1),
    ("AT&T", ["AT & T"], 1, 1),
    # pieces of words, pieces of the gold answer
    ("not mentioned", ["no"], 0, 0),
    ("unknown", ["no"], 0, 0),
    ("no-one", ["no"], 0, 0),
    ("no, they were not", ["no"], 0, 1),
    ("e", ["Chief of Protocol"], 0, 0),
    ("Chief", ["Chief of Protocol"], 0, 0),
    ("the Chief of Protocol of the US", ["Chief of Protocol"], 0, 1),
    ("Chief of the Protocol", ["Chief of Protocol"], 0, 1),
    ("Chief and head of Protocol", ["Chief of Protocol"], 0, 0),
    ("7", ["7"], 1, 1),
    ("7", ["17", "70"], 0, 0),
    # nothing at all
    ("", ["Paris"], 0, 0),
    ("", [""], 0, 0),
    (" ", [" "], 0, 0),
    ("Paris", [""], 0, 0),
    ("Paris", ["..."], 0, 0),
    ("...", ["Paris"], 0, 0),
    ("...", ["!!!"], 0, 0),
    ("...", ["..."], 1, 0),
    ("+", ["+"], 1, 0),
    # numbers
    ("1,462", ["1,462"], 1, 1),
    ("1462", ["1,462"], 0, 1),
    ("1,234,567 people", ["1234567"], 0, 1),
    ("3.5", ["35"], 0, 0),
    ("3.5 million", ["3.5"], 0, 1),
    ("about 3.", ["3"], 0, 1),
    ("19690", ["1969"], 0, 0),
    ("1969\u20131974", ["1969-1974"], 1, 1),
    ("Hewlett\u2013Packard", ["Hewlett-Packard"], 1, 1),
    ("Hewlett-Packard", ["Hewlett\u2013Packard"], 1, 1),
    ("the Hewlett\u2010Packard Company", ["Hewlett\u2212Packard"], 0, 1),
    ("COVID\u201119", ["COVID-19"], 1, 1),
    ("3\u20135", ["3-5"], 1, 1),
    ("\u22125", ["-5"], 1, 1),
    ("red\u2015green", ["red-green"], 1, 1),  # of the strict box every dash is one
    ("Ed\u2014the actor", ["Ed-the actor"], 1, 1),
    ("it is Ed\u2014the actor", ["Edthe"], 0, 0),  # an em dash separates words
    ("Hewlett \u2013 Packard", ["Hewlett Packard"], 0, 1),
    ("HewlettPackard", ["Hewlett\u2013Packard"], 0, 1),
    ("1969-1974", ["1974"], 0, 1),
    ("1, 2, 3", ["1,2,3"], 1, 1),
    ("1,2,3", ["1 2 3"], 0, 1),
    ("1,2,3", ["123"], 0, 0),
    ("$5", ["5"], 0, 1),
    # lists
    ("March, April", ["March and April"], 0, 0),
    ("red,green,blue", ["green"], 0, 1),
    ("April and March", ["March and April"], 0, 0),
    # Unicode
    ("Pedro Rodri\u0301guez", ["Pedro Rodríguez"], 1, 1),  # a combining accent
    ("Pedro Rodriguez", ["Pedro Rodríguez"], 0, 0),
    ("STRASSE", ["Straße"], 1, 1),
    ("in der STRASSE", ["Straße"], 0, 1),
    ("ὈΔΥΣΣΕΥΣ", ["ὀδυσσευς"], 1, 1),  # two small sigmas have one capital
    ("\uff11\uff19\uff16\uff12", ["1962"], 0, 1),  # full-width digits
    ("Par\u00adis", ["Paris"], 0, 1),  # a soft hyphen
    ("Paris\ufe0f", ["Paris"], 0, 1),  # a variation selector, as after an emoji
    ("नमस्ते दुनिया", ["दुनिया"], 0, 1),
    ("नमस्ते दुनिया", ["दुन"], 0, 0),
    # no spaces between words
    ("北京", ["北京"], 1, 1),
    ("答案是北京\u3002", ["北京"], 0, 1),
    ("北", ["北京"], 0, 0),
    ("東京タワーです", ["東京タワー"], 0, 1),
    ("서울입니다", ["서울"], 0, 1),
    ("กรุงเทพเป็น", ["กรุงเทพ"], 0, 1),
    # LaTeX
    (r"\text{Paris}", ["Paris"], 1, 1),
    (r"\textbf{\text{Paris}}", ["Paris"], 1, 1),
    (r"\mathrm{Paris}", ["Paris"], 1, 1),
    (r"New\ York", ["New York"], 1, 1),
    (r"1\,462", ["1462"], 1, 1),
    (r"50\%", ["50%"], 1, 1),
    (r"50\%", ["50"], 1, 1),
    (r"50%", ["50"], 0, 1),
    (r"\$5", ["$5"], 1, 1),
    (r"90^\circ", ["90\u00b0"], 1, 1),
    (r"90^{\circ}", ["90"], 1, 1),
    (r"\dfrac{1}{2}", [r"\frac{1}{2}"], 1, 1),
    (r"\left(1, 2\right)", ["(1,2)"], 1, 1),
    (r"AT\&T", ["AT&T"], 1, 1),
    (r"\leftarrow", ["arrow"], 0, 0),
]


@pytest.mark.parametrize(("content", "gold", "strict", "lenient"), BOXED)
def test_match_boxed_answer_table(content, gold, strict, lenient):
    response = f"Let me see. The answer is \\boxed{{{content}}}. " + "That was that. " * 30
    assert (strict_match(response, gold), lenient_match(response, gold)) == (strict, lenient)


UNBOXED = [
    # (response, gold answers, lenient); strict is 0 throughout
    ("Paris", ["Paris"], 1),
    ("The answer is (Paris).", ["Paris"], 1),
    ("Ed Wood was not mentioned.", ["no"], 0),
    (r"It is \boxed{Paris", ["Paris"], 1),
    (r"Not Paris but \boxed{London}.", ["Paris"], 0),
    (r"Paris. \boxed{}", ["Paris"], 0),
    ("<think>Paris?</think>London", ["Paris"], 0),
    ("<think>London?</think>Paris", ["Paris"], 1),
    ("x", ["xylophone"], 0),
    ("", ["Paris"], 0),
    ("the", ["the end"], 0),
    ("Answer: A", ["A"], 0),  # an article inside a sentence is no answer
]


@pytest.mark.parametrize(("response", "gold", "lenient"), UNBOXED)
def test_match_without_a_complete_box_table(response, gold, lenient):
    assert (strict_match(response, gold), lenient_match(response, gold)) == (0, lenient)


def test_extract_answer_prefers_the_box_over_the_text():
    assert extract_answer(r"London \boxed{Paris} London") == "Paris"
    assert extract_answer("London") == "London"
    assert extract_answer(r"London \boxed{}") == ""


EXACT = [
    (r"I think so: \boxed{the Ed  WOOD.}", ["Ed Wood"], 1),
    ("Ed Wood", ["Ed Wood"], 1),
    ("Ed Wood, director", ["Ed Wood"], 0),
    ("Ed", ["Ed Wood"], 0),
    ("Wood Ed", ["Ed Wood"], 0),
    ("Ed Wood Ed Wood", ["Ed Wood"], 0),
    ("EdWood", ["Ed Wood"], 1),  # by letters, as strict_match has it in a box
    (r"\boxed{EdWood}", ["Ed Wood"], 1),
    ("Ed", ["Wood", "Ed"], 1),
    ("1,462", ["1462"], 1),
    ("U.S.", ["us"], 1),
    ("not mentioned", ["no"], 0),
    ("No.", ["no"], 1),
    ("<think>Ed</think> Wood", ["Wood"], 1),
    ("<think>It is Ed Wood", ["Ed Wood"], 0),
    ("+", ["-"], 0),
    ("", [""], 0),
    ("Ed", [], 0),
]


@pytest.mark.parametrize(("prediction", "gold", "expected"), EXACT)
def test_exact_match_table(prediction, gold, expected):
    assert exact_match(prediction, gold) == expected


F1 = [
    ("Ed Wood", ["Ed Wood"], 1.0),
    ("the Ed  Wood.", ["Ed Wood"], 1.0),
    (r"I think so: \boxed{Ed Wood}", ["Ed Wood"], 1.0),
    ("Ed Wood, director", ["Ed Wood"], 0.8),
    ("Ed", ["Ed Wood"], 2 / 3),
    ("Wood Wood", ["Wood"], 2 / 3),  # multisets: the second "wood" is not common
    ("Wood Wood", ["Wood Wood Wood"], 0.8),
    ("Ed", ["Wood"], 0.0),
    ("Ed", ["Wood", "Ed X", "Ed Wood Junior"], 2 / 3),
    ("yes", ["yes"], 1.0),
    ("yes indeed", ["yes"], 0.0),
    ("yes", ["yes indeed"], 0.0),
    ("no", ["yes"], 0.0),
    ("noanswer", ["noanswer here"], 0.0),
    ("", ["Ed"], 0.0),
    ("", [""], 0.0),
    ("Ed", [], 0.0),
    ("\u5317\u4eac\u5e02", ["\u5317\u4eac"], 0.8),
]


@pytest.mark.parametrize(("prediction", "gold", "expected"), F1)
def test_token_f1_table(prediction, gold, expected):
    assert token_f1(prediction, gold) == pytest.approx(expected)


# --- properties ---------------------------------------------------------------------------------------------

property_test = settings(max_examples=200, deadline=None, derandomize=True, database=None)

pieces = ["\\boxed{", "\\fbox{", "\\text{", "{", "}", "\\", "\\}", "%", "^\\circ", " ", "the ", "no"]
pieces = st.sampled_from([*pieces, "</think>", "\u0301", "北"])
wild = st.text(max_size=40) | st.lists(pieces | st.text(max_size=3), max_size=20).map("".join)
letters = st.characters(categories=["L", "N", "P", "Z"], exclude_characters="\\{}")
sane = st.text(letters, min_size=1, max_size=30).filter(lambda text: any(char.isalnum() for char in text))


@given(wild, st.lists(wild, max_size=3))
@property_test
def test_any_text_scores_without_raising(prediction, gold):
    assert strict_match(prediction, gold) in (0.0, 1.0)
    assert lenient_match(prediction, gold) in (0.0, 1.0)
    assert 0.0 <= token_f1(prediction, gold) <= 1.0
    assert last_boxed(prediction) is None or last_boxed(prediction) in prediction


@given(st.text(st.characters(), max_size=30), st.text(st.characters(), max_size=30))
@property_test
def test_surrogates_and_controls_score_without_raising(prediction, gold):
    boxed = f"\\boxed{{{prediction}}}"
    assert all(match(boxed, [gold]) in (0.0, 1.0) for match in (strict_match, lenient_match))


@given(sane, wild, wild.filter(lambda text: not any(part in text for part in ("box", "}", "think"))))
@property_test
def test_gold_in_a_box_matches_itself_whatever_stands_around(gold, before, after):
    # Only another box or a closing brace could change what the last box is, and the end of a thought makes it none.
    response = f"{before.replace(chr(92), '')} \\boxed{{{gold}}}{after}"
    assert strict_match(response, [gold]) == 1.0
    assert lenient_match(response, [gold]) == 1.0
    assert token_f1(response, [gold]) == pytest.approx(1.0)


@given(sane, st.randoms(use_true_random=False))
@property_test
def test_strict_implies_exact_and_exact_lenient(gold, random):
    variant = "".join(random.choice([c, c.lower(), c + " "]) for c in gold)
    response = f"\\boxed{{{variant}}}"
    assert strict_match(response, [gold]) <= exact_match(response, [gold]) <= lenient_match(response, [gold])


@given(sane, sane, st.lists(sane, max_size=3))
@property_test
def test_more_gold_answers_never_lower_a_score(prediction, gold, others):
    response = f"\\boxed{{{prediction}}}"
    for score in (strict_match, lenient_match, exact_match, token_f1):
        assert score(response, [gold]) <= score(response, [*others, gold])


HOSTILE = {
    "braces": "{" * 100_000,
    "boxes": "\\boxed{" * 15_000,
    "a box of braces": "\\boxed{" + "{" * 100_000,
    "a box of pairs": "\\boxed{" + "{}" * 50_000 + "}",
    "nested boxes": "\\boxed{" * 10_000 + "}" * 10_000,
    "backslashes": "\\boxed{" + "\\" * 100_000,
    "spaces after a box": "\\boxed" + " " * 100_000,
    "spaces after a command": "\\boxed{\\text" + " " * 100_000 + "}",
    "nested commands": "\\boxed{" + "\\text{" * 10_000 + "}" * 10_001,
    "combining marks": "\\boxed{e" + "\u0301\u0316" * 50_000 + "}",
    "decomposing marks": "\\boxed{e" + "\u0f73" * 100_000 + "}",
    "words": "a " * 50_000,
}


@pytest.mark.parametrize("name", HOSTILE)
def test_hostile_text_takes_linear_time(name):
    # Linear time is 0.05 s; quadratic time is several seconds, and a megabyte of it would be many minutes.
    for score in (strict_match, lenient_match, exact_match, token_f1):
        start = time.process_time()
        score(HOSTILE[name], ["no", "the a " * 50 + "b"])
        assert time.process_time() - start < 1.0


@pytest.mark.parametrize("piece", ["{", "}", "\\boxed{", "\\boxed{}", "\\text{", "a-", "e\u0301"])
def test_of_a_megabyte_the_end_is_scored_whatever_it_costs_to_read_all(piece):
    for score in (strict_match, lenient_match, exact_match, token_f1):
        assert score(piece * (1_000_000 // len(piece)) + "} \\boxed{Ed}", ["Ed"]) == 1.0
    assert last_boxed("\\boxed{Ed}" + " " * ANSWER_CHARACTERS) is None == last_boxed("\\boxed{Ed" + "}" * ANSWER_CHARACTERS)
    assert last_boxed("\\boxed{Ed}" + " " * (ANSWER_CHARACTERS - 10)) == "Ed"
    assert lenient_match("Ed" + " x" * (ANSWER_CHARACTERS // 2), ["Ed"]) == 0.0


def test_a_box_is_searched_once_for_all_scores():
    last_boxed.cache_clear()
    score_response("so \\boxed{Ed}", ["Ed"])
    assert last_boxed.cache_info().misses == 1


def test_a_box_in_the_thinking_is_no_answer():
    thought = r"<think>\boxed{Ed Wood}</think> I cannot say."
    assert strict_match(thought, ["Ed Wood"]) == lenient_match(thought, ["Ed Wood"]) == 0.0
    assert strict_match(r"<think>\boxed{no}</think> \boxed{Ed Wood}", ["Ed Wood"]) == 1.0
    assert strict_match(r"<think>\boxed{Ed Wood} and on and on", ["Ed Wood"]) == 0.0
