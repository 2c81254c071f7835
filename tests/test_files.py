"""Files that appear whole or not at all, and their fingerprints."""

import os

import pytest

from memrl.utils.files import fingerprint, write_whole


def test_a_failed_write_leaves_the_old_file(tmp_path, monkeypatch):
    path = tmp_path / "results.json"
    write_whole(path, "old")

    def disk_is_full(descriptor):
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(os, "fsync", disk_is_full)
    with pytest.raises(OSError, match="No space"):
        write_whole(path, "new")
    assert path.read_text() == "old"


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
