"""Progress of a long command, on a terminal and in a log file."""

import io

import pytest

from memrl.utils.progress import Progress, format_seconds


class Clock:
    def __init__(self):
        self.now = 100.0

    def __call__(self) -> float:
        return self.now


class Terminal(io.StringIO):
    def isatty(self) -> bool:
        return True


def lines_of(stream: io.StringIO) -> list[str]:
    return stream.getvalue().splitlines()


def test_log_file_gets_a_line_every_ten_seconds_and_one_at_the_end():
    clock, stream = Clock(), io.StringIO()
    with Progress("eval", 100, "chunks", stream=stream, clock=clock) as progress:
        for _ in range(100):
            clock.now += 0.25
            progress.advance(1, strict=2 / 3)
    lines = lines_of(stream)
    assert lines == [
        "eval  40/100 chunks  40%  strict 0.667  0:10 elapsed, 0:15 left",
        "eval  80/100 chunks  80%  strict 0.667  0:20 elapsed, 0:05 left",
        "eval  100/100 chunks  100%  strict 0.667  0:25 elapsed",
    ]


def test_time_left_does_not_count_what_an_earlier_run_did():
    clock = Clock()
    progress = Progress("train", 200, "steps", start=100, stream=io.StringIO(), clock=clock)
    assert progress.seconds_left is None
    clock.now += 20
    progress.set(110)
    assert progress.seconds_left == pytest.approx(180)


def test_the_first_of_very_many_units_tells_nothing_about_the_time_left():
    clock = Clock()
    progress = Progress("eval", 230_000, "turns", stream=io.StringIO(), clock=clock)
    clock.now += 14  # a long document is tokenized first
    progress.set(1)
    assert progress.seconds_left is None
    progress.set(230)
    assert progress.seconds_left == pytest.approx(14 * 999)


@pytest.mark.parametrize("at_once", [1, 2, 8])
def test_units_that_end_together_do_not_stretch_the_time_left(at_once):
    """Eight rounds of `at_once` units, each seven seconds long, whose units end together."""
    clock = Clock()
    progress = Progress("read", 8 * at_once, "chunks", at_once=at_once, stream=io.StringIO(), clock=clock)
    for done in range(8):
        clock.now += 7
        for unit in range(1, at_once + 1):
            progress.advance()
            if done == 0 and unit < at_once:
                assert progress.seconds_left is None
            else:
                assert progress.seconds_left == pytest.approx(7 * (8 - done - unit / at_once))
        clock.now += 3  # a part of the next round has passed
        assert progress.seconds_left == pytest.approx(max(0, 7 * (7 - done) - 3))
        clock.now -= 3
    clock.now += 100
    assert progress.seconds_left == 0


def test_end_line_is_not_printed_twice():
    clock, stream = Clock(), io.StringIO()
    with Progress("read", 2, stream=stream, clock=clock) as progress:
        progress.advance()
        clock.now += 10
        progress.advance()
    assert lines_of(stream) == ["read  2/2  100%  0:10 elapsed"]


def test_interrupted_work_prints_its_last_count():
    stream = io.StringIO()
    with pytest.raises(KeyboardInterrupt), Progress("read", 7, "chunks", stream=stream) as progress:
        progress.advance(3)
        raise KeyboardInterrupt
    assert lines_of(stream)[-1].startswith("read  3/7 chunks  43%")


def test_unknown_and_exceeded_totals():
    progress = Progress("read", None, "chunks", stream=io.StringIO(), clock=Clock())
    progress.advance(5)
    assert progress.line() == "read  5 chunks  0:00 elapsed"
    progress = Progress("eval", 4, stream=io.StringIO(), clock=Clock())
    progress.advance(6)
    assert progress.line() == "eval  6/6  100%  0:00 elapsed"


def test_terminal_gets_a_bar_that_ends_complete(monkeypatch):
    monkeypatch.setenv("TERM", "xterm-256color")
    monkeypatch.setenv("COLUMNS", "120")
    stream = Terminal()
    with Progress("eval", 8, "chunks", stream=stream) as progress:
        for _ in range(8):
            progress.advance(1, strict="[1/2]")
        progress.log("a line that stays [not markup]")
    text = stream.getvalue()
    assert "8/8 chunks" in text and "\x1b[" in text
    assert "strict [1/2]" in text and "a line that stays [not markup]" in text


def test_dumb_terminal_gets_plain_lines(monkeypatch):
    monkeypatch.setenv("TERM", "dumb")
    stream = Terminal()
    with Progress("eval", 2, stream=stream) as progress:
        progress.advance(2)
    assert lines_of(stream) == ["eval  2/2  100%  0:00 elapsed"]


@pytest.mark.parametrize(
    ("seconds", "shown"),
    [(0.4, "0:00"), (59.6, "1:00"), (3599, "59:59"), (3600, "1:00:00"), (86400 * 2 + 3 * 3600, "2d 03:00")],
)
def test_seconds_are_shown_for_people(seconds, shown):
    assert format_seconds(seconds) == shown
