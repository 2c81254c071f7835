"""All scores of a response by name, for evaluation: the verifiers' and RULER's own.

    match   strict                  lenient             exact              f1                   ruler
    any     the box is a gold       a gold stands in    the answer is      best over the        1 if any gold
            answer                  the answer          a gold answer      gold answers         is a substring
    all     the box lists the gold  each of them        the answer lists   against all of       share of them that
            answers, nothing else   stands in it        them, nothing else them together        are substrings

"all" is for questions whose answers all have to be named: several needles, chains of variables, the most frequent words.
"""

from collections.abc import Sequence

from memrl.scoring.verify import (
    as_list,
    exact_match,
    exact_match_all,
    extract_answer,
    lenient_match,
    lenient_match_all,
    strict_match,
    strict_match_all,
    token_f1,
    token_f1_all,
)

SCORES = ("strict", "lenient", "exact", "f1", "ruler")
MATCHES = ("any", "all")


def score_response(response: str, answers: Sequence[str], match: str = "any") -> dict[str, float]:
    """Every score in `SCORES` of a response, each in [0, 1]; all are 0.0 where there is no gold answer.

    Args:
        match: "any": each of the answers alone is right. "all": every one of them has to be named.

    Raises:
        ValueError: another word for `match`.
    """
    check_match(match)
    if match == "any":
        functions = (strict_match, lenient_match, exact_match, token_f1, string_match_part)
    else:
        functions = (strict_match_all, lenient_match_all, exact_match_all, token_f1_all, string_match_all)
    return {name: function(response, answers) for name, function in zip(SCORES, functions, strict=True)}


def check_match(match: str) -> None:
    """Raise a ValueError unless `match` is one of `MATCHES`."""
    if match not in MATCHES:
        raise ValueError(f"match is {match!r}; it must be {' or '.join(repr(name) for name in MATCHES)}")


def string_match_part(response: str, answers: Sequence[str]) -> float:
    """RULER's score of its QA tasks: 1.0 if any gold answer is a substring of the answer, without case.

        max_r [r.lower() in answer.lower()]        (NVIDIA/RULER, scripts/eval/synthetic/constants.py)

    The substring is one of characters, as in RULER, so the gold "no" is found in "not mentioned", where `lenient_match` goes by
    words. The answer is `extract_answer(response)`: the last box, or else the whole response. RULER searches whole responses, and
    its prompts end in the beginning of the answer, so these are answers; a response to a prompt that asks for a box may also say
    what else it considered, which must not count. Nothing is rounded, and an empty gold answer is found nowhere.
    """
    return max(_contained(response, answers), default=0.0)


def string_match_all(response: str, answers: Sequence[str]) -> float:
    """RULER's score of its other tasks: the share of the gold answers that are substrings; see `string_match_part`.

    sum_r [r.lower() in answer.lower()] / R        (the same file)
    """
    found = _contained(response, answers)
    return sum(found) / len(found) if found else 0.0


def _contained(response: str, answers: Sequence[str]) -> list[float]:
    text = extract_answer(response).lower()
    return [float(bool(answer.strip()) and answer.lower() in text) for answer in as_list(answers)]
