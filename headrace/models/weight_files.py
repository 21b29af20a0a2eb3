"""What is wrong with the weight files of a local model folder, as far as their headers tell: no weights are read."""

from __future__ import annotations

import json
from pathlib import Path

from headrace.errors import ConfigError
from headrace.models.adapter_folder import adapter_folder
from headrace.models.find import find_model
from headrace.models.shape import tensor_shapes

HEAD = "score.weight"


def weight_problems(path: str, key: str, *, needs_head: bool = False) -> list[str]:
    """Weight files that are absent, cut short or no safetensors, one sentence each naming `key`.

    Of an adapter folder its base is looked at. With `needs_head`, also the lack of a trained scalar head. Hub ids and
    .gguf files are not looked into. Raises ConfigError for a path that does not exist.
    """
    found = find_model(path, key)
    adapter = adapter_folder(found, key)
    folder = Path(found if adapter is None else adapter.base)
    if not folder.is_dir():
        return []
    try:
        names = _files(folder)
    except (OSError, ValueError, KeyError, TypeError, AttributeError) as error:
        return [f"{key}: the index of the weights in '{folder}' cannot be read ({error})"]
    if not names:
        if any(folder.glob("pytorch_model*.bin")):
            return []
        return [f"{key}: '{folder}' holds no weights (no model.safetensors)"]
    tensors: set[str] = set()
    problems = []
    for name in sorted(names):
        try:
            tensors.update(_whole(folder / name))
        except OSError as error:
            problems.append(f"{key}: '{folder / name}' cannot be read ({error.strerror})")
        except (ValueError, KeyError, TypeError, AttributeError):
            problems.append(
                f"{key}: '{folder / name}' is no whole safetensors file; download or copy it again"
            )
    if needs_head and adapter is None and not problems and HEAD not in tensors:
        problems.append(f"{key}: '{path}' has no trained scalar head (missing {HEAD})")
    return problems


def _files(folder: Path) -> set[str]:
    index = folder / "model.safetensors.index.json"
    if (folder / "model.safetensors").is_file():
        return {"model.safetensors"}
    if index.is_file():
        return set(json.loads(index.read_text(encoding="utf-8"))["weight_map"].values())
    return set()


def _whole(file: Path) -> set[str]:
    """The names of a file's tensors. Raises ValueError and others for a file that is shorter than its header says."""
    shapes = tensor_shapes(file)
    with file.open("rb") as opened:
        length = int.from_bytes(opened.read(8), "little")
        header = json.loads(opened.read(length))
    end = max((int(header[name]["data_offsets"][1]) for name in shapes), default=0)
    if file.stat().st_size < 8 + length + end:
        raise ValueError(f"{file}: cut short")
    return set(shapes)


def refuse_broken_weights(models: dict[tuple[str, str], bool]) -> None:
    """Raises ConfigError with every problem of `models`: whether a head is needed, by path and key."""
    problems = [
        problem
        for (path, key), needs_head in models.items()
        for problem in weight_problems(path, key, needs_head=needs_head)
    ]
    if problems:
        raise ConfigError(problems)
