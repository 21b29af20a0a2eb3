"""The policy that a checkpoint holds, as a model again: the checkpoint has what was trained, its base the rest."""

from __future__ import annotations

from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

import torch
from safetensors import SafetensorError

from headrace.checkpoint.fingerprint import weights_hash
from headrace.checkpoint.resume import Checkpoint, read_checkpoint, require_members
from headrace.checkpoint.save import STATE, CheckpointStore
from headrace.config import LoraConfig
from headrace.data.prompt_builder import use_chat_template
from headrace.errors import ConfigError
from headrace.models.adapter_folder import adapter_folder
from headrace.models.causal_lm import CausalLM
from headrace.models.find import find_model
from headrace.models.hf import load_causal_lm, load_tokenizer
from headrace.models.lora import add_adapters, check_same
from headrace.observe.run_dir import RunDirectory

KEY = "--checkpoint"
ROLE = "actor"
WEIGHT = "weight/"
DTYPES = {str(dtype): dtype for dtype in (torch.float32, torch.bfloat16)}


def checkpoint_of(run: RunDirectory, which: str) -> Checkpoint:
    """The checkpoint `which` of a run: the number of a step, "latest" or "best".

    Raises ConfigError naming those there are when it is none of them, and what is wrong with one that is damaged.
    """
    store = CheckpointStore(run.checkpoints, keep=0)
    steps = store.steps()
    there = f"; there are {', '.join(map(str, steps.values()))}" if steps else ""
    if not steps:
        raise ConfigError(
            f"{KEY}: the run '{run.path}' has no checkpoint; without {KEY} its final model is exported"
        )
    name: str | None
    if which in ("latest", "best"):
        name = store.pointer(which)
        if name is None:
            why = " (held-out data were never evaluated in training)" if which == "best" else ""
            raise ConfigError(f"{KEY}: the run '{run.path}' recorded no {which} checkpoint{why}{there}")
    elif which.removeprefix("step_").isdecimal():
        name = f"step_{int(which.removeprefix('step_'))}"
    else:
        raise ConfigError(f"{KEY}: expected the number of a step, latest or best, got '{which}'{there}")
    if name not in steps:
        raise ConfigError(f"{KEY}: the run '{run.path}' has no checkpoint {name}{there}")
    try:
        return read_checkpoint(store.folder / name)
    except ConfigError as error:
        others = ", ".join(str(step) for other, step in steps.items() if other != name)
        more = f"; others there are: {others}" if others else ""
        raise ConfigError([f"{KEY}: {problem}{more}" for problem in error.violations]) from error


def is_checkpoint(folder: Path) -> bool:
    """True for `<run>/checkpoints/step_N`."""
    return (folder / STATE).is_file() and folder.parent.name == "checkpoints"


@dataclass(frozen=True)
class TrainedPolicy:
    """A checkpoint's policy before its weights are read. `base` is the model, or adapter, that training began with."""

    checkpoint: Checkpoint
    base: str
    settings: dict[str, Any]

    @property
    def has_adapters(self) -> bool:
        return bool(self.settings["lora.rank"]) or adapter_folder(self.base, KEY) is not None

    @property
    def reads(self) -> tuple[Path, ...]:
        """What must not be replaced."""
        begun = adapter_folder(self.base, KEY)
        bases = [self.base] if begun is None else [self.base, begun.base]
        return (self.checkpoint.path.parents[1], *map(Path, bases))

    def load(self, *, masters: bool, trust_remote_code: bool) -> CausalLM:
        """The model on the CPU: what was trained as the checkpoint has it, what was frozen as the base stores it.

        The trained tensors have the dtype that the run computed in or, with `masters`, the optimizer's float32.
        Raises ConfigError when checkpoint and base do not belong together.
        """
        dtype = DTYPES[self.checkpoint.state["dtypes"][ROLE]]
        settings, trust = self.settings, trust_remote_code
        tokenizer = load_tokenizer(settings["model.tokenizer"] or self.base, trust, KEY)
        if settings["model.chat_template"] is not None:
            use_chat_template(tokenizer, settings["model.chat_template"])
        whole = not self.has_adapters
        dtype_of_load: torch.dtype | Literal["auto"] = "auto"
        if self.base.endswith(".gguf"):
            dtype_of_load = torch.float32
        elif whole:
            dtype_of_load = torch.float32 if masters else dtype
        model = load_causal_lm(
            self.base,
            key=KEY,
            dtype=dtype_of_load,
            tokenizer=tokenizer,
            trust_remote_code=trust,
            verify=False,
        )
        self._adapt(model)
        self._check_frozen(model, dtype)
        if whole:
            model.hf.to(torch.float32 if masters else dtype)
        self._fill(model, dtype, masters)
        return model

    def _adapt(self, model: CausalLM) -> None:
        lora = LoraConfig(**{name: self.settings[f"lora.{name}"] for name in LoraConfig.model_fields})
        if model.adapters is not None:
            check_same(model.adapters, lora, self.base)
        elif lora.rank:
            model.adapters = add_adapters(model.hf, lora, self.base)

    def _check_frozen(self, model: CausalLM, dtype: torch.dtype) -> None:
        expected = self.checkpoint.state["frozen"].get(ROLE)
        trained = {f"hf.{name}" for name in model.trained_parameters()}
        frozen = ((n, p.detach().to(dtype)) for n, p in model.named_parameters() if n not in trained)
        if expected is not None and weights_hash(frozen) != expected:
            raise ConfigError(
                f"{KEY}: '{self.base}' is not the base that the adapters in {self.checkpoint.path} were trained on (its"
                " weights differ); name that one by --base"
            )

    @torch.no_grad()
    def _fill(self, model: CausalLM, dtype: torch.dtype, masters: bool) -> None:
        path = self.checkpoint.path
        parameters = model.trained_parameters()
        try:
            with ExitStack() as files:
                saved = files.enter_context(self.checkpoint.tensors(ROLE))
                names = {name.removeprefix(WEIGHT) for name in saved if name.startswith(WEIGHT)}
                odd = sorted(names ^ parameters.keys())
                for name in names & parameters.keys():
                    value, parameter = saved[WEIGHT + name], parameters[name]
                    if value.shape != parameter.shape:
                        odd.append(name)
                    else:
                        parameter.data = value.float() if masters else value.to(dtype)
        except (OSError, SafetensorError, KeyError, ValueError) as error:
            raise ConfigError(f"{KEY}: {path} cannot be read ({error})") from error
        if odd:
            raise ConfigError(
                f"{KEY}: {path} does not fit '{self.base}' ({odd[0]} differs, {len(odd)} in all); name the model that the"
                " run started with by --base"
            )


def find_policy(source: str, which: str | None, base: str | None) -> TrainedPolicy:
    """The policy in a checkpoint of the run `source`, or in the checkpoint folder `source` (then `which` is None).

    `base` stands in for the model that the run's settings name. Raises ConfigError.
    """
    folder = Path(source).expanduser()
    if is_checkpoint(folder):
        if which is not None:
            raise ConfigError(f"{KEY}: '{source}' is a checkpoint itself; leave {KEY} out, or give the run")
        folder, which = folder.parents[1], folder.name
    run = RunDirectory(folder)
    if which is None or not run.config.is_file():
        raise ConfigError(f"{KEY}: '{source}' is not the directory of a run (no config.yaml in it)")
    checkpoint = checkpoint_of(run, which)
    require_members(checkpoint)
    if ROLE not in checkpoint.state["roles"]:
        have = ", ".join(checkpoint.state["roles"]) or "nothing that was trained"
        raise ConfigError(f"{KEY}: {checkpoint.path} holds no policy (but {have})")
    settings = checkpoint.state["fingerprint"]["settings"]
    named = base or settings["model.path"]
    if named is None:
        raise ConfigError(
            f"{KEY}: {checkpoint.path} does not say what model its run began with; name it by --base"
        )
    try:
        found = find_model(str(named), "--base" if base else KEY)
    except ConfigError as error:
        if base:
            raise
        raise ConfigError(
            f"{KEY}: the run began with the model '{named}', which is not there; name it by --base"
        ) from error
    return TrainedPolicy(checkpoint, found, settings)
