"""Read documents from text files."""

from pathlib import Path

from memrl.utils.files import read_whole


def read_text(path: str | Path) -> str:
    """The text of a UTF-8 file, with line ends as newlines and without a byte order mark.

    Raises:
        ValueError: no such file, a folder, an empty file, or bytes that are not UTF-8 text; the message gives a remedy.
    """
    path = Path(path)
    if path.is_dir():
        raise ValueError(f"{path} is a folder; give the files in it")
    content = read_whole(path)
    if content.startswith((b"\xff\xfe", b"\xfe\xff")):
        raise ValueError(f"{path} is UTF-16 text; convert it: iconv -f UTF-16 -t UTF-8 {path} > NEW")
    if content.startswith(b"%PDF-"):
        raise ValueError(f"{path} is a PDF; extract its text first, for example with pdftotext")
    if (position := content.find(b"\0")) >= 0:
        raise ValueError(f"{path} is not a text file: it holds a zero byte at offset {position}")
    try:
        text = content.decode("utf-8-sig")
    except UnicodeDecodeError as error:
        byte = f"byte 0x{content[error.start]:02x} at offset {error.start}"
        raise ValueError(
            f"{path} is not UTF-8 text ({byte}); if it is text in an older encoding, convert it: "
            f"iconv -f WINDOWS-1252 -t UTF-8 {path} > NEW (or from ISO-8859-1, GB18030, SHIFT_JIS, ...)"
        ) from None
    if not text.strip():
        raise ValueError(f"{path} is empty")
    return text.replace("\r\n", "\n").replace("\r", "\n")
