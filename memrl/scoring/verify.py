r"""Is an answer right? The strict verifier is the reward of training, the lenient one the metric of testing.

Pure functions on text: no model, no tokens, no state. Every score is a float in [0, 1], the best over the
gold answers; of the functions whose names end in `_all`, for all of them together. No text makes one of them
raise or take more than linear time, because a sampler wrote what they read.

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
from collections.abc import Callable, Sequence

# What matters for matching braces: a box that opens, an escaped brace, which is skipped (an odd number of
# backslashes stands before it), and runs of bare braces. The look-behinds try a run of backslashes only once,
# and a run of braces is one match, so the scan is linear and quick.
_BRACES = re.compile(r"(?<!\\)\\+(?P<box>boxed|fbox)\s*\{|(?<!\\)(?:\\\\)*\\[{}]|(?P<opening>\{+)|(?P<closing>\}+)")


def last_boxed(text: str) -> str | None:
    r"""The content of the last complete `\boxed{...}`, or else `\fbox{...}`; None where there is neither.

    Complete means that its own closing brace is there: braces are matched, escaped ones (`\{`) are text.
    "Last" goes by where a box begins, so of nested boxes the inner one counts. The content comes as it
    stands, possibly empty.

    DEPARTS from the MemAgent code: the whole text is searched, where the original cuts to the last 300
    characters and so fails a right answer that is followed by an explanation; an unclosed box does not hide a
    complete one before it; there is no form without braces (`\boxed 42$`); an escaped brace does not close a
    box.
    """
    if "\\boxed" not in text and "\\fbox" not in text:
        return None
    depth = 0  # braces opened so far less braces closed; stray ones before a box shift it, which does no harm
    open_boxes: list[tuple[str, int, int]] = []  # (kind, depth outside of the box, where its content begins)
    found: dict[str, tuple[int, int]] = {}  # kind -> (begin, end) of the last complete box so far
    for match in _BRACES.finditer(text):
        if match["box"]:
            open_boxes.append((match["box"], depth, match.end()))
            depth += 1
        elif match["opening"]:
            depth += len(match["opening"])
        elif match["closing"]:
            outer = depth - len(match["closing"])
            while open_boxes and open_boxes[-1][1] >= outer:
                kind, level, begin = open_boxes.pop()
                if begin > found.get(kind, (-1, -1))[0]:
                    found[kind] = (begin, match.start("closing") + depth - level - 1)
            depth = outer
    span = found.get("boxed") or found.get("fbox")
    return None if span is None else text[span[0] : span[1]]


def strict_match(prediction: str, gold: Sequence[str]) -> float:
    r"""The reward of training: 1.0 if the last box of the response holds exactly a gold answer, else 0.0.

    Both sides are compared without case and without any whitespace, so `New York` equals `newyork`;
    punctuation and articles count. Deleting all spaces is the original's comparison, kept because it forgives
    line breaks and doubled spaces, and because right and wrong answers hardly ever differ by spaces alone.
    LaTeX noise does not count: `\left`, `\right`, spacing commands, `\dfrac` and `\tfrac` for `\frac`, and
    the wrapping of `\text{...}`, `\mathrm{...}` and their like. `\%`, `\$` and `^\circ` may stand for the
    character or for nothing. A missing, unclosed or empty box is 0.0, and an empty gold answer matches
    nothing.

    DEPARTS from the MemAgent code: the search for the box (see `last_boxed`); every Unicode space and case,
    not only blanks and line feeds, and canonically equal texts are equal (NFC); `\%` also equals `%`, where
    the original just deletes it and so fails a gold answer `50%`; `\text{...}` is opened, because
    instruction-tuned models write it around words and mean the words; ` .5` is not rewritten as ` 0.5`.
    """
    box = last_boxed(after_thinking(prediction))
    if box is None:
        return 0.0
    keys = _strict_keys(box)
    return float(any(keys & _strict_keys(answer) for answer in as_list(gold)))


def lenient_match(prediction: str, gold: Sequence[str]) -> float:
    r"""The metric of testing (`sub_em`): 1.0 if a gold answer stands, word for word, in the predicted answer.

    The predicted answer is `extract_answer(prediction)`: the last box if there is one, else the whole
    response. Both sides become words, see `_words` (no case, punctuation or articles), and the gold answer's
    words must be a contiguous run of the prediction's. Where a side has no word left, nothing matches.
    What `strict_match` holds equal is equal here too ("NewYork"), so strict never exceeds lenient but for
    answers without letter or digit ("+").

    DEPARTS from the MemAgent code, which inflates its scores: it also accepts a prediction that is a piece of
    the gold answer (so that "", "." and "e" match nearly anything), and it looks for characters, not words
    (so that the gold "no" is found in "not mentioned"). It reads the first gold answer only; here any of them
    counts.

    Without a box the response is searched whole, so one that weighs several candidates is right if one of
    them is. Prompts that ask for a box measure more fairly, and `strict_match` belongs beside this number.
    """
    return float(any(_found(prediction, as_list(gold))))


def exact_match(prediction: str, gold: Sequence[str]) -> float:
    """SQuAD's exact match: 1.0 if the predicted answer's words are a gold answer's, no more and no fewer.

    The predicted answer and its words are as for `lenient_match`, so a response without a box can match too.
    What `strict_match` holds equal is equal here, so strict <= exact <= lenient but for answers without letter
    or digit ("+"), which are equal to nothing by words.
    """
    answer = extract_answer(prediction)
    words, keys = _words(answer), _strict_keys(answer)
    candidates = [candidate for candidate in as_list(gold) if _words(candidate)]
    return float(any(words == _words(candidate) or keys & _strict_keys(candidate) for candidate in candidates))


def token_f1(prediction: str, gold: Sequence[str]) -> float:
    """The harmonic mean of precision and recall over the words (SQuAD), the best over the gold answers.

    With P and G the multisets of words of `extract_answer(prediction)` and of a gold answer, c = |P & G|:

        precision p = c / |P|,  recall r = c / |G|,  f1 = 2 p r / (p + r) = 2 c / (|P| + |G|)

    Where either side is just "yes", "no" or "noanswer", f1 is 1.0 if they are equal, 0.0 if not (HotpotQA).
    In scripts without spaces each character is a word, so there it is the customary character F1.
    """
    words = _words(extract_answer(prediction))
    return max((_f1(words, _words(answer)) for answer in as_list(gold)), default=0.0)


def extract_answer(response: str) -> str:
    """What a response offers as its answer: the last box; without one, all of it after the last `</think>`.

    An empty box is an empty answer, not a reason to look elsewhere.
    """
    text = after_thinking(response)
    box = last_boxed(text)
    return text if box is None else box


def after_thinking(response: str) -> str:
    """What a response says after its last `</think>`; nothing where a `<think>` is open, as the cap on tokens leaves it."""
    _, closed, said = response.rpartition("</think>")
    return "" if not closed and "<think>" in response else said


def as_list(gold: Sequence[str]) -> Sequence[str]:
    """The gold answers; one that is given as bare text, which is a sequence of letters too, is meant as one."""
    return [gold] if isinstance(gold, str) else gold


def _found(prediction: str, gold: Sequence[str]) -> list[bool]:
    """For each gold answer whether it stands, word for word, in the predicted answer."""
    answer = extract_answer(prediction)
    haystack, keys = f" {' '.join(_words(answer))} ", _strict_keys(answer)
    needles = [(" ".join(_words(candidate)), candidate) for candidate in gold]
    return [bool(words) and (f" {words} " in haystack or bool(keys & _strict_keys(text))) for words, text in needles]


def _f1(words: list[str], gold_words: list[str]) -> float:
    closed = (["yes"], ["no"], ["noanswer"])
    if words != gold_words and (words in closed or gold_words in closed):
        return 0.0
    common = sum((Counter(words) & Counter(gold_words)).values())
    return 2.0 * common / (len(words) + len(gold_words)) if common else 0.0


# --- All gold answers at once -------------------------------------------------------------------------------


def strict_match_all(prediction: str, gold: Sequence[str]) -> float:
    """1.0 if the last box of the response lists exactly the gold answers, each once and in any order, else 0.0.

    Commas, semicolons, blanks, line ends and the word "and" may part them, in any number; all else counts as in
    `strict_match`, which is what this is where there is one gold answer. Gold answers that are equal are one.
    """
    gold, box = as_list(gold), last_boxed(after_thinking(prediction))
    if len(gold) == 1:
        return strict_match(prediction, gold)
    return float(box is not None and _lists(_items(box), [_items(answer) for answer in gold]))


def exact_match_all(prediction: str, gold: Sequence[str]) -> float:
    """1.0 if the words of the predicted answer are those of the gold answers, each once and in any order, else 0.0.

    The word "and" may stand between them. What `strict_match_all` accepts is accepted here, as in `exact_match`.
    """
    gold = as_list(gold)
    if len(gold) == 1:
        return exact_match(prediction, gold)
    gold_words = [_words(answer) for answer in gold]
    if not all(gold_words):
        return 0.0
    return float(_lists(_words(extract_answer(prediction)), gold_words) or strict_match_all(prediction, gold))


def lenient_match_all(prediction: str, gold: Sequence[str]) -> float:
    """1.0 if every gold answer stands, word for word, in the predicted answer, else 0.0; see `lenient_match`."""
    found = _found(prediction, as_list(gold))
    return float(bool(found) and (all(found) or exact_match_all(prediction, gold)))


def token_f1_all(prediction: str, gold: Sequence[str]) -> float:
    """`token_f1` against the gold answers strung together; "and" does not count unless it is in one of them."""
    gold_words = _words(" ".join(as_list(gold)))
    words = [word for word in _words(extract_answer(prediction)) if word != "and" or "and" in gold_words]
    return _f1(words, gold_words)


_SEPARATORS = re.compile(r"[\s,;]+")


def _items(text: str) -> list[str]:
    plain = _normalize("NFC", _plain(text, keep_signs=True)).casefold()
    return [item for item in _SEPARATORS.split(plain) if item]


def _lists(items: list[str], gold: list[list[str]]) -> bool:
    """Whether `items` is the runs `gold` end to end, each once and in any order, "and" between them left aside.

    Where several could begin, the longest does: so one that is the beginning of another is told apart from it.
    """
    missing = {tuple(run) for run in gold}
    if not missing or () in missing:
        return False
    by_first: dict[str, list[tuple[str, ...]]] = {}
    for run in sorted(missing, key=len, reverse=True):
        by_first.setdefault(run[0], []).append(run)
    place = 0
    while place < len(items):
        runs = by_first.get(items[place], ())
        run = next((run for run in runs if run in missing and tuple(items[place : place + len(run)]) == run), None)
        if run is not None:
            missing.remove(run)
        elif items[place] != "and":
            return False
        place += len(run or ("and",))
    return not missing


# --- LaTeX --------------------------------------------------------------------------------------------------

_LATEX_NOTHING = re.compile(r"\\(?:left|right)(?![A-Za-z])|\\[!,]")
_LATEX_SPACE = re.compile(r"\\[;: ]")
_LATEX_FRACTION = re.compile(r"\\[dt]frac(?![A-Za-z])")
_LATEX_FONT = re.compile(r"\\(?:text|mbox|math|operatorname)(?:bf|it|rm|sf|tt|up|normal)?\s*\{([^{}]*)\}")
_LATEX_ESCAPE = re.compile(r"\\([&_#{}])")
_LATEX_DEGREE = re.compile(r"\^\s*(?:\\circ(?![A-Za-z])|\{\s*\\circ\s*\})")
_LATEX_SIGN = re.compile(r"\\([%$])")


def _plain(text: str, keep_signs: bool) -> str:
    r"""`text` without LaTeX noise; `\%`, `\$` and degree marks become characters (`keep_signs`) or vanish."""
    if "\\" not in text:
        return text
    text = _LATEX_SPACE.sub(" ", _LATEX_NOTHING.sub("", text))
    text = _LATEX_FRACTION.sub(r"\\frac", text)
    # \text{\textbf{x}}: innermost first; a fixed number of passes keeps hostile nesting linear.
    for _ in range(3):
        text = _LATEX_FONT.sub(r"\1", text)
    text = _LATEX_DEGREE.sub("\N{DEGREE SIGN}" if keep_signs else "", text)
    return _LATEX_ESCAPE.sub(r"\1", _LATEX_SIGN.sub(r"\1" if keep_signs else "", text))


def _strict_keys(text: str) -> set[str]:
    """What `text` may be compared as; two texts are strictly equal if they share a key. No key is empty."""
    plain = {_plain(text, keep_signs=True), _plain(text, keep_signs=False)}
    return {"".join(_normalize("NFC", one).casefold().split()) for one in plain} - {""}


# --- Unicode and words --------------------------------------------------------------------------------------


class _CharMap(dict):
    """A table for `str.translate` that asks `rule` once about each character that turns up."""

    def __init__(self, rule: Callable[[str], str]):
        super().__init__()
        self.rule = rule

    def __missing__(self, code: int) -> str:
        self[code] = self.rule(chr(code))
        return self[code]


_MAX_MARKS = 30  # the longest run of combining marks in stream-safe text (Unicode Standard Annex 15)
_MARKS = _CharMap(lambda char: "m" if unicodedata.combining(unicodedata.normalize("NFKD", char)[0]) else " ")


def _normalize(form: str, text: str) -> str:
    """`unicodedata.normalize` in linear time.

    Python sorts a run of combining marks in quadratic time, so text with an absurdly long run stays as it is.
    """
    if text.isascii() or "m" * (_MAX_MARKS + 1) in text.translate(_MARKS):
        return text
    return unicodedata.normalize(form, text)


_ARTICLES = {"a", "an", "the"}
# Marks that join the halves of one word: deleted, so that "don't" is "dont" and "well-known" is "wellknown".
_JOINERS = set(
    "'`-\N{LEFT SINGLE QUOTATION MARK}\N{RIGHT SINGLE QUOTATION MARK}\N{HYPHEN}"
    "\N{MODIFIER LETTER TURNED COMMA}\N{MODIFIER LETTER APOSTROPHE}"
)
# First and last code point of scripts without spaces between words, and of Korean, which glues particles to
# them.
_UNSPACED = (
    (0x0E00, 0x0EFF),  # Thai, Lao
    (0x1000, 0x109F),  # Myanmar
    (0x1780, 0x17FF),  # Khmer
    (0x3005, 0x3007),  # ideographic iteration mark, closing mark, zero
    (0x3040, 0x30FF),  # Hiragana, Katakana
    (0x31F0, 0x31FF),  # Katakana extensions
    (0x3400, 0x4DBF),  # Han, extension A
    (0x4E00, 0x9FFF),  # Han
    (0xAC00, 0xD7A3),  # Hangul
    (0xF900, 0xFAFF),  # Han, compatibility
    (0x20000, 0x3FFFF),  # Han, later extensions
)


def _word_char(char: str) -> str:
    """What becomes of one character on the way to words."""
    category = unicodedata.category(char)
    if char.isspace() or char == ".":  # the periods that are left at that point are decimal points
        return char
    if char in _JOINERS or category in ("Cc", "Cf") or "VARIATION SELECTOR" in unicodedata.name(char, ""):
        return ""
    if category[0] in "PS":
        return " "
    return f" {char} " if any(first <= ord(char) <= last for first, last in _UNSPACED) else char


_WORD_CHARS = _CharMap(_word_char)
_PERIOD = re.compile(r"(?<!\d)\.|\.(?!\d)")
_DIGIT_GROUP = re.compile(r"(?<=\d),(?=\d{3}(?!\d))")
_DIGIT_RANGE = re.compile(r"(?<=\d)[-\N{HYPHEN}](?=\d)")


def _words(text: str) -> list[str]:
    """The words of `text`: caseless, without punctuation or symbols of any script, without articles.

    Articles stay where nothing else would be left, so an answer "The" or "A" can be told from an empty one.

    DEPARTS from SQuAD's normalisation, which deletes ASCII punctuation and thereby glues words ("yes/no" ->
    "yesno"): harmless where characters are compared, wrong where words are. Here marks inside one word are
    deleted (apostrophe, hyphen, the periods of "U.S.", the comma of "1,462") and all others part words, as
    does a hyphen between digits ("1969-1974"); a decimal point stays ("3.5" is not "35"). In scripts without
    spaces every character is a word, so matching words there means matching characters.
    """
    text = _normalize("NFKC", _plain(text, keep_signs=True)).casefold()
    text = _DIGIT_RANGE.sub(" ", _DIGIT_GROUP.sub("", _PERIOD.sub("", text)))
    words = text.translate(_WORD_CHARS).split()
    return [word for word in words if word not in _ARTICLES] or words
