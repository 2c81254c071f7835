"""Detect stop strings in a response while its tokens are sampled."""

from collections.abc import Sequence

_LONGEST_CHARACTER = 4  # bytes, hence tokens


class StopStrings:
    """Searches one response for any of several stop strings, which may begin and end inside tokens.

    `push` decodes a window of the last tokens, long enough for every stop string, so its cost does not depend on the response's
    length. The result equals a search of the whole decoded text for tokenizers whose decoded text is the concatenation of the
    tokens' bytes (byte-level ones, such as Qwen's) and for stop strings without U+FFFD.
    """

    def __init__(self, tokenizer, stops: Sequence[str]):
        """`tokenizer`: any object with `decode(ids) -> str`; `stops`: strings of at least one character."""
        self.tokenizer, self.stops = tokenizer, tuple(stops)
        self.found = False
        # A window can start inside a character, and decoders may strip a leading space.
        self._context = max(map(len, self.stops), default=0) + 2 * _LONGEST_CHARACTER
        self._window: list[int] = []
        self._text = ""
        self._next_trim = 2 * _LONGEST_CHARACTER

    def push(self, token_id: int) -> bool:
        """Append a token; returns whether the response now contains a stop string."""
        if self.found or not self.stops:
            return self.found
        text = self.tokenizer.decode([*self._window, token_id])
        # Special tokens have no text and would only make the window longer.
        if text == self._text and not self.tokenizer.decode([token_id]):
            return False
        self._window.append(token_id)
        self._text = text
        self.found = any(stop in text for stop in self.stops)
        if len(self._window) >= self._next_trim:
            self._trim()
        return self.found

    def text(self, ids: Sequence[int]) -> str:
        """The text of a response up to its first stop string."""
        text = self.tokenizer.decode(list(ids))
        starts = [start for start in (text.find(stop) for stop in self.stops) if start >= 0]
        return text[: min(starts, default=None)]

    def _trim(self) -> None:
        """Drop the window's first half if the rest has enough text; otherwise try again when it has grown by half."""
        half = cut = len(self._window) // 2
        rest = self.tokenizer.decode(self._window[cut:])
        if len(rest) < self._context:
            # Each token has at least one byte, so this many tokens always have enough text.
            cut = len(self._window) - _LONGEST_CHARACTER * self._context
            if cut < half:
                self._next_trim = len(self._window) + half
                return
            rest = self.tokenizer.decode(self._window[cut:])
        self._window, self._text = self._window[cut:], rest
        self._next_trim = max(2 * _LONGEST_CHARACTER, 2 * len(self._window))
