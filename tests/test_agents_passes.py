"""The passes agent: parallel checks against one memory, merging in document order, and when it ends."""

import pytest

from memrl.agents import AgentConfig
from memrl.agents.passes import Options, passes_agent
from memrl.prompts import Prompts
from memrl.types import Sample
from tests.agent_script import InOrder, kinds, memories, prompts_of, run_agent
from tests.test_agent import ScriptedSampler
from tests.test_tokenizer import character_tokenizer

PROMPTS = Prompts(
    answer="Q={question};M={memory};A",
    no_memory="nothing",
    texts={"check": "Q={question};M={memory};S={section};", "merge": "Q={question};M={memory};E={evidence};"},
)
DOCUMENT = "section 0 section 1 section 2 "


def config(**options) -> AgentConfig:
    return AgentConfig(PROMPTS, 10, 20, 5, 20, caps={"check": 40}, options=Options(**({"between": "|"} | options)))


@pytest.fixture(scope="module")
def tokenizer():
    return character_tokenizer()


def read(tokenizer, respond, document=DOCUMENT, agent=None, sampler=ScriptedSampler):
    return run_agent(passes_agent, tokenizer, Sample("s", "why?", document), agent or config(), respond, sampler)


def script(checks: dict[tuple[str, str], str], merges: dict[str, str], otherwise: str = "<check>no</check>"):
    """Checks by (memory, last letter of the section), merges by evidence; the answer is 42."""

    def respond(prompt: str) -> str:
        memory = prompt.split(";M=")[1].split(";")[0]
        if prompt.endswith(";A"):
            return "42"
        if ";E=" in prompt:
            return merges[prompt.split(";E=")[1].rstrip(";")]
        return checks.get((memory, prompt.rstrip("; ")[-1]), otherwise)

    return respond


def yes(evidence: str) -> str:
    return f"<check>yes</check> {evidence}"


@pytest.mark.parametrize("sampler", [ScriptedSampler, InOrder], ids=["latest_first", "in_order"])
def test_checks_then_a_merge_in_document_order_until_nothing_is_new(tokenizer, sampler):
    checks = {("nothing", "0"): yes("zero"), ("nothing", "2"): yes("two"), ("first", "1"): yes("one")}
    trajectory = read(tokenizer, script(checks, {"zero|two": "first", "one": "second"}), sampler=sampler)
    assert kinds(trajectory) == [*["check"] * 3, "merge"] * 2 + ["check"] * 3 + ["answer"]
    sections = [f"S=section {index} ;" for index in range(3)]
    expected = [f"Q=why?;M=nothing;{section}" for section in sections] + ["Q=why?;M=nothing;E=zero|two;"]
    expected += [f"Q=why?;M=first;{section}" for section in sections] + ["Q=why?;M=first;E=one;"]
    expected += [f"Q=why?;M=second;{section}" for section in sections] + ["Q=why?;M=second;A"]
    assert prompts_of(tokenizer, trajectory) == expected
    assert [turn.memory for turn in trajectory.turns if turn.kind == "merge"] == ["first", "second"]
    assert (trajectory.response, trajectory.memory) == ("42", "second")
    assert trajectory.scores == {"passes": 3, "sections_read": 9, "evidence_share": 3 / 9}


def test_it_ends_after_the_most_passes(tokenizer):
    respond = script({}, {"x|x|x": "m"}, otherwise=yes("x"))
    for most in (1, 2):
        trajectory = read(tokenizer, respond, agent=config(max_passes=most))
        assert kinds(trajectory) == [*["check"] * 3, "merge"] * most + ["answer"]
        assert trajectory.scores == {"passes": most, "sections_read": 3 * most, "evidence_share": 1}


def test_evidence_that_does_not_fit_takes_several_merge_turns(tokenizer):
    # Ten characters of room: "aaaa|bbbb" fits, and a third piece does not; "c" * 15 is alone in any case.
    checks = {
        ("nothing", "0"): yes("aaaa"),
        ("nothing", "1"): yes("bbbb"),
        ("nothing", "2"): yes("c" * 15),
        ("nothing", "3"): yes("d"),
    }
    trajectory = read(
        tokenizer,
        script(checks, {"aaaa|bbbb": "ab", "c" * 15: "abc", "d": "abcd"}),
        DOCUMENT + "section 3 ",
        config(max_passes=1),
    )
    assert kinds(trajectory) == [*["check"] * 4, *["merge"] * 3, "answer"]
    assert prompts_of(tokenizer, trajectory)[4:] == [
        "Q=why?;M=nothing;E=aaaa|bbbb;",
        f"Q=why?;M=ab;E={'c' * 15};",
        "Q=why?;M=abc;E=d;",
        "Q=why?;M=abcd;A",
    ]
    assert memories(trajectory.turns)[4:] == ["ab", "abc", "abcd", None]


def test_nothing_found_leaves_the_empty_memory(tokenizer):
    trajectory = read(tokenizer, script({}, {}))
    assert kinds(trajectory) == ["check"] * 3 + ["answer"]
    assert prompts_of(tokenizer, trajectory)[-1] == "Q=why?;M=nothing;A" and trajectory.memory == "nothing"
    assert trajectory.scores == {"passes": 1, "sections_read": 3, "evidence_share": 0}


@pytest.mark.parametrize("context", ["", " \n "])
def test_an_empty_document_goes_straight_to_the_answer(tokenizer, context):
    trajectory = read(tokenizer, script({}, {}), context)
    assert prompts_of(tokenizer, trajectory) == ["Q=why?;M=nothing;A"]
    assert trajectory.scores == {"passes": 0, "sections_read": 0, "evidence_share": 0}


def test_a_document_of_one_section(tokenizer):
    trajectory = read(tokenizer, script({("nothing", "t"): yes("all")}, {"all": "merged"}), "short")
    assert kinds(trajectory) == ["check", "merge", "check", "answer"] and trajectory.memory == "merged"


@pytest.mark.parametrize(
    ("text", "tags", "evidence"),
    [
        ("<check>yes</check>\none\ntwo ", True, "one\ntwo"),
        ("<CHECK> No. </CHECK> one", True, None),
        ("so: <check>no</check>", True, None),
        ("<check>yes</check> ", True, None),
        ("one", True, "one"),  # without a readable check, as in the paper's code
        ("<check>one", True, "<check>one"),
        ("", True, None),
        ("one", False, "one"),
        ("none", False, None),
        ("none one", False, "none one"),
    ],
)
def test_forms_of_a_check(tokenizer, text, tags, evidence):
    trajectory = read(tokenizer, script({}, {evidence: "merged"}, otherwise=text), "short", config(tags=tags, max_passes=1))
    assert kinds(trajectory) == (["check", "answer"] if evidence is None else ["check", "merge", "answer"])


def test_each_kind_of_turn_has_its_own_cap(tokenizer):
    seen = []

    class Seen(ScriptedSampler):
        def submit(self, request):
            seen.append(request.params.max_new_tokens)
            super().submit(request)

    read(tokenizer, script({}, {"x": "m"}, otherwise=yes("x")), "short", config(max_passes=1), Seen)
    assert seen == [40, 20, 5]
