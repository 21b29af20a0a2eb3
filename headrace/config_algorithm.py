"""The settings of the algorithm: a preset by name, and every key of it that can be set otherwise."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Literal, Self

from pydantic import model_validator

from headrace.config_presets import PRESETS
from headrace.config_section import Section, key


class AlgorithmConfig(Section):
    """Keys that are not set hold what the preset `name` gives them, else their default."""

    name: Literal[
        "grpo",
        "ppo",
        "dr_grpo",
        "dapo",
        "rloo",
        "remax",
        "reinforce_plus_plus",
        "reinforce_plus_plus_baseline",
        "gspo",
        "cispo",
        "policy_gradient",
    ] = key(
        "grpo", "preset: sets advantage, loss and other keys of this section that you do not set yourself"
    )
    advantage: str = key(
        "grpo",
        "advantage function: gae, grpo, rloo, remax, batch_mean, reinforce_plus_plus, reinforce_plus_plus_baseline,"
        " or one of your own",
    )
    loss: str = key(
        "ppo_clip", "token loss of the policy: ppo_clip, gspo, cispo, policy_gradient, or one of your own"
    )
    plugin: str | None = key(
        None, "path/to/file.py or package.module that registers your own advantages and losses"
    )
    normalize_std: bool = key(True, "grpo: divide a group's advantages by their standard deviation")
    gamma: float = key(1.0, "gae, reinforce_plus_plus: discount per token", ge=0, le=1)
    gae_lambda: float = key(0.95, "gae: lambda of generalised advantage estimation", ge=0, le=1)
    whiten_advantages: bool = key(
        True,
        "gae, reinforce_plus_plus and its baseline: shift and scale the step's advantages to mean 0, deviation 1",
    )
    clip_low: float = key(0.2, "lower clip: ratio >= 1 - clip_low", ge=0, le=1)
    clip_high: float = key(0.2, "upper clip: ratio <= 1 + clip_high", ge=0)
    dual_clip: float | None = key(
        None, "ppo_clip: bound c > 1 on the loss of negative advantages (default: off)", gt=1
    )
    reduction: Literal["token_mean", "sequence_mean", "sequence_mean_token_sum", "constant"] = key(
        "token_mean",
        "how token losses become one number; always over the whole update, never per micro-batch",
    )
    divisor_tokens: int | None = key(
        None,
        "reduction 'constant': divisor of every sequence's sum (default: rollout.max_new_tokens)",
        "tokens",
        ge=1,
    )
    kl_coefficient: float = key(
        0.0, "weight of the KL to the reference model; 0: no reference is loaded", ge=0
    )
    kl_estimator: Literal["k1", "k2", "k3"] = key(
        "k3", "estimator of the KL; k1-as-loss has no expected gradient"
    )
    kl_placement: Literal["loss", "reward"] = key(
        "loss", "add the KL to the loss, or subtract it from each token's reward"
    )
    kl_target: float | None = key(
        None,
        "adapt kl_coefficient, from step to step, until the KL per token is this (default: it stays as it is)",
        "nats",
        gt=0,
    )
    entropy_coefficient: float = key(0.0, "weight of the entropy bonus", ge=0)
    mask_truncated: bool = key(
        False, "leave responses cut at max_new_tokens out of the loss and of their group's baseline"
    )
    overlong_fraction: float = key(
        0.0,
        "last share of max_new_tokens over which a response's reward is lowered, from 0 to -1 at the limit; 0: off",
        ge=0,
        le=1,
    )
    filter_groups: bool = key(
        False, "drop prompts whose samples all got the same reward, and draw others in their place"
    )
    importance_weights: Literal[
        "off", "token_truncate", "token_mask", "sequence_truncate", "sequence_mask"
    ] = key(
        "off",
        "weigh the loss by trainer / rollout probability, of a token or of its whole response; above"
        " importance_cap the weight is cut to it (truncate) or is 0 (mask)",
    )
    importance_cap: float = key(2.0, "largest importance weight", ge=1)
    gap_warn: float = key(
        0.1, "warn when rollout and trainer log-probabilities differ by more on average", "nats", gt=0
    )
    gap_stop: float | None = key(
        None, "stop the run at this average difference (default: never)", "nats", gt=0
    )

    @model_validator(mode="after")
    def _fill_from_preset(self) -> Self:
        # past __setattr__: these are defaults, so they must not count as set (model_fields_set)
        preset = PRESETS[self.name]
        for name, field in type(self).model_fields.items():
            if name not in self.model_fields_set:
                self.__dict__[name] = preset.get(name, field.get_default())
        return self


def under_another_name(given: Mapping[str, Any], name: Any) -> dict[str, Any]:
    """The section of a file when `algorithm.name` is overridden with `name`.

    The file a run wrote has every key. Those that only repeat what its own preset gave are no wish of the user's and
    are left out, so that the new preset takes effect; a file written by hand keeps all it has.
    """
    before = given.get("name")
    if before == name or before not in [*PRESETS] or AlgorithmConfig.model_fields.keys() - given.keys():
        return dict(given)
    preset = AlgorithmConfig(name=before).model_dump()
    return {key: value for key, value in given.items() if value != preset[key]}
