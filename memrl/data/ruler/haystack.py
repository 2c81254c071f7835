"""Background text, repeated to any length, with needles hidden in it."""

import bisect
import gzip
import re
import zlib
from collections.abc import Sequence
from functools import cached_property
from pathlib import Path

from memrl.utils.files import fingerprint

# Plain statements without numbers, capitals inside a sentence, or words of the word lists.
NOISE = "The lamp burns on. The path goes up. The rain comes down. We wait for a while. Then we walk back."

_SENTENCE_END = re.compile(r"[.!?]+[\"')\]\u2019\u201d]*(?= )|[\u3002\uff01\uff1f][\u300d\u300f\u201d]?")
_LONGEST_SENTENCE = 1000  # characters; a longer sentence is split at any white space
_LONGEST_WORD = 24  # characters; a longer word is cut anywhere


class Haystack:
    """A text repeated without end, and the places where needles can be inserted.

    Attributes:
        text: one round of the text, with `separator` at its end.
        separator: what separates two pieces: a space (pieces are sentences) or a line end (pieces are lines).
        version: changes with the text.
    """

    def __init__(self, text: str, separator: str, version: str = ""):
        self.text = text + separator
        self.separator = separator
        self.version = version

    @cached_property
    def _starts(self) -> list[int]:
        """Where pieces begin, ascending from 0 to the length of the text, at most _LONGEST_SENTENCE apart."""
        if self.separator == "\n":
            ends = [match.end() for match in re.finditer("\n", self.text)]
        else:
            ends = [match.end() for match in _SENTENCE_END.finditer(self.text)]
            ends = [end + (self.text[end] == " ") for end in ends if end < len(self.text)]
        starts = [0]
        for end in [*ends, len(self.text)]:
            while end - starts[-1] > _LONGEST_SENTENCE:
                place = starts[-1] + _LONGEST_SENTENCE  # or the last beginning of a word before it, if there is one near
                found = self.text.rfind(" ", place - _LONGEST_SENTENCE // 2, place)
                starts.append(place if found < 0 else found + 1)
            if end > starts[-1]:
                starts.append(end)
        return starts

    def start(self, share: float) -> int:
        """Where the piece begins that contains the place at `share`, from 0 to less than 1, of the text."""
        return self._starts[bisect.bisect_right(self._starts, share * len(self.text)) - 1]

    def _near(self, place: int, latest: int) -> int:
        """The beginning of a piece that is nearest to a place of the repeated text and at most `latest`."""
        rounds, rest = divmod(place, len(self.text))
        after = bisect.bisect_left(self._starts, rest)
        near = [rounds * len(self.text) + start for start in self._starts[max(0, after - 1) : after + 1]]
        return min((start for start in near if start <= latest), key=lambda start: abs(start - place))

    def window(self, start: int, size: int) -> str:
        """At most `size` characters of the repeated text from `start` on, cut after a word."""
        end = start + size
        whole = self.text * -(-(end + 1) // len(self.text))
        earliest = max(start, end - _LONGEST_WORD)
        cut = max(whole.rfind(space, earliest, end + 1) for space in " \n")
        return whole[start : cut if cut > start else end]

    def hide(self, needles: Sequence[str], shares: Sequence[float], start: int, size: int) -> tuple[str, list[int]]:
        """A window with needles in it.

        Args:
            needles: each becomes a piece. Of needles at one place, the one with the smaller share comes first.
            shares: the place of each needle as a share of the window, from 0 to less than 1.
            start, size: the window in characters, as in `window`.

        Returns:
            The text, and the character at which each needle begins, in the order of `needles`.
        """
        window = self.window(start, size)
        pieces: list[str] = []
        places = [0] * len(needles)
        length = last = 0
        for index in sorted(range(len(needles)), key=lambda index: shares[index]):
            place = self._near(start + int(shares[index] * len(window)), start + len(window)) - start
            pieces += [window[last:place], needles[index], self.separator]
            places[index] = length + place - last
            length = places[index] + len(needles[index]) + len(self.separator)
            last = place
        return ("".join(pieces) + window[last:]).rstrip(), places

    def rounds(self, size: int) -> float:
        """How many times a window of `size` characters repeats the text."""
        return round(size / len(self.text), 3)


def read_essays(path: str | Path) -> Haystack:
    """The texts of a folder and its subfolders, `.txt` and `.txt.gz`, in the order of their paths; or of one file.

    Runs of white space, line ends among them, become one space.

    Raises:
        ValueError: no such file, no text in it, or text that is not UTF-8.
    """
    path = Path(path)
    if path.is_dir():
        named = (file for pattern in ("*.txt", "*.txt.gz") for file in path.rglob(pattern) if file.is_file())
        files = sorted(named, key=lambda file: file.relative_to(path).as_posix())
    else:
        files = [path] if path.is_file() else []
    if not files:
        raise ValueError(f"--essays {path}: there is no text here; give a folder of .txt or .txt.gz files, or one file")
    text = " ".join(word for file in files for word in _read(file).split())
    if not text:
        raise ValueError(f"--essays {path}: the files contain only white space; give files with text")
    return Haystack(text, " ", fingerprint(files))


def _read(file: Path) -> str:
    try:
        data = gzip.decompress(file.read_bytes()) if file.suffix == ".gz" else file.read_bytes()
        return data.decode("utf-8-sig")
    except UnicodeDecodeError as error:
        raise ValueError(f"{file}: byte {error.start} is not UTF-8; save the file as UTF-8 text") from None
    except (gzip.BadGzipFile, zlib.error, EOFError) as error:
        raise ValueError(f"{file}: is not a whole gzip file ({error}); download or copy it again") from None
