"""The recall agent: queries, the memory that BM25 finds, and what the next turn sees of it."""

import pytest

from memrl.agents import AgentConfig
from memrl.agents.recall import Options, find_memory, recall_agent, split_response
from memrl.agents.retrieval import split_words
from memrl.prompts import Prompts
from memrl.types import Sample
from tests.agent_script import kinds, memories, prompts_of, run_agent
from tests.test_tokenizer import character_tokenizer

PROMPTS = Prompts(
    no_memory="nothing",
    texts={
        "recall": "Q={question};M={memory};R={recalled};S={section};",
        "recall_answer": "Q={question};M={memory};R={recalled};A",
        "nothing_recalled": "no",
    },
)
CONFIG = AgentConfig(PROMPTS, chunk_tokens=10, memory_tokens=60, answer_tokens=5, question_tokens=20, options=Options())
DOCUMENT = "section 0 section 1 section 2 section 3 "


@pytest.fixture(scope="module")
def tokenizer():
    return character_tokenizer()


def read(tokenizer, *script, document=DOCUMENT, config=CONFIG):
    queue = list(script)
    trajectory = run_agent(recall_agent, tokenizer, Sample("s", "why?", document), config, lambda prompt: queue.pop(0))
    assert not queue
    return trajectory


def seen(tokenizer, trajectory) -> list[tuple[str, str]]:
    """Memory and recalled memory of each prompt."""
    parts = [prompt.split(";") for prompt in prompts_of(tokenizer, trajectory)]
    return [(part[1].removeprefix("M="), part[2].removeprefix("R=")) for part in parts]


def test_a_query_shows_an_earlier_memory_in_the_next_turn_only(tokenizer):
    trajectory = read(tokenizer, "emma: bear", "simon: owl", "tara: fox<recall>where is emma</recall>", "tara: fox, emma", "42")
    assert kinds(trajectory) == ["memory"] * 4 + ["answer"]
    assert prompts_of(tokenizer, trajectory)[3] == "Q=why?;M=tara: fox;R=emma: bear;S=section 3 ;"
    assert seen(tokenizer, trajectory) == [
        ("nothing", "no"),
        ("emma: bear", "no"),
        ("simon: owl", "no"),
        ("tara: fox", "emma: bear"),
        ("tara: fox, emma", "no"),
    ]
    assert memories(trajectory.turns) == ["emma: bear", "simon: owl", "tara: fox", "tara: fox, emma", None]
    assert trajectory.memory == "tara: fox, emma" and trajectory.scores == {"queries": 1, "recalls": 1}


def test_the_answer_turn_sees_what_the_last_query_recalls(tokenizer):
    trajectory = read(tokenizer, "emma: bear", "simon: owl<recall>emma</recall>", "42", document=DOCUMENT[:20])
    assert prompts_of(tokenizer, trajectory)[-1] == "Q=why?;M=simon: owl;R=emma: bear;A"


def test_a_query_without_a_match_recalls_nothing(tokenizer):
    trajectory = read(tokenizer, "emma: bear", "simon: owl<recall>tara</recall>", "x<recall>nothing</recall>", "y", "42")
    assert [recalled for _, recalled in seen(tokenizer, trajectory)] == ["no"] * 5
    assert trajectory.scores == {"queries": 2, "recalls": 0}


def test_the_present_memory_and_the_empty_one_are_not_recalled(tokenizer):
    # The first memory comes back as the third one: what fits the query is shown already.
    trajectory = read(tokenizer, "emma", "simon", "emma<recall>emma nothing</recall>", "x<recall>simon</recall>", "42")
    assert seen(tokenizer, trajectory)[3:] == [("emma", "no"), ("x", "simon")]


def test_only_the_latest_memories_are_kept(tokenizer):
    script = ["emma 1", "emma 2", "emma 3", "x<recall>emma</recall>", "42"]
    assert seen(tokenizer, read(tokenizer, *script))[-1] == ("x", "emma 1")
    two = AgentConfig(PROMPTS, 10, 60, 5, 20, options=Options(kept_memories=2))
    assert seen(tokenizer, read(tokenizer, *script, config=two))[-1] == ("x", "emma 2")
    again = ["emma 1", "emma 2", "emma 1", "x", "y<recall>emma</recall>", "42"]  # the first one is the latest then
    trajectory = read(tokenizer, *again, document=DOCUMENT + "section 4 ", config=two)
    assert seen(tokenizer, trajectory)[-1] == ("y", "emma 1")


@pytest.mark.parametrize(
    ("text", "tags", "query", "memory"),
    [
        ("emma", True, "", "emma"),
        ("emma <recall> owl </recall>", True, "owl", "emma"),
        ("<RECALL>owl</RECALL>\nemma", True, "owl", "emma"),
        ("emma<recall>owl</recall>tara<recall>fox</recall>", True, "owl", "emmatara"),
        ("emma<recall>owl", True, "owl", "emma"),  # cut
        ("emma<recall></recall>", True, "", "emma"),
        ("emma</recall>", True, "", "emma</recall>"),
        ("emma bear recall owl fox", False, "owl fox", "emma bear"),
        ("emma recall", False, "", "emma"),
        ("recalled", False, "", "recalled"),
    ],
)
def test_forms_of_a_response(text, tags, query, memory):
    found, spans = split_response(text, tags)
    assert (found, "".join(text[span.start : span.end].strip() for span in spans)) == (query, memory)


@pytest.mark.parametrize("text", ["<recall>emma</recall>", "", " "])
def test_a_response_without_a_memory_keeps_the_old_one(tokenizer, text):
    trajectory = read(tokenizer, "emma: bear", text, "simon", "x", "42")
    assert memories(trajectory.turns)[:3] == ["emma: bear", "emma: bear", "simon"]


@pytest.mark.parametrize("context", ["", " \n "])
def test_an_empty_document_goes_straight_to_the_answer(tokenizer, context):
    trajectory = read(tokenizer, "7", document=context)
    assert prompts_of(tokenizer, trajectory) == ["Q=why?;M=nothing;R=no;A"]
    assert trajectory.scores == {"queries": 0, "recalls": 0}


def test_bm25_prefers_rare_words_and_short_memories_and_the_earlier_of_equals():
    memories = ["the owl of simon", "the fox of tara", "the owl of simon and the fox and more", "fox the of tara"]
    known = {(number,): split_words(text) for number, text in enumerate(memories)}
    assert find_memory("simon", known) == (0,)
    assert find_memory("the TARA", known) == (1,)
    assert find_memory("and", known) == (2,)
    assert find_memory("nobody", known) is None
    assert find_memory("", known) is None and find_memory("simon", {}) is None
