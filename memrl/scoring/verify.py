r"""Check answers against gold answers. The strict verifier is the training reward, the lenient one the test metric.

Pure functions on text: no model, no tokens, no state. Every score is a float in [0, 1]. With `match` "any" (the default) each
gold answer is right alone and the best score counts; with "all" the answer has to give all of them (several needles, chains of
variables). The text comes from a sampler, so no text may raise an error or take more than linear time.

    response                                  gold             strict  exact  lenient  f1
    "... so it is \boxed{Ed Wood}"            ["Ed Wood"]        1      1       1      1
    "... so it is \boxed{the ed  wood.}"      ["Ed Wood"]        0      1       1      1
    "... so it is \boxed{Ed Wood, director}"  ["Ed Wood"]        0      0       1      0.8
    "It was Ed Wood, the director."           ["Ed Wood"]        0      0       1      0.57
    "... \boxed{it is not mentioned}"         ["no"]             0      0       0      0
    "... \boxed{7, 3 and 5}"                  all ["3", "5", "7"]  1      1       1      1

The definitions follow the code of MemAgent (arXiv 2507.02259) where that is sound; each departure is marked.
"""

import re
import unicodedata
from collections import Counter
from collections.abc import Sequence
from functools import cache, lru_cache
from typing import Literal

# Tokens of the brace scan: a box that opens; an escaped brace (an odd number of backslashes before it), which is skipped; a bare
# brace. The look-behinds try a run of backslashes only once: linear time.
_BRACES = re.compile(r"(?<!\\)\\+(?P<box>boxed|fbox)\s*\{|(?<!\\)(?:\\\\)*\\[{}]|(?P<opening>\{)|(?P<closing>\})")


ANSWER_CHARACTERS = 2**17  # of a response that are read, its last ones: the paper's longest answers have 10,000 tokens, 45,000


@lru_cache(maxsize=8)  # each score of a response asks for its box
def last_boxed(text: str) -> str | None:
    r"""The content of the last complete `\boxed{...}`, or else of the last `\fbox{...}`; None if there is neither.

    Complete means that its own closing brace is there: braces are matched, escaped ones (`\{`) are text. "Last" is by where a box
    begins, so of nested boxes the inner one counts. The content is unchanged and may be empty.

    DEPARTS from the MemAgent code: the last ANSWER_CHARACTERS are searched, while the original cuts to the last 300 and so fails
    a right answer that is followed by an explanation; an unclosed box does not hide a complete one before it; there is no form
    without braces (`\boxed 42$`); an escaped brace does not close a box.
    """
    if "\\boxed" not in text and "\\fbox" not in text:
        return None
    text = text[-ANSWER_CHARACTERS:]
    opened: list[tuple[str | None, int]] = []  # of each open brace, the kind of box if it is one, and where its content begins
    found: dict[str, tuple[int, int]] = {}  # kind -> (begin, end) of the last complete box so far
    for match in _BRACES.finditer(text):
        if match["box"] or match["opening"]:
            opened.append((match["box"], match.end()))
        elif match["closing"] and opened:
            kind, begin = opened.pop()
            if kind and begin > found.get(kind, (-1, -1))[0]:
                found[kind] = (begin, match.start())
    span = found.get("boxed") or found.get("fbox")
    return None if span is None else text[span[0] : span[1]]


def strict_match(prediction: str, gold: Sequence[str], match: str = "any") -> float:
    r"""The training reward: 1.0 if the last box of the response is exactly a gold answer, else 0.0.

    Both sides are compared without case and without whitespace, so `New York` equals `newyork`; punctuation and articles count.
    (Right and wrong answers hardly ever differ by spaces alone.) LaTeX noise is ignored: `\left`, `\right`, spacing commands,
    `\dfrac` and `\tfrac` for `\frac`, and the wrapping of `\text{...}`, `\mathrm{...}` and similar. `\%`, `\$` and `^\circ` may
    stand for the character or for nothing. A missing, unclosed or empty box scores 0.0; an empty gold answer matches nothing.

    With "all" the box has to list the gold answers, each once and in any order, separated by commas, semicolons, whitespace and
    the word "and", in any number. Equal gold answers count as one.

    DEPARTS from the MemAgent code: the search for the box (see `last_boxed`); every Unicode space and case, not only blanks and
    line feeds, and canonically equal texts are equal (NFC); every dash and minus sign equals a hyphen, because Wikipedia writes
    an en dash in `2007-08` and `Austro-Hungarian`, and models a hyphen; `\%` also equals `%`, while the original only deletes it
    and so fails a gold answer `50%`; `\text{...}` is opened, because instruction-tuned models write it around words; ` .5` is not
    rewritten as ` 0.5`.
    """
    gold, box = as_list(gold), last_boxed(after_thinking(prediction))
    if box is None:
        return 0.0
    if match == "all" and len(gold) != 1:
        return float(_is_listing(_items(box), [_items(answer) for answer in gold]))
    keys = _strict_keys(box)
    return float(any(keys & _strict_keys(answer) for answer in gold))


def lenient_match(prediction: str, gold: Sequence[str], match: str = "any") -> float:
    r"""The test metric (`sub_em`): 1.0 if the predicted answer holds a gold answer, word for word; with "all", each of them.

    The predicted answer is `extract_answer(prediction)`: the last box if there is one, else the whole response. Both sides become
    words, see `_words` (no case, punctuation or articles), and the gold answer's words must be a contiguous run of the
    prediction's. If a side has no words left, nothing matches. What `strict_match` or `exact_match` accepts is accepted here too
    ("NewYork"), except for answers without a letter or digit ("+").

    DEPARTS from the MemAgent code, which inflates its scores: it also accepts a prediction that is a piece of the gold answer (so
    "", "." and "e" match nearly anything), and it compares characters, not words (so the gold "no" is found in "not mentioned").
    It reads the first gold answer only; here any of them counts.

    A response without a box is searched whole, so one that weighs several candidates is right if one of them is.
    """
    answer, gold = extract_answer(prediction), as_list(gold)
    text, keys, found = f" {' '.join(_words(answer))} ", _strict_keys(answer), []
    for candidate in gold:
        words = " ".join(_words(candidate))
        found.append(bool(words) and (f" {words} " in text or bool(keys & _strict_keys(candidate))))
    if match == "all":
        return float(bool(found) and (all(found) or exact_match(prediction, gold, "all")))
    return float(any(found))


def exact_match(prediction: str, gold: Sequence[str], match: str = "any") -> float:
    """SQuAD's exact match: 1.0 if the predicted answer's words are a gold answer's, no more and no fewer.

    The predicted answer and its words are as for `lenient_match`, so a response without a box can match too. With "all" the words
    have to be those of the gold answers, each once and in any order; the word "and" may stand between them. What `strict_match`
    accepts is accepted here, except for gold answers without a letter or digit ("+"): those match nothing.
    """
    answer, gold = extract_answer(prediction), as_list(gold)
    words, gold_words, keys = _words(answer), [_words(candidate) for candidate in gold], _strict_keys(answer)
    if match == "all" and len(gold) != 1:
        return float(all(gold_words) and (_is_listing(words, gold_words) or strict_match(prediction, gold, "all")))
    return float(any(w and (words == w or keys & _strict_keys(text)) for w, text in zip(gold_words, gold, strict=True)))


def token_f1(prediction: str, gold: Sequence[str], match: str = "any") -> float:
    """The harmonic mean of precision and recall over the words (SQuAD), the best over the gold answers.

    With P and G the multisets of words of `extract_answer(prediction)` and of a gold answer, c = |P & G|:

        precision p = c / |P|,  recall r = c / |G|,  f1 = 2 p r / (p + r) = 2 c / (|P| + |G|)

    If either side is just "yes", "no" or "noanswer", f1 is 1.0 if they are equal and 0.0 if not (HotpotQA). In scripts without
    spaces each character is a word, so there it is the customary character F1. With "all", G is the words of all gold answers
    together, and "and" in the prediction is ignored unless it is in G.
    """
    words, gold = _words(extract_answer(prediction)), as_list(gold)
    if match == "all":
        gold_words = _words(" ".join(gold))
        return _f1([word for word in words if word != "and" or "and" in gold_words], gold_words)
    return max((_f1(words, _words(answer)) for answer in gold), default=0.0)


def extract_answer(response: str) -> str:
    """The answer in a response: the last box, even an empty one, or without a box all the text after the last `</think>`."""
    text = after_thinking(response)
    box = last_boxed(text)
    return text if box is None else box


def after_thinking(response: str) -> str:
    """The text after the last `</think>`; "" if a `<think>` was never closed, as when the token cap cuts it off.

    Of a longer text, the last ANSWER_CHARACTERS: scoring then takes a few hundredths of a second at most.
    """
    _, closed, rest = response.rpartition("</think>")
    return "" if not closed and "<think>" in response else rest[-ANSWER_CHARACTERS:]


def as_list(gold: Sequence[str]) -> Sequence[str]:
    """The gold answers as a list; a bare string is one answer, not a sequence of letters."""
    return [gold] if isinstance(gold, str) else gold


def _f1(words: list[str], gold_words: list[str]) -> float:
    closed = (["yes"], ["no"], ["noanswer"])
    if words != gold_words and (words in closed or gold_words in closed):
        return 0.0
    common = sum((Counter(words) & Counter(gold_words)).values())
    return 2.0 * common / (len(words) + len(gold_words)) if common else 0.0


def _items(text: str) -> list[str]:
    """The entries of a list, separated by commas, semicolons and whitespace."""
    plain = _normalize("NFC", _plain(text, keep_signs=True)).translate(_DASHES).casefold()
    return [item for item in re.split(r"[\s,;]+", plain) if item]


def _is_listing(items: list[str], gold: list[list[str]]) -> bool:
    """Whether `items` is the runs `gold` end to end, each once and in any order, ignoring "and" between them.

    If several runs match at a place, the longest is taken, so a run may be the beginning of another.
    """
    missing = sorted({tuple(run) for run in gold}, key=len, reverse=True)
    if not missing or () in missing:
        return False
    place = 0
    while place < len(items):
        run = next((run for run in missing if tuple(items[place : place + len(run)]) == run), None)
        if run is not None:
            missing.remove(run)
        elif items[place] != "and":
            return False
        place += len(run or ("and",))
    return not missing


# LaTeX noise in the order in which it is replaced: (pattern, replacement, whether it is a sign that may also be deleted).
_LATEX_FONT = r"\\(?:text|mbox|math|operatorname)(?:bf|it|rm|sf|tt|up|normal)?\s*\{([^{}]*)\}"
_LATEX = (
    (r"\\(?:left|right)(?![A-Za-z])|\\[!,]", "", False),
    (r"\\[;: ]", " ", False),
    (r"\\[dt]frac(?![A-Za-z])", r"\\frac", False),
    # \text{\textbf{x}}: innermost first; a fixed number of passes keeps the time linear for any nesting.
    *[(_LATEX_FONT, r"\1", False)] * 3,
    (r"\^\s*(?:\\circ(?![A-Za-z])|\{\s*\\circ\s*\})", "\N{DEGREE SIGN}", True),
    (r"\\([%$])", r"\1", True),
    (r"\\([&_#{}])", r"\1", False),
)


def _plain(text: str, keep_signs: bool) -> str:
    r"""Remove LaTeX noise; `\%`, `\$` and degree marks become characters (`keep_signs`) or are deleted."""
    if "\\" in text:
        for pattern, replacement, is_sign in _LATEX:
            text = re.sub(pattern, "" if is_sign and not keep_signs else replacement, text)
    return text


def _strict_keys(text: str) -> set[str]:
    """The forms of `text` that are compared: two texts are strictly equal if they share one. None of them is empty."""
    plain = {_plain(text, keep_signs=True), _plain(text, keep_signs=False)}
    return {"".join(_normalize("NFC", one).translate(_DASHES).casefold().split()) for one in plain} - {""}


# From hyphen to horizontal bar, the minus sign, and small and wide forms.
_DASHES = dict.fromkeys((*range(0x2010, 0x2016), 0x2212, 0xFE58, 0xFE63, 0xFF0D), "-")
# In words, those that join two of them as a hyphen does; the em dash and the horizontal bar separate sentences.
_HYPHENS = {code: "-" for code in _DASHES if code not in (0x2014, 0x2015, 0xFE58)}
_MAX_MARKS = 30  # the longest run of combining marks in stream-safe text (Unicode Standard Annex 15)


def _normalize(form: Literal["NFC", "NFKC"], text: str) -> str:
    """`unicodedata.normalize` in linear time: text with a longer run of combining marks, which Python sorts in quadratic time,
    stays unchanged."""
    if text.isascii() or "m" * (_MAX_MARKS + 1) in "".join(map(_mark, text)):
        return text
    return unicodedata.normalize(form, text)


@cache
def _mark(char: str) -> str:
    return "m" if unicodedata.combining(unicodedata.normalize("NFKD", char)[0]) else " "


_ARTICLES = {"a", "an", "the"}
# Marks inside a word, deleted: "don't" becomes "dont", "well-known" becomes "wellknown".
_JOINERS = set(
    "'`-\N{LEFT SINGLE QUOTATION MARK}\N{RIGHT SINGLE QUOTATION MARK}"
    "\N{MODIFIER LETTER TURNED COMMA}\N{MODIFIER LETTER APOSTROPHE}"
)
# Scripts without spaces between words, and Korean, which attaches particles to words.
_UNSPACED = re.compile(
    "[\u0e00-\u0eff\u1000-\u109f\u1780-\u17ff"  # Thai and Lao, Myanmar, Khmer
    "\u3005-\u3007\u3040-\u30ff\u31f0-\u31ff"  # ideographic iteration mark, closing mark and zero; Hiragana and Katakana
    "\u3400-\u4dbf\u4e00-\u9fff\uf900-\ufaff\U00020000-\U0003ffff"  # Han
    "\uac00-\ud7a3]"  # Hangul
)


@cache
def _word_char(char: str) -> str:
    """The replacement of one character before the text is split at whitespace."""
    category = unicodedata.category(char)
    if char.isspace() or char == ".":  # all other periods are removed before
        return char
    if char in _JOINERS or category in ("Cc", "Cf") or "VARIATION SELECTOR" in unicodedata.name(char, ""):
        return ""
    if category[0] in "PS":
        return " "
    return f" {char} " if _UNSPACED.match(char) else char


def _words(text: str) -> list[str]:
    """The words of `text`: caseless, without punctuation or symbols of any script, without articles.

    Articles stay if nothing else is left, so an answer "The" or "A" differs from an empty one.

    DEPARTS from SQuAD's normalisation, which deletes ASCII punctuation and so joins words ("yes/no" -> "yesno"): harmless if
    characters are compared, wrong for words. Here marks inside one word are deleted (apostrophe, hyphen, the periods of "U.S.",
    the comma of "1,462") and all others separate words, as does a hyphen between digits ("1969-1974"); a decimal point stays
    ("3.5" is not "35"). An en dash, a figure dash and a minus sign are hyphens. In scripts without spaces every character is a
    word, so matching words there means matching characters.
    """
    text = _normalize("NFKC", _plain(text, keep_signs=True)).translate(_HYPHENS).casefold()
    text = re.sub(r"(?<!\d)\.|\.(?!\d)", "", text)  # a period that is no decimal point
    text = re.sub(r"(?<=\d),(?=\d{3}(?!\d))", "", text)  # a comma between groups of digits
    text = re.sub(r"(?<=\d)-(?=\d)", " ", text)  # a hyphen in a range of numbers
    words = "".join(map(_word_char, text)).split()
    return [word for word in words if word not in _ARTICLES] or words
