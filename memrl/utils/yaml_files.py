"""Read YAML from elsewhere within bounds: settings, prompt files, an agent's settings in a model folder."""

from pathlib import Path

import yaml

from memrl.utils.files import read_bounded

YAML_BYTES = 2**20  # a run's settings have 5 kB, a prompt file 3 kB
MAX_NODES = 3000  # values and names, with those that aliases stand for; a run's settings have 150
MAX_DIGITS = 300  # of a whole number, as in JSON files


class _Loader(yaml.SafeLoader):
    """Counts the values while they are composed, those of an alias again, and refuses keys that stand twice.

    Without that, ten short lines of aliases ("billion laughs") would stand for 10^9 values.
    """

    def __init__(self, stream: str):
        super().__init__(stream)
        self.num_nodes, self._sizes = 0, dict[str, int]()

    def compose_node(self, parent, index):
        event, before = self.peek_event(), self.num_nodes
        anchor: str | None = getattr(event, "anchor", None)
        if anchor is not None and isinstance(event, yaml.AliasEvent) and anchor in self.anchors:
            self.num_nodes += self._sizes.get(anchor, MAX_NODES)  # without a size yet: the alias is inside of what it stands for
        self.num_nodes += 1
        if self.num_nodes > MAX_NODES:
            raise yaml.YAMLError(f"more than {MAX_NODES} values, or an alias of itself; an alias counts as what it stands for")
        node = super().compose_node(parent, index)
        if anchor is not None:
            self._sizes[anchor] = self.num_nodes - before
        return node

    def construct_yaml_int(self, node):
        if len(node.value) > MAX_DIGITS:  # also 1:1:1:..., base 60, whose evaluation takes quadratic time
            raise yaml.YAMLError(f"a number of {len(node.value)} characters")
        return super().construct_yaml_int(node)

    def construct_mapping(self, node, deep=False):
        seen = set()
        for key, _ in node.value:
            if isinstance(key, yaml.ScalarNode) and key.tag != "tag:yaml.org,2002:merge":
                if key.value in seen:
                    raise yaml.YAMLError(f"the key {key.value!r} stands twice")
                seen.add(key.value)
        return super().construct_mapping(node, deep)


_Loader.add_constructor("tag:yaml.org,2002:int", _Loader.construct_yaml_int)


def parse_yaml(text: str, source: str | Path) -> object:
    """The value of a YAML text; ValueError naming `source` if it is not YAML, or absurdly large or deep."""
    try:
        return yaml.load(text, Loader=_Loader)
    except RecursionError:
        raise ValueError(f"{source} is nested too deeply to be read") from None
    except (yaml.YAMLError, ValueError, ArithmeticError, LookupError, AttributeError, TypeError) as error:  # for bad values
        reason = " ".join(str(error).split())
        raise ValueError(f"{source} is not a YAML file: {reason[:200]}") from None


def read_yaml(path: str | Path) -> object:
    """The contents of a YAML file; ValueError naming the path if it is not one, or absurdly large or deep."""
    try:
        return parse_yaml(read_bounded(path, YAML_BYTES).decode("utf-8"), path)
    except UnicodeDecodeError as error:
        raise ValueError(f"{path} is not a YAML file: {error}") from None
