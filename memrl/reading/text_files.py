"""Read documents from text files."""

import os
import select
import stat
from pathlib import Path

from memrl.utils.plain_text import printable

LARGEST_TEXT = 2**28  # bytes; the longest documents of the benchmarks, 3.5 million tokens, have 20 MB
PIPE_S = 10.0  # without a byte from a pipe


def read_bytes(path: Path) -> bytes:
    """The bytes of a file, or of a pipe such as `<(pdftotext book.pdf -)`, at most LARGEST_TEXT.

    Raises:
        ValueError: it cannot be read, is a device, is larger, or is a pipe that says nothing.
    """
    # Without O_NONBLOCK a named pipe that no program writes to would block here.
    with open(path, "rb", buffering=0, opener=lambda name, flags: os.open(name, flags | os.O_NONBLOCK)) as file:
        mode, content = os.fstat(file.fileno()).st_mode, bytearray()
        if not stat.S_ISREG(mode) and not stat.S_ISFIFO(mode):
            raise ValueError("is a device; give a file")
        while True:
            if stat.S_ISFIFO(mode) and not select.select([file], [], [], PIPE_S)[0]:
                raise ValueError(f"is a pipe through which nothing came for {PIPE_S:g} s")
            part = file.read(2**24)  # None: nothing yet
            content += part or b""
            if len(content) > LARGEST_TEXT:
                raise ValueError(f"is larger than {LARGEST_TEXT >> 20} MiB; cut it into several files")
            if part == b"":
                return bytes(content)


def read_text(path: str | Path) -> str:
    """The text of a UTF-8 file, with line ends as newlines and without a byte order mark.

    Raises:
        ValueError: no such file, a folder, an empty file, or bytes that are not UTF-8 text; the message gives a remedy.
    """
    name = printable(str(path), 1000)
    try:
        content = read_bytes(Path(path))
    except IsADirectoryError:
        raise ValueError(f"{name} is a folder; give the files in it") from None
    except FileNotFoundError:
        raise ValueError(f"{name}: there is no such file") from None
    except OSError as error:
        raise ValueError(f"{name} cannot be read: {error.strerror}") from None
    except ValueError as error:
        raise ValueError(f"{name} {error}") from None
    if content.startswith((b"\xff\xfe", b"\xfe\xff")):
        raise ValueError(f"{name} is UTF-16 text; convert it: iconv -f UTF-16 -t UTF-8 {name} > NEW")
    if content.startswith(b"%PDF-"):
        raise ValueError(f"{name} is a PDF; extract its text first, for example with pdftotext")
    if (position := content.find(b"\0")) >= 0:
        raise ValueError(f"{name} is not a text file: it holds a zero byte at offset {position}")
    try:
        text = content.decode("utf-8-sig")
    except UnicodeDecodeError as error:
        byte = f"byte 0x{content[error.start]:02x} at offset {error.start}"
        raise ValueError(
            f"{name} is not UTF-8 text ({byte}); if it is text in an older encoding, convert it: "
            f"iconv -f WINDOWS-1252 -t UTF-8 {name} > NEW (or from ISO-8859-1, GB18030, SHIFT_JIS, ...)"
        ) from None
    if not text.strip():
        raise ValueError(f"{name} is empty")
    return text.replace("\r\n", "\n").replace("\r", "\n")
