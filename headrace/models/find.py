"""Where a model is: a folder or file here, else a hub id. Decided without loading anything."""

from __future__ import annotations

import socket
import urllib.parse
import urllib.request
from pathlib import Path

from headrace.errors import ConfigError

CONNECT_LIMIT_S = 10.0


def find_model(path: str, key: str = "model.path") -> str:
    """`path` as it can be loaded: an existing folder or file, else a hub id.

    Raises ConfigError naming `key` for what is neither: the path of a folder that is not here, or a hub id that is
    not in the local cache while the hub cannot be reached.
    """
    local = Path(path).expanduser()
    if local.exists():
        _refuse_checkpoint(local, key)
        return str(local)
    parts = Path(path).parts
    is_path = path.endswith(".gguf") or path[:1] in tuple("/.~\\") or len(parts) > 2
    if is_path or (len(parts) == 2 and Path(parts[0]).is_dir()):
        raise ConfigError(f"{key}: '{path}' does not exist (looked in {Path.cwd()})")
    from huggingface_hub import constants, try_to_load_from_cache
    from huggingface_hub.errors import HFValidationError

    names = ("config.json", "tokenizer_config.json")
    try:
        cached = any(isinstance(try_to_load_from_cache(path, name), str) for name in names)
    except HFValidationError as error:
        raise ConfigError(
            f"{key}: there is no folder '{path}' here (looked in {Path.cwd()}), and it is no hub id either"
        ) from error
    if not cached and (constants.HF_HUB_OFFLINE or not reachable(constants.ENDPOINT)):
        raise ConfigError(
            f"{key}: there is no folder '{path}' here (looked in {Path.cwd()}), and as a hub id it is not in the local"
            f" cache and {constants.ENDPOINT} cannot be reached"
        )
    return path


def _refuse_checkpoint(folder: Path, key: str) -> None:
    """A checkpoint has the trained weights and no model around them."""
    if (folder / "state.json").is_file() and not (folder / "config.json").is_file():
        run, step = folder.parent.parent, folder.name.removeprefix("step_")
        raise ConfigError(
            f"{key}: '{folder}' is a checkpoint of a run, not a model; write it as one first: headrace export {run} MODEL"
            f" --checkpoint {step}"
        )
    inner = folder / "model"
    if (folder / "config.yaml").is_file() and (folder / "metrics.jsonl").is_file() and key != "export":
        raise ConfigError(
            f"{key}: '{folder}' is the directory of a run; "
            + (
                f"its model is '{inner}'"
                if inner.is_dir()
                else "it saved no model (headrace export --checkpoint)"
            )
        )


def reachable(url: str) -> bool:
    """False where no connection can be made; this saves the hub client's minute of retries."""
    parts = urllib.parse.urlsplit(url)
    if urllib.request.getproxies() or parts.hostname is None:
        return True  # the client knows the way; let it try
    port = parts.port or (80 if parts.scheme == "http" else 443)
    try:
        socket.create_connection((parts.hostname, port), timeout=CONNECT_LIMIT_S).close()
    except OSError:
        return False
    return True
