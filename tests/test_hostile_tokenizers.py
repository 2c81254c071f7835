"""Chat templates and regular expressions of a checkpoint end in one line, within bounds of time and memory."""

import json
import time
from pathlib import Path

import pytest

import memrl.tokenizer.hf_tokenizer
import memrl.tokenizer.tokenizer_json
from memrl.prompts import PromptTemplate
from memrl.tokenizer import Tokenizer, chat_template, load_tokenizer
from memrl.tokenizer.deadline import within
from tests.test_tokenizer import SMOLLM, byte_level_folder, character_tokenizer

TEMPLATES = {
    "divides": ("{{ 1 / 0 }}", "division by zero"),
    "calls itself": ("{% macro f() %}{{ f() }}{% endmacro %}{{ f() }}", "recursion"),
    "eats memory": ("{{ messages[0].content * 10**10 }}", "512 MiB"),
    "writes without end": ("{% for i in range(99999) %}{{ 'a' * 4000 }}{% endfor %}", "more than"),
    "imports": ("{% import 'os' as os %}{{ os }}", "no loader"),
    "reaches for attributes": ("{{ ''.__class__.__mro__[1].__subclasses__() }}", "unsafe"),
    "is nested deeply": ("{{ " + "(" * 20000, "recursion"),
    "is no template": ("{% if %}", "Expected"),
    "refuses": ("{{ raise_exception('no\nsystem\nmessages') }}", "no system messages"),
    "is a number": (5, "not a text"),
    "is a list": ([["a"]], "not a text"),
    "is one of several": ({"tool_use": "a"}, "default"),
}


@pytest.mark.parametrize("name", TEMPLATES)
def test_a_chat_template_that_fails_is_named_in_one_line(name):
    tokenizer = character_tokenizer()
    tokenizer.hf.chat_template, reason = TEMPLATES[name]
    with pytest.raises(ValueError, match=reason) as caught:
        PromptTemplate("read {question}", tokenizer)
    assert str(caught.value).startswith("the chat template fails: ") and "\n" not in str(caught.value)


def test_a_chat_template_that_takes_too_long_is_stopped(monkeypatch):
    monkeypatch.setattr(chat_template, "CPU_SECONDS", 1)
    tokenizer = character_tokenizer()
    tokenizer.hf.chat_template = "{% for i in range(99999) %}{% for j in range(99999) %}{% endfor %}{% endfor %}"
    began = time.process_time()
    with pytest.raises(ValueError, match="more than 1 s"):
        tokenizer.render_chat("hi")
    assert time.process_time() - began < 1, "the time passes in another process"


def test_a_chat_template_is_rendered_once_per_prompt(monkeypatch):
    tokenizer = character_tokenizer()
    first = tokenizer.render_chat("hi"), tokenizer.render_chat("hi", "be brief")
    monkeypatch.setattr(chat_template, "subprocess", None)
    assert (tokenizer.render_chat("hi"), tokenizer.render_chat("hi", "be brief")) == first


def test_chat_templates_render_as_in_transformers(tmp_path, monkeypatch):
    (tmp_path / "jinja2.py").write_text("raise SystemExit('the current folder was searched')")
    monkeypatch.chdir(tmp_path)
    hf = character_tokenizer().hf
    hf.chat_template = """
    {%- set ns = namespace(seen=0) %}
    {%- if tools is not none or documents is not none or date is defined %}never{% endif %}
    {% for m in messages if m.role != 'x' %}
        {%- if loop.index > 2 %}{% break %}{% endif %}
        {%- set ns.seen = ns.seen + 1 %}
<|im_start|>{{ m.role | upper }} {{ m | tojson }} {{ strftime_now('%Y') }} {{ ns.seen }} {{ dict(a=1) }}
        {% generation %}{{ m.content }}{% endgeneration %}

    {% endfor %}
{{ eos_token }}{{ pad_token }}{% if add_generation_prompt %}<|im_start|>assistant
{% endif %}"""
    for system in (None, "brief"):
        messages = [{"role": "system", "content": system}] * bool(system) + [{"role": "user", "content": "a\n é東 <b>\n"}]
        expected = hf.apply_chat_template(messages, tokenize=False, add_generation_prompt=True)
        assert Tokenizer(hf).render_chat("a\n é東 <b>\n", system) == expected


def regex_folder(folder: Path, **where: str) -> Path:
    """A tokenizer whose step `where` splits or replaces by a regular expression."""
    byte_level_folder(folder, *SMOLLM)
    file = folder / "tokenizer.json"
    rules = json.loads(file.read_text())
    for name, pattern in where.items():
        if name == "pre_tokenizer":
            step = {"type": "Split", "pattern": {"Regex": pattern}, "behavior": "Isolated", "invert": False}
            rules[name] = {"type": "Sequence", "pretokenizers": [step, rules[name]]}
        else:
            rules[name] = {"type": "Replace", "pattern": {"Regex": pattern}, "content": "-"}
    file.write_text(json.dumps(rules))
    return folder


@pytest.mark.parametrize("where", ["pre_tokenizer", "normalizer"])
def test_a_regular_expression_that_never_ends_is_given_up(where, tmp_path, monkeypatch):
    tokenizer = load_tokenizer(regex_folder(tmp_path, **{where: "(a+)+$"}))
    assert tokenizer.decode(tokenizer.encode("an answer")) == "an answer"
    monkeypatch.setattr(memrl.tokenizer.hf_tokenizer, "_ENCODE_SECONDS", 0.1)
    for _ in range(2):  # the second time at once: the first call still runs
        with pytest.raises(ValueError, match=rf"{tmp_path} is stuck in a regular expression"):
            tokenizer.encode(("a" * 19 + "b") * 200)  # it ends after a second or two


def test_a_panic_of_the_library_is_a_value_error(monkeypatch):
    class PanicException(BaseException):
        pass

    def panic(*_, **__):
        raise PanicException("retry-limit-in-match over\nmore")

    tokenizer = character_tokenizer()
    monkeypatch.setattr(tokenizer, "_documents", type("Broken", (), {"encode_batch_fast": panic}))
    with pytest.raises(ValueError, match=r"fails on this text: retry-limit-in-match over$"):
        tokenizer.encode("a")
    monkeypatch.setattr(tokenizer, "_documents", type("Stopped", (), {"encode_batch_fast": interrupted}))
    with pytest.raises(KeyboardInterrupt):
        tokenizer.encode("a")


def interrupted(*_, **__):
    raise KeyboardInterrupt


def test_usual_expressions_get_no_thread_of_their_own(tmp_path, monkeypatch):
    llama3 = memrl.tokenizer.tokenizer_json._USUAL_REGEX.replace(r"\p{N}|", r"\p{N}{1,3}|")
    usual = load_tokenizer(regex_folder(tmp_path, pre_tokenizer=llama3))
    monkeypatch.setattr(memrl.tokenizer.hf_tokenizer, "within", None)
    assert usual.decode(usual.encode("It's 12345 items")) == "It's 12345 items"


def test_within_returns_raises_and_gives_up():
    assert within(5, lambda: "x") == "x"
    with pytest.raises(KeyError):
        within(5, lambda: {}["x"])
    with pytest.raises(TimeoutError, match=r"0\.01 s"):
        within(0.01, lambda: time.sleep(0.3))


@pytest.mark.parametrize("name", ["tokenizer.json", "tokenizer_config.json", "special_tokens_map.json", "generation_config.json"])
@pytest.mark.parametrize("content", ["[" * 200_000, '{"a":' * 200_000, '{"a": 1e999999', "\0" * 100, "[]", "null"])
def test_a_broken_file_is_named_in_one_line(name, content, tmp_path):
    byte_level_folder(tmp_path, *SMOLLM)
    (tmp_path / name).write_text(content)
    try:
        assert isinstance(load_tokenizer(tmp_path), Tokenizer)  # a list or null may stand for a file that is not there
    except ValueError as error:
        assert str(tmp_path) in str(error) and "\n" not in str(error)


def test_a_file_too_large_for_a_tokenizer_is_not_read(tmp_path):
    byte_level_folder(tmp_path, *SMOLLM)
    with open(tmp_path / "merges.txt", "wb") as file:
        file.truncate(2**40)
    with pytest.raises(ValueError, match=r"merges\.txt has 1,099,511,627,776 bytes"):
        load_tokenizer(tmp_path)
