"""All scores of a response by name: the two verifiers for training, and three more for evaluation.

    match   strict                  lenient             exact              f1                   ruler
    any     the box is a gold       a gold answer is    the answer is      best over the        1 if any gold
            answer                  in the answer       a gold answer      gold answers         is a substring
    all     the box lists the gold  each of them is     the answer lists   against all of       share of them that
            answers, nothing else   in the answer       them, nothing else them together        are substrings

"all" is for questions that need all of their answers: several needles, chains of variables, the most frequent words.
"""

from collections.abc import Sequence

from memrl.scoring.verify import as_list, exact_match, extract_answer, lenient_match, strict_match, token_f1

SCORES = ("strict", "lenient", "exact", "f1", "ruler")


def verifier_scores(response: str, answers: Sequence[str], match: str = "any") -> dict[str, float]:
    """The scores "strict" and "lenient" of a response, each 0.0 or 1.0.

    The same model can score 50% by one and 80% by the other, so both are always reported.
    """
    return {"strict": strict_match(response, answers, match), "lenient": lenient_match(response, answers, match)}


def score_response(response: str, answers: Sequence[str], match: str = "any") -> dict[str, float]:
    """Every score in `SCORES` of a response, each in [0, 1]; all are 0.0 without a gold answer.

    `match` is "any" if each of the answers alone is right, "all" if the response has to give all of them.
    """
    if match not in ("any", "all"):
        raise ValueError(f"match is {match!r}; it must be 'any' or 'all'")
    functions = (strict_match, lenient_match, exact_match, token_f1, string_match)
    return {name: function(response, answers, match) for name, function in zip(SCORES, functions, strict=True)}


def string_match(response: str, answers: Sequence[str], match: str = "any") -> float:
    """RULER's scores: whether a gold answer is a substring of the answer, without case.

        any (its QA tasks):     max_r [r.lower() in answer.lower()]
        all (its other tasks):  sum_r [r.lower() in answer.lower()] / R       (NVIDIA/RULER, scripts/eval/synthetic/constants.py)

    Substrings are of characters, as in RULER, so the gold "no" is found in "not mentioned", while `lenient_match` compares words.
    The answer is `extract_answer(response)`: the last box, or else the whole response. RULER searches whole responses, and its
    prompts end in the beginning of the answer, so these are answers; a response to a prompt that requires a box may also mention
    rejected candidates, which must not count. Nothing is rounded, and an empty gold answer is never found.
    """
    text = extract_answer(response).lower()
    found = [float(bool(answer.strip()) and answer.lower() in text) for answer in as_list(answers)]
    if match == "all":
        return sum(found) / len(found) if found else 0.0
    return max(found, default=0.0)
