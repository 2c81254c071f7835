"""`python -m memrl.data musique`: MuSiQue questions on long documents."""

import argparse

from memrl.data.commands.hotpotqa import add_documents_command


def add_command(commands: argparse._SubParsersAction) -> None:
    add_documents_command(commands, "musique", "MuSiQue", ".jsonl or .jsonl.gz; questions without an answer are left out")
