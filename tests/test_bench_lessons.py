"""The lessons of the memory bench's miniature: their words, their forms, and what the teacher gets right and wrong."""

import random
from pathlib import Path

import pytest
import yaml

from memrl.config import WarmStartOptions
from memrl.miniature import bench_lessons, bench_scenes
from memrl.miniature.bench_lessons import FORMS, WORDS, draw_lesson
from memrl.miniature.bench_scenes import KINDS, absorb, draw_scene
from memrl.tokenizer import Tokenizer

CONFIGS = Path(__file__).resolve().parent.parent / "configs" / "agents"


def drawn(form: str, flaw: float = 0.0, number: int = 300):
    rng = random.Random(f"{form} {flaw}")
    return [draw_lesson(rng, form, flaw, sentences=5) for _ in range(number)]


def settings(name: str) -> dict:
    agent = yaml.safe_load((CONFIGS / "tiny_bench.yaml").read_text())["agent"]
    return agent | (yaml.safe_load((CONFIGS / f"tiny_{name}.yaml").read_text())["agent"] if name else {})


@pytest.mark.parametrize("form", FORMS)
def test_every_word_of_a_lesson_is_in_the_vocabulary_and_fills_a_slot(form):
    text = bench_lessons.prompt_texts()[form]
    for slots, response in drawn(form, flaw=0.8):
        assert {f"{{{name}}}" in text for name in slots} == {True}
        words = [word for part in (text, response, *slots.values()) for word in part.split() if not word.startswith("{")]
        assert set(words) <= set(WORDS)


CAPS = {  # of each form: the config file and the setting
    "memory": ("", "memory_tokens"),
    "gated": ("gated", "memory_tokens"),
    "recall": ("recall", "memory_tokens"),
    "check": ("passes", "check"),
    "merge": ("passes", "memory_tokens"),
    "map": ("map_reduce", "memory_tokens"),
    "reduce": ("map_reduce", "memory_tokens"),
    "answer": ("", "answer_tokens"),
    "recall_answer": ("recall", "answer_tokens"),
    "document": ("", "answer_tokens"),
}


@pytest.mark.parametrize("form", FORMS)
def test_a_response_and_its_end_fit_into_the_cap_of_its_turn(form):
    file, cap = CAPS[form]
    agent = settings(file)
    limit = agent["caps"][cap] if cap == "check" else agent[cap]
    assert max(len(response.split()) + 1 for _, response in drawn(form, flaw=0.8, number=1000)) <= limit


def test_pieces_of_evidence_are_joined_as_the_agents_join_them():
    for name in ("passes", "map_reduce"):
        assert settings(name)["options"]["between"] == ""
    assert any(len(slots["evidence"].split()) > 8 for slots, _ in drawn("merge"))


def test_without_a_flaw_a_reader_knows_what_memory_and_section_say():
    rng = random.Random(3)
    for kind in KINDS:
        for _ in range(200):
            scene = draw_scene(rng, 5, kind)
            own = [sentence.split() for sentence in scene.section if sentence.split()[1] in (scene.name, scene.target)]
            if kind == "code":
                values = [" ".join(words[1:4]) for words in own if words[0] == "code"]
                assert scene.after == (values[-1] if values else scene.before)
            elif kind == "pet":
                pets = {words[2] for words in own if words[0] == "pet"}
                assert set(scene.after.split()[1:]) - {"none"} == pets | set(scene.before.split()[1:]) - {"none"}
            elif kind == "link" and any(words[0] == "link" and words[1] == scene.name for words in own):
                assert scene.after.split()[:2] == [scene.name, scene.target]


def test_the_habit_takes_a_last_code_for_news_as_often_as_the_flaw_says():
    def habits(flaw: float) -> tuple[int, int]:
        taken = possible = 0
        for slots, response in drawn("memory", flaw, number=6000):
            (kind, name), section = slots["question"].split(), slots["section"]
            last = section.split()[-5:]
            if kind == last[0] == "code" and f"code {name}" not in section:
                possible, taken = possible + 1, taken + (response == " ".join(last[1:4]))
        return taken, possible

    taken, possible = habits(0.8)
    assert possible > 50 and 0.7 < taken / possible < 0.9
    assert habits(0.0)[0] == 0


def test_a_gate_neither_stops_nor_keeps_by_rule():
    responses = [response.split() for _, response in drawn("gated", 0.8, number=3000)]
    stops = sum(words[-1] == "stop" for words in responses) / len(responses)
    assert 0.01 < stops < 0.15
    assert 0.1 < sum(words[0] == "keep" for words in responses) / len(responses) < 0.5


def test_a_query_names_what_is_missing_and_a_recalled_memory_is_used():
    lessons = drawn("recall", number=2000)
    queries = [response.split() for _, response in lessons if "recall" in response.split()]
    assert len(queries) > 100
    assert all(words[words.index("recall") + 1] == words[words.index("none") - 1] for words in queries)
    used = [r for s, r in lessons if s["question"].startswith("code") and s["recalled"].startswith(s["question"].split()[1])]
    assert sum("none" not in response.split() for response in used) > 0.6 * len(used) > 0


def test_a_merge_reads_the_pieces_in_their_order():
    assert absorb("code", "emma", "emma none", ["emma red fox", "simon blue owl", "emma grey owl"]) == "emma grey owl"
    assert absorb("link", "emma", "emma none", ["simon red fox", "emma simon none"]) == "emma simon red fox"
    assert absorb("pet", "emma", "emma none", ["emma fox owl", "emma owl bear"]) == "emma fox owl bear"
    assert absorb("pet", "emma", "emma fox", ["emma owl"]) == "emma owl fox"
    assert absorb("visit", "emma", "emma two", ["emma one", "rosa red fox", "emma one"]) == "emma four"


def test_lessons_are_a_function_of_the_seed():
    tokenizer = Tokenizer(bench_lessons.build_tokenizer())
    agent = type("Agent", (), {"chunk_tokens": 25})

    def first(seed: int):
        lessons = bench_lessons.lessons(random.Random(seed), WarmStartOptions(), tokenizer, agent)
        return [next(lessons) for _ in range(50)]

    assert first(1) == first(1) != first(2)
    assert all(response[-1] == tokenizer.hf.eos_token_id for _, response in first(1))


def test_other_facts_are_about_other_names():
    rng = random.Random(5)
    for kind in KINDS:
        for _ in range(300):
            assert bench_scenes.draw_other(rng, kind, ("emma", "simon")).split()[1] not in ("emma", "simon")
