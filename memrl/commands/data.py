"""`memrl data`: build data sets of long documents from published questions; check, filter and convert data sets."""

from collections.abc import Sequence

from memrl.utils.command_line import dispatch

COMMANDS = {
    "hotpotqa": ("build_dataset:Hotpotqa.main", "HotpotQA questions on documents of any number of paragraphs or tokens"),
    "squad": ("build_dataset:Squad.main", "SQuAD questions on such documents"),
    "musique": ("build_dataset:Musique.main", "MuSiQue questions on such documents"),
    "ruler": ("build_dataset:Ruler.main", "the 13 RULER tasks at exact lengths in tokens"),
    "ruler_hotpotqa": ("build_dataset:RulerHotpotqa.main", "the same HotpotQA questions on documents of 50 to 25,600 paragraphs"),
    "needle": ("build_dataset:Needle.main", "a text file in the miniature's own language, to be read by `memrl infer`"),
    "filter": ("filter_dataset:Filter.main", "drop the questions that a model answers without the document"),
    "check": ("check_dataset:Check.main", "check a data set and print what is in it"),
    "convert": ("check_dataset:Convert.main", "write a data set in the other format"),
}


def main(arguments: Sequence[str] | None = None, prog: str = "memrl data") -> int:
    return dispatch(prog, "Build, check, filter and convert data sets.", COMMANDS, arguments)
