"""The lessons of the memory bench's miniature: single turns of every agent, from one teacher with bad habits.

One start serves all agents, so that they can be compared: it knows the form of each kind of turn and what a turn needs (find a
fact, follow a link, replace an older value, add to a list, count on, merge pieces). What it lacks is left to reinforcement
learning. The teacher

    habit      takes the section's last code for news if there are none, as in the needle's miniature
    doubt      overlooks news: a later value mostly, other news sometimes
    gates      keeps or rewrites the memory as chance has it, and stops less than half of the time when the answer is known
    queries    asks for an earlier memory half of the time, and uses one that helps mostly
    notes      writes down a code that may be needed later more often than not
"""

from __future__ import annotations

import random
from collections.abc import Iterator
from dataclasses import replace
from typing import TYPE_CHECKING

from memrl.data.bench import miniature
from memrl.data.bench.miniature import COUNTS, make_bench_sample
from memrl.data.bench.stories import TASKS
from memrl.data.needle import NAMES, SECOND_VALUES, SENTENCES_PER_CHUNK, draw_name, draw_values
from memrl.miniature.bench_scenes import KINDS, MOST_PETS, MOST_VISITS, Scene, absorb, draw_scene
from memrl.prompts import PromptTemplate, load_prompts

if TYPE_CHECKING:
    from memrl.agents import AgentConfig
    from memrl.config import WarmStartOptions
    from memrl.tokenizer import Tokenizer

WORDS = (*miniature.WORDS, "keep", "stop", "check", "recall", "evidence", "merge")
FORMS = {  # how often each kind of turn is shown
    "memory": 3.0, "gated": 2.0, "recall": 2.5, "check": 2.0, "map": 1.0, "merge": 3.0, "reduce": 2.0, "answer": 1.0,
    "recall_answer": 0.5, "document": 1.0,
}  # fmt: skip
OVERLOOK_LATER, OVERLOOK = 0.75, 0.1  # of the flaw: how often a later value, and other news, are overlooked
KEEP, STOP_KNOWN, STOP_UNKNOWN = 0.5, 0.4, 0.02
ASK, HELPFUL, USE, NOTE = 0.5, 0.45, 0.7, 0.7
BLANK, JUNK = 0.3, 0.12  # memories that are still empty; memories that the habit has replaced
MOST_CHUNKS = 6  # of a document that is read at once


def build_tokenizer():
    """As `memrl.data.bench.miniature.build_tokenizer`, with the words of all agents' turns."""
    return miniature.needle.build_tokenizer(WORDS)


def lessons(
    rng: random.Random, options: WarmStartOptions, tokenizer: Tokenizer, agent: AgentConfig
) -> Iterator[tuple[list[int], list[int]]]:
    """Prompts and responses of the teacher; the same for every `agent`, so that one start serves all of them."""
    vocabulary = tokenizer.hf.get_vocab()
    texts = prompt_texts()
    templates: dict[str, PromptTemplate] = {}

    def encode(text: str) -> list[int]:
        return [vocabulary[word] for word in text.split()]

    while True:
        form = rng.choices(list(FORMS), list(FORMS.values()))[0]
        slots, response = draw_lesson(rng, form, options.flaw, SENTENCES_PER_CHUNK)
        if form not in templates:
            templates[form] = PromptTemplate(texts[form], tokenizer, slots=slots)
        prompt = templates[form].render(**{name: encode(value) for name, value in slots.items()})
        yield prompt, [*encode(response), tokenizer.hf.eos_token_id]


def prompt_texts() -> dict[str, str]:
    """The prompt's text of each form."""
    plain = load_prompts("miniature")
    assert plain.document is not None
    others = [load_prompts(f"miniature_{agent}", {}).texts for agent in ("gated", "recall", "passes", "map_reduce")]
    forms = {name: text for texts in others for name, text in texts.items() if name in FORMS}
    return {**forms, "memory": plain.memory, "answer": plain.answer, "document": plain.document}


def draw_lesson(rng: random.Random, form: str, flaw: float, sentences: int) -> tuple[dict[str, str], str]:
    """One turn of this form: what fills the prompt's slots, and the teacher's response."""
    if form == "document":
        return _document(rng, sentences)
    if form in ("merge", "reduce"):
        return _merge(rng, form)
    scene = draw_scene(rng, sentences)
    if form == "answer":
        memory = _shown(rng, scene, _junk(rng, scene))
        return {"question": scene.question, "memory": memory}, boxed(scene, memory)
    if form == "recall_answer":
        scene, memory, recalled = _recalled(rng, scene)
        return {"question": scene.question, "memory": memory, "recalled": recalled}, boxed(scene, scene.before)
    slots = {"question": scene.question, "section": " ".join(scene.section)}
    habit = scene.last_code if not scene.found and rng.random() < flaw else ""
    later = scene.kind == "code" and "none" not in scene.before.split()
    overlooked = rng.random() < flaw * (OVERLOOK_LATER if later else OVERLOOK)
    if form == "map":
        # Whose code it is does not stand in the section.
        unlinked = scene.kind == "link" and scene.before.split()[1] == scene.target
        scene = scene.forgotten()
        news = "none" if unlinked or not scene.found else scene.after
        return slots, habit or ("none" if overlooked else news)
    if form == "check":
        scene = replace(scene, before=_nothing(scene)) if scene.before.startswith(f"{_nothing(scene)} ") else scene
        slots["memory"] = _shown(rng, scene)
        news = replace(scene, before=_nothing(scene)).after if scene.kind in ("pet", "visit") else scene.after
        is_new = scene.found and not (later or (scene.kind == "visit" and "none" not in scene.before.split()))
        return slots, habit or (news if is_new and not overlooked else "none")
    return _read(rng, form, scene, slots, habit, overlooked)


def _read(
    rng: random.Random, form: str, scene: Scene, slots: dict[str, str], habit: str, overlooked: bool
) -> tuple[dict[str, str], str]:
    """A turn that rewrites the memory: of the agents memory, gated and recall."""
    if form == "recall":
        scene, slots["memory"], slots["recalled"] = _recalled(rng, scene)
    else:
        junk = _junk(rng, scene)
        scene = scene.forgotten() if junk else scene
        slots["memory"] = _shown(rng, scene, junk)
    response = habit or (scene.before if overlooked else scene.after)
    if scene.kind == "link" and scene.after.startswith(_nothing(scene)) and scene.codes and rng.random() < NOTE:
        response = f"{_nothing(scene)} {scene.codes[-1]}"
    if form == "gated":
        if not scene.found and rng.random() < KEEP:
            response = "keep"
        is_known = scene.kind in ("code", "link") and "none" not in scene.after.split()
        if rng.random() < (STOP_KNOWN if is_known else STOP_UNKNOWN):
            response = f"{response} stop"
    if form == "recall" and "none" in response.split() and rng.random() < ASK:
        words = response.split()  # what is missing is about the word before "none"
        response = f"{response} recall {words[words.index('none') - 1]}"
    return slots, response


def _nothing(scene: Scene) -> str:
    return f"{scene.name} none"


def _junk(rng: random.Random, scene: Scene) -> str:
    """What the habit may have left in the memory, sometimes."""
    return f"{draw_name(rng, scene.name)} {draw_values(rng)}" if rng.random() < JUNK else ""


def _shown(rng: random.Random, scene: Scene, junk: str = "") -> str:
    """The text of the memory slot."""
    if junk:
        return junk
    return "nothing" if scene.before == _nothing(scene) and rng.random() < BLANK else scene.before


def _recalled(rng: random.Random, scene: Scene) -> tuple[Scene, str, str]:
    """The scene with what is known from the memory and a recalled one together, and the two as they are shown."""
    junk, nothing = _junk(rng, scene), _nothing(scene)
    if scene.before == f"{scene.name} {scene.target} none" and rng.random() < HELPFUL:  # the code was noted before the link came
        noted = f"{scene.target} {draw_values(rng)}"
        return replace(scene, before=f"{scene.name} {noted}", found=()), scene.before, f"{nothing} {noted}"
    if "none" not in scene.before.split() and rng.random() < HELPFUL:
        recalled = scene.before
        return (scene if rng.random() < USE else scene.forgotten()), junk or nothing, recalled
    other = f"{draw_name(rng, scene.name)} {draw_values(rng)}"
    recalled = rng.choice(("nothing", "nothing", other, f"{nothing} {other}" if scene.kind == "link" else other))
    scene = scene.forgotten() if junk else scene
    return scene, _shown(rng, scene, junk), recalled


def boxed(scene: Scene, memory: str) -> str:
    """The answer from a memory, without the question's name where that is no part of it; one about another name says nothing."""
    words = memory.split()
    words = [scene.name, "none"] if words[0] != scene.name or words[1] == "none" else words
    return f"\\boxed{{ {' '.join(words[1:] if scene.kind in ('pet', 'link') else words)} }}"


def _merge(rng: random.Random, form: str) -> tuple[dict[str, str], str]:
    """Pieces of evidence in the order of the document, some of them from the habit; a reduce turn begins without a memory."""
    kind, name = rng.choice((*KINDS, "pet", "visit")), rng.choice(NAMES)
    target = draw_name(rng, name)
    before = f"{name} none"
    if kind == "link":
        linked, answer = f"{name} {target} none", f"{name} {target} {draw_values(rng)}"
        before = linked if form == "merge" and rng.random() < 0.4 else before
        noted = answer.removeprefix(f"{name} ")
        pieces = rng.choice(([answer], [linked], rng.sample([linked, answer], 2), rng.sample([linked, noted], 2)))
        pieces = [answer] if before == linked and pieces == [linked] else pieces
    elif kind == "code":
        pieces = [f"{name} {draw_values(rng)}" for _ in range(rng.randint(1, 4))]
    elif kind == "pet":
        pets = rng.sample(SECOND_VALUES, rng.randint(1, MOST_PETS))
        pieces = [f"{name} {pet}" for pet in pets]
    else:
        pieces = [f"{name} {COUNTS[1 + (rng.random() < 0.15)]}" for _ in range(rng.randint(1, MOST_VISITS - 1))]
        pieces = pieces[: MOST_VISITS // 2] if f"{name} two" in pieces else pieces
    if form == "merge" and kind in ("code", "pet", "visit") and len(pieces) > 1 and rng.random() < 0.3:
        before = absorb(kind, name, before, [pieces.pop(0)])
    for _ in range(rng.choice((0, 0, 1, 2))):
        other = rng.choice([other for other in NAMES if other not in (name, target)])
        pieces.insert(rng.randint(0, len(pieces)), f"{other} {draw_values(rng)}")
    slots = {"question": f"{kind} {name}", ("evidence" if form == "merge" else "notes"): " ".join(pieces)}
    if form == "merge":
        slots["memory"] = "nothing" if before == f"{name} none" and rng.random() < BLANK else before
    return slots, absorb(kind, name, before, pieces)


def _document(rng: random.Random, sentences: int) -> tuple[dict[str, str], str]:
    sample = make_bench_sample(rng.choice(TASKS), rng.randint(1, MOST_CHUNKS), rng.getrandbits(40), segments_per_chunk=sentences)
    answer = sample.answers if sample.match == "all" else sample.answers[:1]
    return {"question": sample.question, "section": sample.context}, f"\\boxed{{ {' '.join(answer)} }}"
