"""The tool agent's miniature: its tasks, its lessons, and that they are what the agent sees."""

import random

from memrl.agents import make_config, run_agent
from memrl.agents.tool_calls import call_form
from memrl.agents.toolbox.calculator import calculate
from memrl.config import TrainConfig, WarmStartOptions
from memrl.data.arithmetic import LARGEST, make_arithmetic
from memrl.llm import Decoding, LocalLLM
from memrl.miniature.arithmetic_lessons import arithmetic_lessons, lesson
from memrl.miniature.registry import find_miniature
from memrl.scoring.verify import strict_match
from memrl.tokenizer import Tokenizer
from memrl.training.console import next_commands
from tests.test_agent import ScriptedSampler

TOKENIZER = Tokenizer(find_miniature("arithmetic").build_tokenizer())
AGENT = make_config(
    "miniature_arithmetic",
    function="tools",
    caps={"call": 16},
    options={"max_turns": 4, "tools": ["calculator"]},
    answer_tokens=16,
    question_tokens=8,
)


def in_order(question: str) -> int:
    first, second = question.removeprefix("take ").split(" then ")
    return int(calculate(f"({first}) {second}"))


def test_tasks_depend_on_their_seed_and_their_answers_are_the_steps_in_order():
    samples = [make_arithmetic(1, seed) for seed in range(300)]
    assert samples == [make_arithmetic(1, seed) for seed in range(300)]
    assert len({sample.question for sample in samples}) > 280
    for sample in samples:
        [answer] = sample.answers
        assert int(answer) == in_order(sample.question) <= LARGEST
    hasty = [calculate(sample.question.removeprefix("take ").replace("then ", "")) for sample in samples]
    agreed = sum(value == sample.answers[0] for value, sample in zip(hasty, samples, strict=True))
    assert 0.25 < agreed / 300 < 0.42  # a third, in which haste does no harm


def test_the_vocabulary_holds_every_word_of_a_conversation():
    assert call_form(TOKENIZER.chat_template()) == "hermes"
    rng = random.Random(0)
    for _ in range(200):
        question, texts, results = lesson(rng, 0.5)
        for text in (question, *texts, *results):
            assert TOKENIZER.hf.unk_token_id not in TOKENIZER.encode(text)
            assert TOKENIZER.decode(TOKENIZER.encode(text)) == text and len(TOKENIZER.encode(text)) <= 16


def test_the_lessons_are_the_turns_that_the_agent_would_have():
    lessons = arithmetic_lessons(random.Random(1), WarmStartOptions(flaw=0.5), TOKENIZER, AGENT)
    taught = {(tuple(prompt), tuple(response)) for prompt, response in (next(lessons) for _ in range(60))}
    stop = TOKENIZER.hf.eos_token_id
    rng, met = random.Random(1), 0
    for _ in range(60):
        question, texts, _ = lesson(rng, 0.5)
        rng.randrange(len(texts))  # which turn is taught
        queue = [[*TOKENIZER.encode(text), stop] for text in texts]
        llm = LocalLLM(ScriptedSampler(lambda request, queue=queue: queue.pop(0)), TOKENIZER, Decoding())
        sample = make_arithmetic(1, 0)
        sample = type(sample)("s", question, "", (str(in_order(question)),))
        trajectory = llm.run([run_agent(llm.session(0), sample, AGENT)])[0]
        for before, after in zip(trajectory.turns, trajectory.turns[1:], strict=False):
            assert after.prompt_ids[: before.num_tokens] == before.prompt_ids + before.response_ids
        met += sum((tuple(turn.prompt_ids), tuple(turn.response_ids)) in taught for turn in trajectory.turns)
        if texts[0].startswith("first"):
            assert [turn.text.split()[0] for turn in trajectory.turns] == ["first", "then", "so"]
            assert strict_match(trajectory.response, sample.answers) == 1.0
    assert met >= 60


def test_a_finished_run_does_not_point_to_commands_that_need_documents():
    config = TrainConfig()
    config.model.miniature, config.data.tasks = "arithmetic", ["arithmetic"]
    assert [command.split()[1] for command in next_commands(config)] == ["trace"]
