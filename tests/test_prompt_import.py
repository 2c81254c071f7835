r"""Prompts out of a copy of the original's repository, here one with its layout and words of our own."""

import re
from pathlib import Path

import pytest
import yaml

from memrl.__main__ import main
from memrl.agents import AgentConfig
from memrl.agents.agent_file import load_agent, save_agent
from memrl.prompts import PromptTemplate, load_prompts
from memrl.prompts.import_original import import_prompts
from memrl.tokenizer import load_tokenizer
from tests.test_tokenizer import character_tokenizer

UPDATE = "Take notes.\n\n<q> \n{prompt}\n</q>\n<m>\n{memory}\n</m>\n<s>\n{chunk}\n</s>\n\nNotes:\n"
FINAL = "Answer in \\boxed{{}}.\n<q> \n{prompt}\n</q>\n<m>\n{memory}\n</m>\nAnswer:\n"
SENTENCE = 'End in "so it is X".\n{prompt}\n{memory}\n'
DOCUMENT = "Read.\n<t>\n$DOC$\n</t>\n\n$Q$\n\nAnswer in \\boxed{{}}."

TRAINER = f'''
import torch_that_nobody_has
raise SystemExit("this file must not be run")

TEMPLATE = """{UPDATE}"""

TEMPLATE_FINAL_BOXED = """{FINAL.replace(chr(92), chr(92) * 2)}"""


class Agent:
    def __init__(self, tokenizer):
        wrap = chat_template(tokenizer)
        self.update = TokenTemplate(wrap.format(message=TEMPLATE), tokenizer)
        self.final = TokenTemplate(wrap.format(message=TEMPLATE_FINAL_BOXED), tokenizer)
        self.NO_MEMORY_TOKENS = tokenizer.encode("None so far", add_special_tokens=False)
        raise ValueError("this must not be run either")
'''
ASYNC = """
from recurrent.impls.memory import Config, TEMPLATE, TEMPLATE_FINAL_BOXED

async def rollout(self, item, memory=None):
    await ask(TEMPLATE.format(prompt=item, memory=memory if memory else "None so far", chunk=self.chunk))
    await ask(TEMPLATE_FINAL_BOXED.format(prompt=item, memory=memory or "None so far"))
"""
EVALUATION = f'''
TEMPLATE = """{UPDATE}"""
TEMPLATE_FINAL = """{SENTENCE}"""
NO_MEMORY = "None so far"

def run(prompt, chunk):
    memory = NO_MEMORY
    ask(TEMPLATE.format(prompt=prompt, chunk=chunk, memory=memory))
    ask(TEMPLATE_FINAL.format(prompt=prompt, memory=memory))
'''
ONE_SHOT = f'''
template_0shot = """{DOCUMENT.replace(chr(92), chr(92) * 2)}"""
prompt = template_0shot.replace("$DOC$", context).replace("$Q$", question)
'''
LAYOUT = {
    "recurrent/impls/memory.py": TRAINER,
    "recurrent/impls/async_memory.py": ASYNC,
    "taskutils/memory_eval/utils/recurrent.py": EVALUATION,
    "taskutils/memory_eval/utils/boxed.py": ONE_SHOT,
    "taskutils/memory_data/other.py": 'QUERY = "{context}\\n{query}"',
}


def write(folder: Path, files: dict[str, str]) -> Path:
    for name, text in files.items():
        path = folder / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text, encoding="utf-8")
    return folder


@pytest.fixture
def repository(tmp_path):
    return write(tmp_path / "MemAgent", LAYOUT)


def ours(text: str) -> str:
    for theirs, slot in (("{prompt}", "{question}"), ("{chunk}", "{section}"), ("$Q$", "{question}"), ("$DOC$", "{section}")):
        text = text.replace(theirs, slot)
    return text


def texts(path: Path) -> dict[str, str]:
    return {role: piece.text for role, piece in import_prompts(path).items()}


def test_the_folder_gives_the_trainers_prompts_to_the_letter(repository):
    expected = {"memory": ours(UPDATE), "answer": ours(FINAL), "no_memory": "None so far", "document": ours(DOCUMENT)}
    assert texts(repository) == expected
    assert "\\boxed{{}}" in expected["answer"]  # pasted into the chat template, not formatted: the braces stay doubled


def test_a_file_gives_its_own_prompts(repository):
    found = texts(repository / "taskutils/memory_eval/utils/recurrent.py")
    assert found == {"memory": ours(UPDATE), "answer": ours(SENTENCE), "no_memory": "None so far"}


def test_prompts_that_a_file_imports_are_taken_as_it_uses_them(repository):
    found = texts(repository / "recurrent/impls/async_memory.py")
    assert found == {"memory": ours(UPDATE), "answer": ours(FINAL).replace("{{}}", "{}"), "no_memory": "None so far"}


def test_the_file_that_is_written_says_where_each_text_came_from(repository, tmp_path, capsys):
    out = tmp_path / "original.yaml"
    assert main(["prompts", "import", str(repository), "--out", str(out)]) == 0
    lines = out.read_text().splitlines()
    for role, name in (("memory", "TEMPLATE"), ("answer", "TEMPLATE_FINAL_BOXED"), ("no_memory", "self.NO_MEMORY_TOKENS")):
        source = next(line for line in lines if line.startswith(f"#   {role} "))
        file, line, named = re.fullmatch(r"#   \w+ +(\S+), line (\d+): ([\w.]+).*", source).groups()
        assert (file, named) == ("recurrent/impls/memory.py", name)
        assert (repository / file).read_text().splitlines()[int(line) - 1].strip().startswith(f"{name} = ")
        assert source[4:] in capsys.readouterr().out or role != "memory"
    assert "doubled" in next(line for line in lines if line.startswith("#   answer"))
    prompts = load_prompts(out)
    assert (prompts.memory, prompts.answer, prompts.exact) == (ours(UPDATE), ours(FINAL), True)
    assert prompts.document == ours(DOCUMENT)


def test_without_out_the_file_goes_to_standard_output(repository, capsys):
    assert main(["prompts", "import", str(repository)]) == 0
    assert yaml.safe_load(capsys.readouterr().out)["memory"] == ours(UPDATE)


def test_a_model_folder_keeps_the_imported_prompts(repository, tmp_path):
    out = tmp_path / "original.yaml"
    main(["prompts", "import", str(repository), "--out", str(out)])
    config = AgentConfig(load_prompts(out))
    save_agent(config, tmp_path)
    assert load_agent(tmp_path) == config


@pytest.mark.parametrize("real", [False, True])
def test_rendered_prompts_are_the_originals_token_for_token(repository, tmp_path, request, real):
    """The original pastes its text into the chat template's, splits the whole at the slots and encodes each literal piece."""
    tokenizer = character_tokenizer()
    if real:
        folder = request.getfixturevalue("shared_data") / "tokenizer" / "qwen2.5-instruct"
        if not folder.is_dir():
            pytest.skip(f"no tokenizer at {folder}")
        tokenizer = load_tokenizer(folder)
    out = tmp_path / "original.yaml"
    main(["prompts", "import", str(repository), "--out", str(out)])
    prompts = load_prompts(out)
    slots = {"prompt": "Who?", "memory": prompts.no_memory, "chunk": " once\n\n"}
    ids = {name: tokenizer.encode(text) for name, text in slots.items()}
    for template, rendered in (
        (UPDATE, {"question": ids["prompt"], "memory": ids["memory"], "section": ids["chunk"]}),
        (FINAL, {"question": ids["prompt"], "memory": ids["memory"]}),
    ):
        pieces = re.split(r"\{([a-zA-Z]+)\}", tokenizer.render_chat("@").replace("@", template))
        expected = []
        for place, piece in enumerate(pieces):
            expected += ids[piece] if place % 2 else tokenizer.hf.encode(piece, add_special_tokens=False)
        text = prompts.memory if template is UPDATE else prompts.answer
        assert PromptTemplate(text, tokenizer).render(**rendered) == expected


ODD = [
    "{prompt}{memory}{chunk}",
    "  {prompt} first line begins with blanks\n{memory}{chunk}\n\n\n",
    "\n\n{prompt}\n \n{memory}\t\n{chunk} ",
    "# not a comment: {prompt} 'x' \"y\"\n--- {memory}\n... {chunk}\n",
    "caf\u00e9 \u4e2d {prompt}\r\n{memory}\x85{chunk}\u2028\n",
    '{{"json": 1}} {prompt} {{{memory}}} {chunk}\n',
]


@pytest.mark.parametrize("template", ODD)
def test_any_text_comes_through_the_file_to_the_letter(tmp_path, template):
    source = f"T = {template!r}\nF = {FINAL!r}\nNO_MEMORY = '-: #'\nask(T.format(), F.format())\n"
    folder = write(tmp_path / "copy", {"quickstart.py": source})
    out = tmp_path / "p.yaml"
    main(["prompts", "import", str(folder), "--out", str(out)])
    prompts = load_prompts(out)
    shown = prompts.memory.replace("{question}", "Q").replace("{memory}", "M").replace("{section}", "S")
    assert shown == template.format(prompt="Q", memory="M", chunk="S")
    assert prompts.no_memory == "-: #"


def test_a_later_layout_with_one_file_is_found_wherever_it_is(tmp_path):
    folder = write(tmp_path / "copy", {"agents/deep/reader.py": EVALUATION, "other.py": "x = 1", "broken.py": "{memory} ("})
    assert texts(folder)["answer"] == ours(SENTENCE)


def test_texts_in_parts_under_other_names_are_recognised_by_their_slots(tmp_path):
    source = """
A: str = "Notes on {question}: " "{memory} " + "+ {section}"
B = "{question} {memory} \\\\boxed{{x}}"
C = "{question} {memory} in a sentence"
_NO_PREVIOUS_MEMORY_TEXT = "nothing"
"""
    folder = write(tmp_path / "copy", {"quickstart.py": source})
    expected = {"memory": "Notes on {question}: {memory} + {section}", "answer": "{question} {memory} \\boxed{x}"}
    assert texts(folder) == expected | {"no_memory": "nothing"}


MISTAKES = {
    "no template": ({"recurrent/impls/memory.py": "x = 1"}, "memory turn"),
    "no files": ({"README.md": "hello"}, "no Python file there holds"),
    "no answer": ({"quickstart.py": EVALUATION.replace(SENTENCE, "{prompt}")}, "answer turn"),
    "no phrase": ({"quickstart.py": EVALUATION.replace("NO_MEMORY", "START")}, "empty memory"),
    "an unknown slot": ({"quickstart.py": EVALUATION.replace("<m>", "{recalled}")}, "memory turn"),
    "a slot twice": ({"quickstart.py": EVALUATION.replace("<m>", "{memory}")}, "memory turn"),
    "a slot with a format": ({"quickstart.py": EVALUATION.replace("{chunk}", "{chunk:>9}")}, "memory turn"),
    "two memory turns": ({"quickstart.py": EVALUATION + f"OTHER = {UPDATE + '!'!r}"}, "TEMPLATE in line 2, OTHER in line 2"),
    "two sentences": ({"quickstart.py": EVALUATION + f"OTHER = {SENTENCE + '!'!r}"}, "several texts could be 'answer'"),
    "two phrases": ({"quickstart.py": EVALUATION + "memory = 'something'"}, "several texts could be 'no_memory'"),
    "two files": ({"a.py": EVALUATION, "b.py": EVALUATION}, "a.py, b.py"),
    "not Python": ({"quickstart.py": "def ("}, "is not a Python file"),
    "null bytes": ({"quickstart.py": "x = '\0'"}, "is not a Python file"),
}


@pytest.mark.parametrize("mistake", MISTAKES)
def test_what_is_missing_or_ambiguous_is_one_line(tmp_path, capsys, mistake):
    files, named = MISTAKES[mistake]
    folder = write(tmp_path / "copy", files)
    with pytest.raises(SystemExit) as error:
        main(["prompts", "import", str(folder), "--out", str(tmp_path / "p.yaml")])
    message = capsys.readouterr().err
    assert error.value.code == 2 and named in message and message.count("\n") == 1
    assert not (tmp_path / "p.yaml").exists()


def test_wrong_paths_are_one_line(repository, tmp_path, capsys):
    (tmp_path / "old.yaml").write_text("mine")
    for path, out, named in [
        (tmp_path / "nowhere", "p.yaml", "no such file or folder"),
        (repository, "old.yaml", "is there already"),
        (repository, "p.txt", "has to end in .yaml"),
        (repository, "no/p.yaml", "no folder"),
    ]:
        with pytest.raises(SystemExit):
            main(["prompts", "import", str(path), "--out", str(tmp_path / out)])
        message = capsys.readouterr().err
        assert named in message and message.count("\n") == 1
    assert (tmp_path / "old.yaml").read_text() == "mine"


def test_files_that_import_each_other_end(tmp_path):
    files = {"quickstart.py": "from other import X\n" + EVALUATION, "other.py": "from quickstart import TEMPLATE\nX = 'x'"}
    assert texts(write(tmp_path / "copy", files))["answer"] == ours(SENTENCE)
