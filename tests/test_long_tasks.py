"""The long tasks: exact lengths, functions of their arguments, solved from the text, chance as documented, run by eval.py."""

import collections
import hashlib
import itertools
import random
import re
import time

import pytest

from memrl.agents import AgentConfig
from memrl.data.longtasks import FAMILIES, GROUPS, TASKS, make_long_task, nth_request
from memrl.data.longtasks.fact_consolidation import NUM_NAMES, name
from memrl.data.longtasks.labelled_entries import SUBJECTS
from memrl.data.longtasks.state_tracking import OBJECTS, PEOPLE, PLACES
from memrl.data.paragraphs import sample_seed
from memrl.data.ruler import RulerFiles
from memrl.data.ruler.task import FORMAT
from memrl.evaluation.tasks import choose_lengths, length_units, make_tasks
from memrl.prompts import load_prompts
from memrl.scoring.scores import score_response
from memrl.tokenizer import Tokenizer
from tests.long_task_solvers import STATEMENTS, entries, solve, story
from tests.test_eval_cli import folder, rows_in, run_main  # noqa: F401 (a fixture)
from tests.test_ruler import build_tokenizer, files, qwen, tokenizer, total_tokens  # noqa: F401 (fixtures)

STATES, REQUESTS, FACTS, ENTRIES = (GROUPS[family] for family in FAMILIES)


class Characters:
    """Quick, and about as many tokens as a real tokenizer."""

    vocab_size = 256

    def encode(self, text):
        return range(len(text) // 4)


def make(task: str, files: RulerFiles | None = None):  # noqa: F811
    return make_long_task(task, Characters(), files or RulerFiles())


def some(task: str, number: int, lengths: tuple[int, ...] = (1500, 2600, 6000)):
    made = make(task)
    return [made.sample(lengths[index % len(lengths)], index, 3) for index in range(number)]


def boxed(response: str) -> str:
    return f"Let me see: \\boxed{{{response}}}"


# --- lengths and arguments ----------------------------------------------------------------------------------


@pytest.mark.parametrize("task", TASKS)
def test_a_sample_fills_its_length_and_never_exceeds_it(task, tokenizer, files):  # noqa: F811
    made = make_long_task(task, tokenizer, files)
    for index, length in enumerate((4096, 5001, 9000)):
        sample = made.sample(length, index, 1)
        assert 0.99 * length <= total_tokens(tokenizer, made, sample) <= length
        assert sum(sample.metadata["tokens"].values()) == total_tokens(tokenizer, made, sample)


@pytest.mark.parametrize("task", ["state_tracking_3", "nth_request_8", "fact_consolidation_multi", "aggregation_count"])
def test_lengths_are_exact_with_the_real_tokenizer_and_a_book(task, qwen, shared_data):  # noqa: F811
    book = shared_data / "texts" / "War-and-Peace.2600-0.txt"
    made = make_long_task(task, qwen, RulerFiles(essays=str(book)))
    for index, length in enumerate((4096, 4097, 12_000)):
        sample = made.sample(length, index, 0)
        assert 0.99 * length <= total_tokens(qwen, made, sample) <= length
        assert score_response(boxed(solve(task, sample.question, sample.context)), sample.answers, sample.match)["strict"] == 1


@pytest.mark.parametrize("task", TASKS)
def test_a_length_too_short_is_refused_and_the_length_named_works(task, tokenizer):  # noqa: F811
    made = make_long_task(task, tokenizer, RulerFiles())
    with pytest.raises(ValueError, match=f"^{task}: a length of 60 tokens is too short; give \\d+ or more$") as refusal:
        made.sample(60, 0, 0)
    needed = int(str(refusal.value).split()[-3])
    for index in range(10):
        assert total_tokens(tokenizer, made, made.sample(needed, index, 0)) <= needed < 3000


@pytest.mark.parametrize("task", TASKS)
def test_a_sample_is_a_function_of_its_arguments(task):
    sample = make(task).sample(3000, 4, 7)
    assert sample == make(task).sample(3000, 4, 7)
    assert sample.id == f"{task}-3000-7-4" and sample.metadata["task"] == task
    for other in (make(task).sample(3000, 5, 7), make(task).sample(3000, 4, 8)):
        assert other.context != sample.context and other.metadata != sample.metadata


def test_samples_stay_what_they_are_or_their_format_is_raised():
    """Pins each family's samples. Where this fails on purpose, raise FORMAT of its file and pin the new samples."""
    digests = {}
    for family, kinds in FAMILIES.items():
        digest = hashlib.sha256()
        for kind in kinds:
            sample = make(f"{family}_{kind}").sample(9000, 2, 5)
            digest.update(repr((sample.question, sample.context, sample.answers, sample.match, sample.metadata)).encode())
        digests[family] = (make(f"{family}_{kinds[0]}").format, digest.hexdigest()[:8])
    assert digests == {
        "state_tracking": ("1", "c66aa029"),
        "nth_request": ("1", "8bd78f51"),
        "fact_consolidation": ("1", "b1680958"),
        "aggregation": ("1", "356bb79d"),
    }


def test_versions_tell_tasks_texts_and_tokenizers_apart(tokenizer, files):  # noqa: F811
    hf = build_tokenizer()
    hf.add_tokens(["burns on"])
    made = [make_long_task("state_tracking_1", used, of) for used in (tokenizer, Tokenizer(hf)) for of in (files, RulerFiles())]
    assert len({one.version for one in (*made, make_long_task("state_tracking_2", tokenizer, files))}) == 5
    assert all(one.version.startswith(f"{one.format}-") for one in made) and FORMAT == "1"


def test_a_long_document_takes_linear_time():
    """16 times as long takes less than 40 times as long; a quadratic cost would take 256 times as long."""
    for task in ("state_tracking_3", "nth_request_8", "fact_consolidation_multi", "aggregation_count"):
        made, seconds = make(task), []
        for length in (16_384, 262_144):
            start = time.process_time()
            made.sample(length, 0, 0)
            seconds.append(time.process_time() - start)
        assert seconds[1] < 40 * seconds[0] + 0.1, (task, seconds)


# --- solved from the text -----------------------------------------------------------------------------------


@pytest.mark.parametrize("task", TASKS)
def test_question_and_document_alone_give_the_full_score(task):
    for sample in some(task, 30):
        response = solve(task, sample.question, sample.context)
        assert set(score_response(boxed(response), sample.answers, sample.match).values()) == {1.0}, sample.question
        assert "chance" in sample.metadata and sample.question.count("?") == 1


@pytest.mark.parametrize("task", STATES)
def test_the_sentences_of_a_story_are_hidden_in_a_text_in_their_order(task, files, tokenizer):  # noqa: F811
    from tests.test_ruler import make_essay

    made = make_long_task(task, tokenizer, files)
    sample = made.sample(5000, 0, 0)
    assert sample.metadata["haystack"] == "essays" and make(task).sample(5000, 0, 0).metadata["haystack"] == "noise"
    assert solve(task, sample.question, sample.context) in (*sample.answers, ", ".join(sample.answers))
    sentences = [one for one in re.split(r"(?<=\.) ", sample.context) if one.split()[0] in PEOPLE]
    assert len(sentences) == sample.metadata["sentences"] == len(story(sample.context))
    bare = sample.context
    for sentence in sentences:
        bare = bare.replace(f"{sentence} ", "", 1)
    assert bare in f"{make_essay(3000)} {make_essay(3000)}"
    assert len({one for sentence in sentences for one in PLACES if one in sentence}) <= 6


@pytest.mark.parametrize(("task", "number"), zip(STATES, (1, 2, 3, 1, None, None), strict=True))
def test_depths_of_a_story_are_the_sentences_that_the_answer_follows_from(task, number):
    for sample in some(task, 30):
        begins = [round(depth * len(sample.context)) for depth in sample.metadata["depths"]]
        evidence = [re.match(r".+?\.", sample.context[begin:])[0] for begin in begins]
        assert all(sentence.split()[0] in PEOPLE for sentence in evidence) and begins == sorted(set(begins))
        if number is not None:  # the sentences alone give the answer
            assert len(evidence) == number and solve(task, sample.question, " ".join(evidence)) == sample.answers[0]
        elif sample.answers[0] not in ("0", "nothing"):
            named = [one for sentence in evidence for one in OBJECTS if f"the {one}" in sentence]
            assert len(set(named)) == int(sample.answers[0]) if task.endswith("count") else set(named) == set(sample.answers)
        else:
            person = re.search(r"does (\w+) carry", sample.question)[1]
            assert len(evidence) == 1 and person in evidence[0]


def test_people_whom_the_text_names_are_not_in_the_story(tmp_path):
    (tmp_path / "book.txt").write_text(f"{' and '.join(PEOPLE[:-5])} sat down. " * 20)
    sample = make("state_tracking_1", RulerFiles(essays=str(tmp_path))).sample(2000, 0, 0)
    assert re.search(r"Where is (\w+)", sample.question)[1] in PEOPLE[-5:]
    (tmp_path / "book.txt").write_text(f"{' and '.join(PEOPLE[:-3])} sat down. " * 20)
    with pytest.raises(ValueError, match=r"--essays .*: the text names nearly all of Keiko.*; give another text"):
        make("state_tracking_1", RulerFiles(essays=str(tmp_path)))


@pytest.mark.parametrize("task", REQUESTS)
def test_a_conversation_repeats_one_request_a_number_of_times(task):
    number, asked = int(task[-1]), collections.Counter()
    for sample in some(task, 30):
        request = re.search(r"of its \w+ (.+?)\? ", sample.question)[1]
        turns = sample.context.split("\n\n")
        form = re.compile(r"User: Write a .+ about the \w+\.\nAssistant: [A-Z][^.\n]+\.( [A-Z][^.\n]+\.)*")
        assert all(form.fullmatch(turn) for turn in turns)
        requests = collections.Counter(turn.split(".\n")[0].removeprefix("User: Write a ") for turn in turns)
        assert requests[request] == number and len(requests) > 5
        kind, topic = request.split(" about ")
        assert sample.context.count(sample.answers[0]) == 1
        depths = [*sample.metadata["depths"], *sample.metadata["other_depths"]]
        begins = sorted(round(depth * len(sample.context)) for depth in depths)
        firsts = [re.match(r"[^.]+\.", sample.context[begin:])[0] for begin in begins]
        assert firsts == re.findall(rf"^User: Write a {request}\.\nAssistant: ([^.]+\.)", sample.context, re.MULTILINE)
        assert firsts[sample.metadata["asked"] - 1] == sample.answers[0]
        asked[sample.metadata["asked"]] += 1
    assert len(asked) > number // 2
    near = [one for one in requests if one != request and (one.startswith(f"{kind} ") or one.endswith(f" {topic}"))]
    assert near  # the same kind of text about another topic, or another kind about the same


def test_what_the_asked_answers_are_about_is_in_no_other_sentence(monkeypatch):
    monkeypatch.setattr(nth_request, "ADJECTIVES", nth_request.ADJECTIVES[:4])
    monkeypatch.setattr(nth_request, "NOUNS", nth_request.NOUNS[:12])  # 48 pairs for some hundred sentences
    sample = make("nth_request_8").sample(6000, 0, 0)
    depths = [*sample.metadata["depths"], *sample.metadata["other_depths"]]
    begins = [round(depth * len(sample.context)) for depth in depths]
    subjects = collections.Counter(" ".join(one.split()[1:3]) for one in re.findall(r"(?<=[:.] )[A-Z][^.:\n]+\.", sample.context))
    assert [subjects[" ".join(sample.context[begin:].split()[1:3])] for begin in begins] == [1] * 8


@pytest.mark.parametrize("task", FACTS)
def test_facts_are_numbered_and_the_newest_ones_lead_to_the_answer(task):
    hops = collections.Counter()
    for sample in some(task, 30):
        begins = [round(depth * len(sample.context)) for depth in sample.metadata["depths"]]
        newest = [sample.context[begin:].split("\n")[0] for begin in begins]
        assert len(newest) == sample.metadata["hops"] and newest[-1].endswith((f" {sample.answers[0]}.",))
        alone = "\n".join(f"{number}. {line.partition('. ')[2]}" for number, line in enumerate(newest))
        assert solve(task, sample.question, alone) == sample.answers[0]  # the path itself is enough
        lines = [line.partition(". ") for line in sample.context.split("\n")]
        assert [int(number) for number, _, _ in lines] == list(range(sample.metadata["facts"]))
        for line in newest:  # each has older versions with other values
            number, _, text = line.partition(". ")
            patterns = (pattern.format(".+") + r"\." for pattern in STATEMENTS.values())
            head = text[: next(found for pattern in patterns if (found := re.fullmatch(pattern, text))).start(1)]
            others = {text: int(number) for number, _, text in lines if text.startswith(head)}
            assert len(others) == sample.metadata["versions"] and others[text] == max(others.values()) == int(number)
        hops[sample.metadata["hops"]] += 1
    assert set(hops) == ({1} if task.endswith("single") else {2, 3, 4})


def test_names_are_all_different_and_none_stands_within_another():
    rng = random.Random(0)
    numbers = {int(rng.random() * NUM_NAMES) for _ in range(3000)}
    for kind in ("person", "town", "country"):
        names = {name(kind, number) for number in numbers}
        assert len(names) == len(numbers) and len({len(one.split()[-1]) for one in names}) == 1


@pytest.mark.parametrize("task", ENTRIES)
def test_entries_are_by_few_users_and_about_known_subjects(task):
    things = [thing for _, listed in SUBJECTS.values() for thing in listed.split(";")]
    assert len(set(things)) == len(things)
    shares, empty = [], 0
    for sample in some(task, 20, (6000,)):
        found = entries("", sample.context)
        assert len(found) == sample.metadata["entries"] == sample.context.count("\n") + 1
        asked = entries(sample.question, sample.context)
        assert len(asked) == sample.metadata["entries_asked"] > 0 and sample.metadata["depths"] == []
        users = collections.Counter(user for _, user, _ in found)
        assert len(users) <= 20
        shares.append(sum(count for _, count in users.most_common(4)) / len(found))
        empty += sample.answers == ("0",)
    assert 0.75 < sum(shares) / len(shares) < 0.87 and empty == 0


# --- chance -------------------------------------------------------------------------------------------------


def guesses(task: str, sample) -> list[str]:
    """All answers that a reader has to choose from who sees the candidates, but not which one is right."""
    context, question = sample.context, sample.question
    if task in STATES[:3]:
        places = {event[2] for event in story(context) if event[0] == "move"}
        return [place for place in places if place not in question]
    if task == "state_tracking_yes_no":
        return ["yes", "no"]
    if task == "state_tracking_count":
        return list("0123")
    if task in REQUESTS:
        request = re.search(r"of its \w+ (.+?)\? ", question)[1]
        return re.findall(rf"Write a {request}\.\nAssistant: ([^.]+\.)", context)
    if task in FACTS:
        return versions(re.search(r"What is (.+)\? Answer", question)[1], context)
    if "which user" in question:
        return [user for user, _ in collections.Counter(user for _, user, _ in entries("", context)).most_common(4)]
    if "which subject" in question:
        return list(SUBJECTS)
    return ["more", "fewer"] if "more than" in question else ["earlier", "later"]


def versions(phrase: str, context: str) -> list[str]:
    """The values of a phrase by all facts, the old ones too."""
    for form, statement in STATEMENTS.items():
        if match := re.fullmatch(form, phrase):
            inner = versions(match[1], context)
            found = (re.findall(rf"^\d+\. {statement.format(re.escape(one))}\.$", context, re.MULTILINE) for one in inner)
            return list(itertools.chain(*found))
    return [phrase]


@pytest.mark.parametrize("task", [one for one in TASKS if one not in ("state_tracking_list", "aggregation_count")])
def test_chance_is_what_a_guess_among_the_candidates_gets(task):
    exact = total = 0
    for sample in some(task, 20, (6000,)):
        candidates = guesses(task, sample)
        score = sum(score_response(boxed(one), sample.answers)["strict"] for one in candidates) / len(candidates)
        assert score <= sample.metadata["chance"] + 1e-9  # lower where both are equal, or a place is in no sentence
        exact += abs(score - sample.metadata["chance"]) < 1e-9
        total += 1
    assert exact >= 0.7 * total


@pytest.mark.parametrize(
    ("task", "answer", "share"),
    [
        ("state_tracking_list", ("nothing",), 1 / 4),
        ("state_tracking_count", ("3",), 1 / 4),
        ("state_tracking_yes_no", ("yes",), 1 / 2),
    ],
)
def test_answers_are_as_frequent_as_the_chance_says(task, answer, share):
    made = make(task)
    found = 0
    for index in range(300):
        plan = made.plan(8192, lambda part, index=index: random.Random(sample_seed(0, task, index, part)))
        found += plan.answers == answer
    assert abs(found / 300 - share) < 4 * (share * (1 - share) / 300) ** 0.5


def test_the_chance_of_a_count_is_one_in_the_entries_asked():
    for sample in some("aggregation_count", 10):
        assert sample.metadata["chance"] == 1 / sample.metadata["entries_asked"]


def test_equal_counts_make_each_of_them_right():
    found = [sample for sample in some("aggregation_most", 60, (1500,)) if len(sample.answers) > 1]
    assert found
    for sample in found:
        asked = entries(sample.question, sample.context)
        label = re.search(r"about (\w+)\? If", sample.question)
        counts = collections.Counter(user if label else subject for _, user, subject in asked if not label or subject == label[1])
        assert sample.match == "any" and {one for one in counts if counts[one] == max(counts.values())} == set(sample.answers)


# --- eval.py ------------------------------------------------------------------------------------------------


def test_names_and_groups_are_tasks_of_an_evaluation(tokenizer):  # noqa: F811
    agent = AgentConfig(load_prompts("question_first"), chunk_tokens=25)
    tasks = make_tasks(["long_tasks"], tokenizer, agent)
    assert [task.name for task in tasks] == list(TASKS) and len(TASKS) == 14
    assert {length_units()[task] for task in TASKS} == {task.length_unit for task in tasks} == {"tokens"}
    assert choose_lengths(tasks, None)["aggregation_most"] == [8192, 16384, 32768]
    for family, kinds in FAMILIES.items():
        made = make_tasks([family], tokenizer, agent)
        assert [task.name for task in made] == [f"{family}_{kind}" for kind in kinds]
    with pytest.raises(ValueError, match=r"no task 'nth_request_3'; .* long_tasks, .* nth_request_2, nth_request_4"):
        make_tasks(["nth_request_3"], tokenizer, agent)
    with pytest.raises(ValueError, match="no long task 'babilong'; the tasks are state_tracking_1, "):
        make_long_task("babilong", tokenizer, RulerFiles())


def test_the_command_runs_all_of_them(folder, tmp_path, capsys):  # noqa: F811
    options = ["--model", folder, "--task", "long_tasks", "--lengths", "1500", "--samples", 1, "--device", "cpu"]
    options += ["--agent.question_tokens", 100, "--agent.chunk_tokens", 600, "--methods", "memory,retrieval"]
    code, printed, errors = run_main(capsys, *options, "--retrieval_tokens", 300, "--out", tmp_path / "out")
    assert code == 0 and printed.startswith("28 readings, "), errors
    rows = rows_in(tmp_path / "out")
    assert {row["task"] for row in rows} == set(TASKS) and {row["error"] for row in rows} == {None}
    assert all(1200 <= row["tokens"] <= 1500 for row in rows)
