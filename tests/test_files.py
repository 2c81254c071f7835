"""Files that appear whole or not at all, and their fingerprints."""

import os
import secrets

import pytest

from memrl.utils.bounded_files import read_json
from memrl.utils.files import check_output, fingerprint, write_whole


def test_a_failed_write_leaves_the_old_file(tmp_path, monkeypatch):
    path = tmp_path / "results.json"
    write_whole(path, "old")

    def disk_is_full(descriptor):
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(os, "fsync", disk_is_full)
    with pytest.raises(OSError, match="No space"):
        write_whole(path, "new")
    assert path.read_text() == "old" and os.listdir(tmp_path) == ["results.json"]


def test_a_planted_link_is_not_followed_and_the_permissions_stay(tmp_path, monkeypatch):
    path, precious = tmp_path / "results.json", tmp_path / "precious"
    precious.write_text("mine")
    path.write_text("old")
    path.chmod(0o600)
    (tmp_path / ".results.json.new").symlink_to(precious)
    (tmp_path / ".results.json.guessed.new").symlink_to(precious)
    with monkeypatch.context() as patch:
        patch.setattr(secrets, "token_hex", lambda count: "guessed")
        with pytest.raises(FileExistsError):
            write_whole(path, "new")
    write_whole(path, "new")
    assert path.read_text() == "new" and path.stat().st_mode & 0o777 == 0o600
    assert precious.read_text() == "mine"


def test_a_new_file_has_the_usual_permissions_and_a_long_name_is_no_obstacle(tmp_path):
    path, usual = tmp_path / ("n" * 255), tmp_path / "usual"
    write_whole(path, "text")
    usual.touch()
    assert path.stat().st_mode == usual.stat().st_mode


def test_an_output_over_an_input_or_a_model_is_refused_under_every_name(tmp_path):
    model, elsewhere, question = tmp_path / "model", tmp_path / "elsewhere", tmp_path / "question.txt"
    for folder in (model, elsewhere):
        folder.mkdir()
    for name in ("config.json", "model.safetensors"):
        (model / name).write_text("{}")
    question.write_text("?")
    (tmp_path / "hard").hardlink_to(question)
    (tmp_path / "link").symlink_to(question)
    (elsewhere / "tokenizer.json").write_text("{}")
    for path in (question, tmp_path / "hard", tmp_path / "link", elsewhere / ".." / "question.txt"):
        with pytest.raises(ValueError, match="is an input or another output of this command; choose another name"):
            check_output(path, [question])
    with pytest.raises(ValueError, match="is an input"):  # neither exists yet
        check_output(tmp_path / "out.json", [elsewhere / ".." / "out.json"])
    with pytest.raises(ValueError, match="is an input"):
        check_output(elsewhere / "tokenizer.json", [elsewhere])
    with pytest.raises(ValueError, match="is a file in the model folder"):
        check_output(model / "config.json")
    check_output(model / "answers.json", [question])
    check_output(tmp_path / "out.json", [question, elsewhere, tmp_path / "missing"])


def test_links_stay_links_and_half_surrogates_are_escaped(tmp_path):
    target, link = tmp_path / "target", tmp_path / "link"
    target.write_text("old")
    link.symlink_to(target)
    write_whole(link, "caf\u00e9 \ud800\n")
    assert link.is_symlink() and target.read_text(encoding="utf-8") == "caf\u00e9 \\ud800\n"


def test_fingerprint_sees_contents_names_and_order_only(tmp_path):
    one, two = tmp_path / "one", tmp_path / "two"
    one.write_bytes(b"abc")
    two.write_bytes(b"abc")
    first = fingerprint([one, two])
    assert fingerprint([two, one]) != first
    one.write_bytes(b"abd")
    assert fingerprint([one, two]) != first
    one.write_bytes(b"abc")
    assert fingerprint([one, two]) == first


def test_fingerprint_of_a_large_file_sees_its_size_and_its_ends(tmp_path):
    path = tmp_path / "large"
    prints = set()
    for size, changed in ((70 * 2**20, None), (70 * 2**20, 5), (70 * 2**20, 70 * 2**20 - 2**19), (70 * 2**20 + 1, None)):
        with open(path, "wb") as file:
            file.truncate(size)
            if changed is not None:
                file.seek(changed)
                file.write(b"x")
        prints.add(fingerprint([path]))
    assert len(prints) == 4


@pytest.mark.parametrize(
    ("content", "reason"),
    [
        (b"{", "is not valid JSON"),
        (b"\xff", "is not valid JSON"),
        (b'{"a": 1, "a": 2}', "the key 'a' stands twice"),
        (b'{"a": ' + b"9" * 400 + b"}", "a number of 400 digits"),
        (b'{"a": ' + b"9" * 5000 + b"}", "a number of 5000 digits"),
        (b"[" * 100_000, "nested too deeply"),
        (b'{"a":' * 100_000, "nested too deeply"),
        (b" " * 1001, "larger than"),
    ],
)
def test_a_json_file_that_cannot_be_used_is_refused_by_name(tmp_path, content, reason):
    path = tmp_path / "a.json"
    path.write_bytes(content)
    with pytest.raises(ValueError, match=reason) as error:
        read_json(path, **({"limit": 1000} if reason == "larger than" else {}))
    assert str(error.value).startswith(str(path)) and len(str(error.value)) < 300


def test_json_is_read_from_regular_files_alone(tmp_path):
    os.mkfifo(tmp_path / "pipe")
    (tmp_path / "zero").symlink_to("/dev/zero")
    for name, reason in (
        ("pipe", "is a pipe or a device"),
        ("zero", "is a pipe or a device"),
        (".", "cannot be read: Is a directory"),
        ("none", "there is no such file"),
    ):
        with pytest.raises(ValueError, match=reason):
            read_json(tmp_path / name)


def test_json_with_large_but_real_values_is_read(tmp_path):
    path = tmp_path / "a.json"
    path.write_text('{"model_max_length": 1000000000000000019884624838656, "x": [[[[1.5, true, null]]]]}')
    assert read_json(path) == {"model_max_length": 1000000000000000019884624838656, "x": [[[[1.5, True, None]]]]}
