"""Append-only JSON lines files: what a kill can leave behind, and what reading makes of it."""

import pytest

from memrl.utils.journal import Journal, read_records


def records(journal: Journal) -> list[dict]:
    return list(journal.read("delete it"))


def test_what_is_appended_is_in_the_file_at_once(tmp_path):
    path = tmp_path / "a.jsonl"
    with Journal(path) as journal:
        journal.append({"a": "\u00e9"})
        journal.append(b'{"b": 1}\n')
        assert path.read_bytes() == b'{"a": "\\u00e9"}\n{"b": 1}\n'
        assert records(journal) == [{"a": "\u00e9"}, {"b": 1}]


@pytest.mark.parametrize("torn", [b'{"a": 2', b'{"a": 2}', b"\xe2\x82", b"\0\0"])
def test_a_torn_last_line_is_cut_off_and_the_next_line_follows(tmp_path, torn):
    path = tmp_path / "a.jsonl"
    path.write_bytes(b'{"a": 1}\n' + torn)
    with Journal(path) as journal:
        assert records(journal) == [{"a": 1}]
        journal.append({"a": 3})
    assert path.read_bytes() == b'{"a": 1}\n{"a": 3}\n'


@pytest.mark.parametrize("line", [b"{]", b"[1]", b"\xff", b"", b"[" * 100_000])
def test_a_damaged_line_is_named_and_nothing_is_cut(tmp_path, line):
    path = tmp_path / "a.jsonl"
    path.write_bytes(b'{"a": 1}\n' + line + b'\n{"a": 2}\n')
    before = path.read_bytes()
    with Journal(path) as journal, pytest.raises(ValueError, match=r"a\.jsonl: line 2 is damaged; delete it"):
        records(journal)
    assert path.read_bytes() == before


def test_lines_end_before_the_first_that_is_refused(tmp_path):
    path = tmp_path / "a.jsonl"
    path.write_bytes(b"1\n2\n3\n4\n")
    with Journal(path) as journal:
        assert list(journal.read_lines(lambda line: line < b"3")) == [b"1\n", b"2\n"]
        journal.append(b"5\n")
    assert path.read_bytes() == b"1\n2\n5\n"


def test_keeping_some_lines_leaves_their_bytes(tmp_path):
    path, link = tmp_path / "a.jsonl", tmp_path / "link.jsonl"
    path.write_bytes(b'{"step": 1,  "x": 1.50}\n{"step": 3}\nnot json\n{"step": 2}\n{"step": 1')
    link.symlink_to(path)
    before = path.read_bytes()
    with Journal(link) as journal:
        spare = journal.keep(lambda record: record["step"] <= 2)
        journal.append({"step": 3})
    assert link.is_symlink() and path.read_bytes() == b'{"step": 1,  "x": 1.50}\n{"step": 2}\n{"step": 3}\n'
    assert spare is not None and spare.name == "a.jsonl.damaged" and spare.read_bytes() == before
    assert sorted(entry.name for entry in tmp_path.iterdir()) == ["a.jsonl", "a.jsonl.damaged", "link.jsonl"]


def test_a_locked_journal_has_one_process_at_a_time(tmp_path):
    with Journal(tmp_path / "a.jsonl", "in use") as journal:
        journal.append({})
        with pytest.raises(ValueError, match=r"^in use$"):
            Journal(tmp_path / "a.jsonl", "in use")
    Journal(tmp_path / "a.jsonl", "in use").close()


def test_a_growing_file_is_read_without_its_torn_line_and_not_changed(tmp_path):
    path = tmp_path / "a.jsonl"
    path.write_bytes(b'{"a": 1}\n\n{"a": 2}\n{"a"')
    assert read_records(path) == [(1, {"a": 1}), (3, {"a": 2})]
    assert path.read_bytes().endswith(b'{"a"')
    path.write_bytes(b'{"a": 1}\n[2]\n')
    with pytest.raises(ValueError, match=r"a\.jsonl: line 2 is not a JSON object"):
        read_records(path)
