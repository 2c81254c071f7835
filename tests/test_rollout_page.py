"""The page of a run's sample rollouts, and the command that writes it."""

import json
import re
from html.parser import HTMLParser

import pytest

from memrl.commands.report import Trace
from memrl.reading.reader import Reading, Step
from memrl.report.rendering import highlighted
from memrl.report.rollout_page import describe_outcome
from memrl.report.trace_page import write_rollouts, write_trace
from memrl.scoring.evidence import Found, find_answers
from memrl.types import Sample

ATTACK = "</div></details><script>alert(1)</script><img src=http://x/y onerror=z>\" onmouseover='z \ud800 &amp;"


def turn(kind: str, prompt: str, response: str, **extra) -> dict:
    record = {"kind": kind, "prompt": prompt, "response": response, "prompt_tokens": 1234, "response_tokens": 5}
    return record | {"finish_reason": "stop"} | extra


def rollout(step: int = 1, memories=("none", "red fox", "red fox", "gone"), **extra) -> dict:
    chunks = ["the sun", "it was a red fox", "the moon", "the stars"]
    before = ["nothing", *memories]
    turns = [
        turn("memory", f"Q: what? M: {old} S: {chunk} !", new) for old, chunk, new in zip(before, chunks, memories, strict=False)
    ]
    turns.append(turn("answer", f"Q: what? M: {memories[-1]} !", r"\boxed{a hen}", finish_reason="length"))
    record = {
        "step": step,
        "sample": f"doc-{step}",
        "question": "what?",
        "answers": ["Red Fox"],
        "group": 3,
        "rollout": 1,
        "reward": 0.0,
        "penalty": 0.0,
        "advantage": -0.5,
        "scores": {"strict": 0.0, "lenient": 0.0},
        "error": "",
        "group_rewards": [1.0, 0.0],
        "turns": turns,
    }
    return record | extra


def write(path, *records):
    path.write_text("".join(json.dumps(record) + "\n" for record in records))
    return path


def page_of(tmp_path, *records, **options) -> str:
    write_rollouts(tmp_path / "page.html", write(tmp_path / "rollouts.jsonl", *records), **options)
    return (tmp_path / "page.html").read_text(encoding="utf-8")


class Page(HTMLParser):
    """The page's tags, attributes and text; every tag that is opened must be closed in its place."""

    def __init__(self, html: str):
        super().__init__()
        self.tags, self.attributes, self.text, self.open, self.links, self.ids = set(), set(), "", [], [], []
        self.feed(html)
        assert self.open == []

    def handle_starttag(self, tag, attributes):
        self.tags.add(tag)
        self.attributes |= {name for name, _ in attributes}
        self.links += [value for name, value in attributes if name == "href"]
        self.ids += [value for name, value in attributes if name == "id"]
        if tag != "meta":
            self.open.append(tag)

    def handle_endtag(self, tag):
        assert self.open.pop() == tag

    def handle_data(self, data):
        self.text += data


def boxes(html: str) -> list[str]:
    """The classes and signs of the boxes of the page's last strip."""
    strip = html[html.rindex('<div class="strip">') :]
    return re.findall(r'<a class="box ?([a-z ]*)" href="[^"]*" title="[^"]*">(.*?)</a>', strip)


def test_strip_shows_where_the_answer_was_read_written_and_lost(tmp_path):
    html = page_of(tmp_path, rollout())
    assert boxes(html) == [("", "&nbsp;"), ("evidence held", "+"), ("held", "+"), ("lost", "x")]
    text = Page(html).text
    assert "Answered wrong: the memory contained the answer and lost it at chunk 4." in text
    for words in ("the answer is in this chunk", "written to the memory here", "still in the memory", "lost here"):
        assert words in text


def test_prompt_is_folded_up_with_the_answer_marked_in_it(tmp_path):
    html = page_of(tmp_path, rollout())
    assert "Q: what? M: none S: it was a <mark>red fox</mark> !" in html
    assert "M: red fox S: the moon" in html, "the answer in the memory is not evidence"
    assert html.count('<summary class="soft">prompt, 1,234 tokens') == 5


def test_facts_of_a_trajectory_are_shown(tmp_path):
    html = page_of(tmp_path, rollout(penalty=-0.25, error="took longer than 30 s"))
    text = Page(html).text
    for words in (
        "step 1, sample doc-1, group 3; reward 0; advantage -0.5; overlong penalty -0.25; strict 0; lenient 0",
        "rewards of the group: 1 0",
        "Gold answer: Red Fox",
        "The reward could not be computed: took longer than 30 s",
        "cut off by the token cap",
        r"\boxed{a hen}",
    ):
        assert words in text
    assert "1 <mark>0</mark>" in html, "this trajectory's own reward stands out among its group's"


def test_rewards_of_turns_and_advantages_of_their_own_are_shown(tmp_path):
    record = rollout()
    for turn, reward, advantage in zip(record["turns"], (0.0, 1.25, 0.0, -2.0, 0.0), (-0.5, 0.75, -0.5, -1.5, -0.5), strict=True):
        turn |= {"reward": reward, "advantage": advantage}
    text = " ".join(Page(page_of(tmp_path, record)).text.split())
    assert "reward +1.25 advantage +0.75" in text and "reward -2 advantage -1.5" in text
    assert text.count("advantage -0.5") == 1, "a turn with the trajectory's advantage does not repeat it"


def test_memory_shows_what_came_and_went(tmp_path):
    html = page_of(tmp_path, rollout(memories=("a b", "a c", "a c", "a c")))
    assert "a <del>b</del> <ins>c</ins>" in html and html.count("memory unchanged") == 2


def test_hostile_text_stays_text_and_the_page_needs_nothing_from_outside(tmp_path):
    record = rollout(
        memories=(ATTACK, f"red fox {ATTACK}", ATTACK, ATTACK),
        sample=ATTACK,
        question=ATTACK,
        answers=[ATTACK, "red fox"],
        scores={ATTACK: ATTACK},
        error=ATTACK,
        reward=ATTACK,
        advantage=ATTACK,
        group=ATTACK,
        group_rewards=[ATTACK],
    )
    record["turns"].append(turn(ATTACK, ATTACK, ATTACK, finish_reason=ATTACK, prompt_tokens=ATTACK))
    html = page_of(tmp_path, record)
    page = Page(html)
    assert not page.tags & {"script", "img", "link", "iframe", "object", "form"}
    assert not {name for name in page.attributes if name.startswith("on") or name == "src"}
    assert all(link.startswith("#t1") for link in page.links)
    assert page.text.count("alert(1)") >= 20
    assert "default-src 'none'" in html and "http-equiv" in html


def test_answer_with_tags_in_it_is_marked_as_text():
    text = "see <b>red</b> & <i>fox</i>"
    start, end = text.index("red"), text.index("</i>")
    assert highlighted(text, [(start, end)]) == "see &lt;b&gt;<mark>red&lt;/b&gt; &amp; &lt;i&gt;fox</mark>&lt;/i&gt;"
    assert find_answers(text, ["red</b> & <i>fox"]) == [(start, end)]


def test_every_box_leads_to_a_card(tmp_path):
    page = Page(page_of(tmp_path, rollout(1), rollout(2)))
    assert len(page.links) == 2 * (1 + 2 * 4)
    assert {link[1:] for link in page.links} <= set(page.ids)
    assert len(page.ids) == len(set(page.ids))


def test_page_shows_the_last_trajectories_or_those_of_a_step(tmp_path):
    records = [rollout(step, sample=f"doc-{step}-{i}") for step in range(1, 21) for i in range(2)]
    shown = re.findall(r"sample (doc-\d+-\d)", page_of(tmp_path, *records))
    assert shown == [f"doc-{step}-{i}" for step in range(11, 21) for i in range(2)]
    shown = re.findall(r"sample (doc-\d+-\d)", page_of(tmp_path, *records, step=3))
    assert shown == ["doc-3-0", "doc-3-1"]
    assert re.findall(r"sample (doc-\d+-\d)", page_of(tmp_path, *records, last=1)) == ["doc-20-1"]


def test_lines_with_only_the_required_fields_are_shown(tmp_path):
    turns = [{"kind": "memory", "response": "x"}, {"kind": "answer", "response": "y"}]
    text = Page(page_of(tmp_path, {"step": 1, "question": "q", "turns": turns}, {"step": 1, "question": "", "turns": []})).text
    assert "No gold answer is known." in text and "advantage -" in text


def test_yes_and_no_are_not_traced(tmp_path):
    html = page_of(tmp_path, rollout(answers=["no"], memories=("no", "no", "no", "no")))
    assert boxes(html) == [("", "&nbsp;")] * 4
    assert "the words of this answer are in any text" in html


def found(*states: str) -> list[Found]:
    held, result = False, []
    for state in states:
        result.append(Found([(0, 1)] if "e" in state else [], held, "h" in state))
        held = "h" in state
    return result


@pytest.mark.parametrize(
    ("states", "response", "words"),
    [
        (["", "eh", "h"], r"\boxed{red fox}", "answered right"),
        (["", "eh", ""], r"\boxed{red fox}", "answered right, though the last memory does not contain the answer"),
        (["eh", "h"], r"\boxed{hen}", "answered wrong, though the last memory contains the answer"),
        (["eh", "", "h", ""], "hen", "answered wrong: the memory contained the answer and lost it at chunk 4"),
        (["e", "", "e"], "hen", "answered wrong: the answer is in chunk 1, 3 and was never written to the memory"),
        (["", ""], "hen", "answered wrong: no chunk contains the gold answer word for word"),
        ([], r"\boxed{red fox}", "answered right"),
        (["h"], "red fox", "right words, but there is no box: no reward"),
        (["h"], r"it is \boxed{red fox", "right words, but the box is not closed: no reward"),
        (["h"], r"\boxed{a red fox!}", "right words, but the box is not exactly the answer: no reward"),
    ],
)
def test_outcome_names_the_chunk_where_the_answer_was_lost(states, response, words):
    assert describe_outcome(found(*states), response, ["red fox"]) == words


@pytest.mark.parametrize(
    ("response", "reward", "words"),
    [
        ("red fox", 0.25, "right words, but there is no box: reward 0.25"),
        (r"\boxed{red fox}", 0.0, "answered right, but no reward"),
        (r"\boxed{hen}", 0.1, "answered wrong, but reward 0.1, though the last memory contains the answer"),
        (r"\boxed{red fox}", None, "answered right"),
    ],
)
def test_outcome_judges_by_the_reward_that_was_earned(response, reward, words):
    assert describe_outcome(found("h"), response, ["red fox"], "any", reward) == words


def test_the_page_says_why_right_words_earned_nothing(tmp_path):
    record = rollout(reward=None, group_rewards=[1.0, None])
    record["turns"][-1]["response"] = r"so \boxed{red fox"
    text = Page(page_of(tmp_path, record)).text
    assert "Right words, but the box is not closed: no reward, though the last memory does not contain the answer." in text
    assert "reward -; advantage -0.5" in text and "rewards of the group: 1 -" in text


def test_numbers_of_hundreds_of_digits_are_shown_in_short(tmp_path):
    assert "reward 1e+290;" in Page(page_of(tmp_path, rollout(reward=10**290, penalty=-(10**290)))).text


def test_command_writes_the_page_and_says_so(tmp_path, capsys):
    path, out = write(tmp_path / "rollouts.jsonl", rollout(4), rollout(5)), tmp_path / "page.html"
    with open(path, "a") as file:
        file.write('{"step": 6, "question": "torn')  # the run is still writing
    assert Trace.main([str(path), "--out", str(out), "--step", "5"]) == 0
    assert capsys.readouterr().out == f"{out}: 1 trajectory\n"
    assert "step 5" in out.read_text() and "doc-4" not in out.read_text()


@pytest.mark.parametrize(
    ("content", "options", "words"),
    [
        (None, (), "there is no such file"),
        ("", (), "holds no rollout"),
        ("nonsense\n", (), "line 1 is not JSON"),
        (b"\xff\n", (), "line 1 is not UTF-8 text"),
        ('{"step": 1, "reward/strict": 0.5}\n', (), "line 1: 'question' must be a str; is this the rollouts.jsonl of a run?"),
        ('{"step": 1, "question": "q", "turns": [{"kind": "memory"}]}\n', (), "a 'kind' and a 'response'"),
        ('{"step": 1, "question": "q", "turns": [{"kind": "a", "response": "b", "prompt": 1}]}\n', (), "must be text"),
        (json.dumps(rollout(7)) + "\n", ("--step", "9"), "no rollout of step 9; its steps go from 7 to 7"),
        (json.dumps(rollout(7)) + "\n", ("--last", "0"), "must be at least 1"),
        (json.dumps(rollout(7)) + "\n", ("--out", "nowhere/x.html"), "there is no folder nowhere"),
    ],
)
def test_mistakes_end_in_one_line_and_code_2(tmp_path, capsys, content, options, words):
    path = tmp_path / "rollouts.jsonl"
    if content is not None:
        path.write_bytes(content if isinstance(content, bytes) else content.encode())
    with pytest.raises(SystemExit) as exit:
        Trace.main([str(path), "--out", str(tmp_path / "page.html"), *options])
    errors = capsys.readouterr().err
    assert exit.value.code == 2 and errors.count("\n") == 1 and words in errors
    assert not (tmp_path / "page.html").exists()


def test_folder_or_the_file_itself_as_output_is_refused(tmp_path, capsys):
    path = write(tmp_path / "rollouts.jsonl", rollout())
    for arguments, words in (([tmp_path, "--out", "x"], "is a folder; give"), ([path, "--out", path], "choose another name")):
        with pytest.raises(SystemExit):
            Trace.main([str(argument) for argument in arguments])
        assert words in capsys.readouterr().err
    assert json.loads(path.read_text()) == json.loads(json.dumps(rollout()))


def test_reading_shows_the_gold_answers_where_they_are_known(tmp_path):
    steps = [Step("memory", "a <b>", 2, "stop", 0.1, "a <b>"), Step("answer", "c", 1, "stop", 0.1)]
    for answers, shown in (((), 0), (("<i>", "x"), 1)):
        sample = Sample("id", "q", "", answers)
        write_trace(tmp_path / "trace.html", [Reading(sample, 8, 8, 1, 1, steps, "c", "a <b>", 2, done=True)])
        html = (tmp_path / "trace.html").read_text()
        assert html.count("Gold answers: <mark>&lt;i&gt; | x</mark>") == shown and Page(html)
        assert html.count("Gold") == shown
