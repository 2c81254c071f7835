"""Write docs/settings.md from the settings' classes: python docs/make_settings.py (memrl must be installed)."""

from dataclasses import MISSING, fields, is_dataclass
from pathlib import Path
from typing import Literal, get_args, get_origin, get_type_hints

from docstring_parser import parse_from_object

from memrl.config import TrainConfig
from memrl.reading.open_model import ReaderOptions
from memrl.utils.bounds import bounds_of

PAGE = Path(__file__).with_name("settings.md")
INTRO = """# Settings

Written from the code by `python docs/make_settings.py`; do not edit it. Training takes settings from `--config FILE` (YAML; of
several files, later ones override earlier ones) and from options such as `--rl.steps 200`; `memrl infer` and `memrl eval` take
options.
"""


def page() -> str:
    parts = [INTRO, "## Training", *tables(TrainConfig), "## The model that reads (infer, eval)", *tables(ReaderOptions)]
    return "\n".join(parts)


def tables(options: type, prefix: str = "") -> list[str]:
    """A table of a dataclass's own settings, then one per section."""
    meanings = {param.arg_name: param.description or "" for param in parse_from_object(options).params}
    hints = get_type_hints(options)
    lines = ["", "| setting | type | default | allowed | meaning |", "|---|---|---|---|---|"]
    sections = []
    for item in fields(options):
        default = item.default_factory() if item.default_factory is not MISSING else item.default
        if is_dataclass(default):
            heading = f"### `{item.name}`: {(type(default).__doc__ or '').rstrip('.')}"
            sections += [heading, *tables(type(default), f"{item.name}.")]
            continue
        kind = hints[item.name]
        allowed = ", ".join(map(str, get_args(kind))) if get_origin(kind) is Literal else str(bounds_of(item) or "")
        kind = "choice" if get_origin(kind) is Literal else kind.__name__ if isinstance(kind, type) else kind
        cells = (f"`{prefix}{item.name}`", str(kind), f"`{shown(default)}`", allowed, meanings[item.name])
        lines.append("| " + " | ".join(" ".join(cell.split()).replace("|", "\\|") for cell in cells) + " |")
    return [*lines, "", *sections]


def shown(value: object) -> str:
    """A default as YAML writes it."""
    return "null" if value is None else str(value).lower() if isinstance(value, bool) else str(value)


if __name__ == "__main__":
    PAGE.write_text(page(), encoding="utf-8")
