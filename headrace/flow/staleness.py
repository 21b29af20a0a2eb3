"""What a rollout that is made a step ahead (rollout.staleness) does not go together with."""

from __future__ import annotations

from collections.abc import Sequence

from headrace.cluster.placement import Placement
from headrace.config import Config
from headrace.flow.graph import Stage
from headrace.roles.actor import Actor

KEY = "rollout.staleness"


def staleness_violations(ordered: Sequence[Stage], config: Config, placement: Placement) -> list[str]:
    """Violations of a flow that learns from what it generates; `ordered` are its stages in order."""
    makers = [s for s in ordered if s.spec.makes_rows]
    if not config.rollout.staleness or not makers:
        return []
    out: list[str] = []
    if config.algorithm.importance_weights == "off":
        out.append(
            f"{KEY}: the samples are of older weights than those that learn from them, and nothing corrects that; set"
            " algorithm.importance_weights, such as token_truncate"
        )
    if config.algorithm.filter_groups:
        out.append(
            f"{KEY}: algorithm.filter_groups decides by the rewards of a step whether more is generated for it, so its"
            " rollout cannot be made ahead; set one of them to its default"
        )
    if len(makers) > 1 or ordered[0] is not makers[0]:
        what = (
            "one of several"
            if len(makers) > 1
            else f"'{makers[0].name}', which comes after '{ordered[0].name}'"
        )
        out.append(f"{KEY}: only a rollout that is the flow's first stage can be made ahead, not {what}")
    return out + _placement_violations(makers[0], placement)


def _placement_violations(rollout: Stage, placement: Placement) -> list[str]:
    """Without devices of its own a rollout waits for the stages that it should run beside, or they for it."""
    if placement.world == 1 or "rollout" not in placement.roles:
        return []
    group = placement.roles["rollout"].group
    others = [name for name, role in placement.roles.items() if name != "rollout" and role.group == group]
    if not isinstance(rollout.role, Actor):
        return [
            f"{KEY}: stage '{rollout.name}' is a function, which runs on the actor's devices; only an actor's rollout"
            " can be made ahead on several devices"
        ]
    if others:
        return [
            f"{KEY}: the rollout shares the devices of group '{group}' with the {', '.join(others)}, so neither could"
            " work while the other does; give it a group of its own in cluster.layout, or set this to 0"
        ]
    return []
