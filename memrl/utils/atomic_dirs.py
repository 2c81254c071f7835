"""Replace whole folders: at every moment the new or the old one is complete, under its own name or the old one's."""

import shutil
from pathlib import Path

from memrl.utils.files import link_or_copy, sync_path, sync_tree


def swap_in(fresh: Path, target: Path) -> None:
    """Rename the finished folder `fresh`, flushed to the disk by the caller, to `target`, which is replaced if it exists."""
    old = aside(target, "old")
    if target.exists():
        remove(old)
        target.rename(old)
    try:
        fresh.rename(target)
    except OSError:
        if old.exists():
            old.rename(target)
        raise
    sync_path(target.parent)
    remove(old)


def remove(path: Path) -> None:
    """Delete a folder; of a link only the link, so that what someone planted there leads nowhere."""
    if path.is_symlink() or path.is_file():
        path.unlink()
    else:
        shutil.rmtree(path, ignore_errors=True)


def finish_swap(target: Path) -> None:
    """Finish or undo a `swap_in` that was killed, and delete unfinished folders."""
    fresh, old = aside(target, "new"), aside(target, "old")
    if old.exists() and not target.exists():
        old.rename(target)
    for leftover in (fresh, old, aside(fresh, "new")):  # the last is from a writer that itself swaps
        remove(leftover)


def aside(target: Path, state: str) -> Path:
    """Temporary name beside `target`: of its replacement ("new"), or of the folder that it replaces ("old")."""
    return target.with_name(f".{target.name}.{state}")


def publish(source: Path, target: Path) -> None:
    """Make `target` the same folder as `source`, by hard links, or by copies if the disk has no hard links."""
    if target.is_dir() and _listing(source) == _listing(target):
        return
    fresh = aside(target, "new")
    remove(fresh)
    shutil.copytree(source, fresh, copy_function=link_or_copy)
    sync_tree(fresh)
    swap_in(fresh, target)


def _listing(folder: Path) -> dict[str, tuple[int, int]]:
    """Size and time of each file: the same for a hard link, and for a copy by `shutil.copy2`."""
    found = ((path, path.stat()) for path in folder.rglob("*") if path.is_file())
    return {str(path.relative_to(folder)): (stat.st_size, stat.st_mtime_ns) for path, stat in found}
