"""Where checkpoints lie, how one is written whole or not at all, and which are kept.

`checkpoints/step_N/` with `state.json` and the safetensors files of each trained role (parts.py); `latest` and `best` are
small files that hold the name of one. A checkpoint is written under a hidden name, synced and renamed; `latest` is
written last.
"""

from __future__ import annotations

import json
import logging
import os
import re
import shutil
import tempfile
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from headrace.checkpoint.files import sync_folder, write_text
from headrace.errors import RunError

logger = logging.getLogger(__name__)

FORMAT = 2
FORMATS = (1, FORMAT)
"""Those that can be read; in the first a role has one file, with whole tensors."""
STATE = "state.json"
_NAME = re.compile(r"step_(\d+)")
_REPLACED = ".replaced-"  # a checkpoint that another of the same step is just taking the place of
_DELETED = ".deleted-"


class CheckpointStore:
    """The folder `checkpoints/` of one run. Only one process may write to it (RunDirectory.locked)."""

    def __init__(self, folder: Path, keep: int, resumed: str | None = None) -> None:
        """`keep`: how many of the newest stay, besides the best. `resumed` names one never to delete."""
        self.folder = folder
        self.keep = keep
        self.resumed = resumed

    def steps(self) -> dict[str, int]:
        """Name → step of every checkpoint, in order of steps."""
        if not self.folder.is_dir():
            return {}
        found = ((p.name, _NAME.fullmatch(p.name)) for p in self.folder.iterdir() if p.is_dir())
        return dict(sorted(((n, int(m[1])) for n, m in found if m is not None), key=lambda item: item[1]))

    def pointer(self, name: str) -> str | None:
        """The checkpoint that `latest` or `best` names; None where there is no such file."""
        try:
            text = (self.folder / name).read_text(encoding="utf-8").strip()
        except (FileNotFoundError, NotADirectoryError):
            return None
        return text if _NAME.fullmatch(text) else None

    def clean(self) -> None:
        """Removes what a killed save or deletion left, and puts back a checkpoint it was about to replace."""
        if not self.folder.is_dir():
            return
        for path in sorted(self.folder.iterdir()):
            if path.name.startswith(_REPLACED):
                target = self.folder / path.name.removeprefix(_REPLACED)
                if not target.exists():
                    os.rename(path, target)
                    continue
            if path.name.startswith("."):
                logger.info("removing %s, left by a run that was killed", path)
                if path.is_dir() and not path.is_symlink():
                    shutil.rmtree(path)
                else:
                    path.unlink()

    def write(
        self,
        step: int,
        state: Mapping[str, Any],
        writers: Mapping[str, Callable[[Path], None]],
        best: int | None = None,
    ) -> Path:
        """Writes checkpoint `step_<step>`, then `latest` and `best`, then deletes those that are not kept.

        `state` is for JSON; `writers` maps a role to what writes its file, or its parts beside it, and returns when they
        are on the disk; `best` is the step of the best evaluation.
        Raises RunError naming path and cause when it cannot be written; earlier checkpoints and `latest` stay.
        """
        target = self.folder / f"step_{step}"
        try:
            self.folder.mkdir(parents=True, exist_ok=True)
            temporary = Path(tempfile.mkdtemp(prefix=f".{target.name}-", dir=self.folder))
            try:
                os.chmod(temporary, 0o755)
                self._fill(temporary, state, writers)
                self._put(temporary, target)
            finally:
                shutil.rmtree(temporary, ignore_errors=True)
            write_text(self.folder / "latest", target.name + "\n")
            if best is not None and (self.folder / f"step_{best}").is_dir():
                write_text(self.folder / "best", f"step_{best}\n")
            else:
                (self.folder / "best").unlink(missing_ok=True)
        except OSError as error:
            earlier = self.pointer("latest")
            stays = f"; the checkpoint before it, {earlier}, is still good" if earlier else ""
            raise RunError(
                f"{target}: the checkpoint cannot be written ({error.strerror or error}){stays}"
            ) from error
        self._delete_old(step)
        return target

    def _fill(
        self, folder: Path, state: Mapping[str, Any], writers: Mapping[str, Callable[[Path], None]]
    ) -> None:
        for role, write in writers.items():
            write(folder / f"{role}.safetensors")
        sizes = {file.name: file.stat().st_size for file in sorted(folder.glob("*.safetensors"))}
        text = json.dumps({"format": FORMAT, **state, "sizes": sizes}, indent=1)
        write_text(folder / STATE, text + "\n")

    def _put(self, temporary: Path, target: Path) -> None:
        """Between the two renames of a replacement the old one has a name that `clean` puts back."""
        replaced = target.with_name(_REPLACED + target.name)
        if target.exists():
            os.rename(target, replaced)
        os.rename(temporary, target)
        sync_folder(self.folder)
        if replaced.exists():
            shutil.rmtree(replaced)

    def _delete_old(self, step: int) -> None:
        """Steps after `step` are of a course that was left when the run was resumed from before them."""
        names = self.steps()
        newest = [n for n, s in names.items() if s <= step][-self.keep :]
        kept = {*newest, self.pointer("latest"), self.pointer("best"), self.resumed}
        for name in names.keys() - kept:
            hidden = self.folder / (_DELETED + name)
            try:
                os.rename(self.folder / name, hidden)
                shutil.rmtree(hidden)
            except OSError as error:
                logger.warning("%s: cannot be deleted (%s)", self.folder / name, error.strerror)
