"""A user's file with a reward function or an agent, given as FILE.py:NAME: load the function, find the modules that it needs."""

import importlib.util
import inspect
import os
import sys
import zlib
from collections.abc import Callable
from modulefinder import ModuleFinder
from pathlib import Path
from types import ModuleType
from typing import Any

from memrl.utils.plain_text import one_line


def load_user_function(specification: str) -> tuple[Callable[..., Any], ModuleType]:
    """The function of `FILE.py:NAME` and its module; a ValueError gives the reason in one line if that fails.

    The file's folder becomes the first of `sys.path`, as Python does for a script.
    """
    path, _, name = specification.rpartition(":")
    if not path.endswith(".py") or not name:
        raise ValueError("write it as FILE.py:NAME")
    if not os.path.isfile(path):
        raise ValueError(f"there is no file {path}")
    path = os.path.abspath(path)
    if os.path.dirname(path) not in sys.path:
        sys.path.insert(0, os.path.dirname(path))
    module_name = os.path.basename(path).removesuffix(".py")
    if module_name in sys.modules and getattr(sys.modules[module_name], "__file__", None) != path:
        module_name = f"{module_name}_{zlib.crc32(path.encode()):x}"  # a user's json.py must not replace Python's own
    spec = importlib.util.spec_from_file_location(module_name, path)
    assert spec is not None and spec.loader is not None  # the name ends in .py
    module = importlib.util.module_from_spec(spec)
    sys.modules[module_name] = module
    try:
        spec.loader.exec_module(module)
    except KeyboardInterrupt:
        raise
    except BaseException as error:  # SystemExit too
        raise ValueError(f"importing the file raised {one_line(error)}") from error
    if not hasattr(module, name):
        functions = [key for key, value in vars(module).items() if inspect.isfunction(value)]
        raise ValueError(f"the file has no {name}; its functions are: {', '.join(functions) or 'none'}")
    function = getattr(module, name)
    if not callable(function) or inspect.isclass(function):
        raise ValueError(f"{name} is not a plain function")
    return function, module


def imported_files(script: Path) -> list[Path]:
    """The modules beside a script that it imports, directly or through others of them; nothing is run. Not memrl itself."""
    finder = ModuleFinder([str(script.resolve().parent)], excludes=["memrl"])
    finder.run_script(str(script.resolve()))
    files = (getattr(module, "__file__", None) for name, module in finder.modules.items() if name != "__main__")
    return sorted(Path(file) for file in files if file)
