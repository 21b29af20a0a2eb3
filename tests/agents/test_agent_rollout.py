"""Episodes of several turns on a scripted engine: ids, masks, rewards and ends, exactly."""

from __future__ import annotations

import asyncio
import copy
import math
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import pytest
import torch
from characters import CHATML, make_tokenizer
from hypothesis import given, settings
from hypothesis import strategies as st

from headrace.agents.environment import Environment, Step
from headrace.agents.rollout import AgentRollout
from headrace.agents.turn_format import TurnFormat
from headrace.config import Config
from headrace.config_load import from_mapping
from headrace.data.batch import Batch
from headrace.errors import AgentError
from headrace.observe.metrics import MetricSums
from headrace.rollout.engine import Completion, Request, SamplingParams
from headrace.stages import StageContext

CHARACTERS = make_tokenizer()


def ids_of(text: str) -> list[int]:
    return list(CHARACTERS(text, add_special_tokens=False)["input_ids"])


def text_of(ids: Sequence[int]) -> str:
    return CHARACTERS.decode(ids)


class Scripted:
    """Says what the script has for (prompt id, sample, turn), cut at the request's limit; keeps what it was fed."""

    def __init__(self, script: Mapping[tuple[int, int, int], str]) -> None:
        self.script = script
        self.fed: dict[tuple[int, int, int], list[int]] = {}
        self.requests: list[list[Request]] = []

    def generate(
        self, requests: Sequence[Request], sampling: SamplingParams, on_progress: Any = None
    ) -> list[list[Completion]]:
        self.requests.append(list(requests))
        return [[self._one(request, seed, sampling) for seed in request.seeds] for request in requests]

    def _one(self, request: Request, seed: int, sampling: SamplingParams) -> Completion:
        who = (seed // 100, seed // 10 % 10, seed % 10)
        self.fed[who] = list(request.prompt_ids)
        wanted = ids_of(self.script[who])
        ids = wanted[: request.limit(sampling)]
        logprobs = [-(seed % 100) - i / 8 for i in range(len(ids))]
        reason = "stop" if len(ids) == len(wanted) else "length"
        return Completion(ids, logprobs, [x - 1 for x in logprobs], reason, [0] * len(ids))


def play(
    environment: Callable[[], Environment],
    script: Mapping[tuple[int, int, int], str],
    prompts: Sequence[str] = ("2+2=",),
    *,
    samples: int = 1,
    chat: bool = False,
    sampling: SamplingParams | None = None,
    evaluation: bool = False,
    on_progress: Callable[[float], None] = lambda fraction: None,
    columns: Mapping[str, list[Any]] | None = None,
    **agent: Any,
) -> tuple[Batch, Scripted, dict[str, float]]:
    tokenizer = make_tokenizer()
    if chat:
        tokenizer.chat_template = CHATML
    config: Config = from_mapping({"agent": agent, "data": {"max_prompt_tokens": 60}})
    rollout = AgentRollout(
        environment, config, tokenizer, end_ids=ids_of("<eos><|im_end|>"), max_sequence_tokens=100
    )
    engine, context = Scripted(script), StageContext(config, 3, 9, MetricSums(), evaluation=evaluation)
    context.on_progress = on_progress
    rows = Batch(
        [0] * len(prompts),
        rows={
            "prompt": list(prompts),
            "prompt_ids": [tuple(ids_of(p)) for p in prompts],
            "prompt_id": torch.arange(len(prompts)),
            **(columns or {}),
        },
    )
    out = rollout.generate(
        engine,
        rows,
        samples,
        sampling or SamplingParams(max_new_tokens=40),
        lambda prompt_id, sample, turn: prompt_id * 100 + sample * 10 + turn,
        context,
    )
    return out, engine, context.metrics.means()


class Says(Environment):
    """Answers from a list of steps, and keeps what was said and when it was closed."""

    steps: Sequence[Any] = ()
    made: list[Says] = []  # noqa: RUF012

    def __init__(self) -> None:
        self.heard: list[str] = []
        self.closed = 0
        self.made.append(self)

    def step(self, response: str) -> Step:
        self.heard.append(response)
        step = self.steps[len(self.heard) - 1]
        if isinstance(step, BaseException):
            raise step
        return step

    def close(self) -> None:
        self.closed += 1


def says(*steps: Any, **attributes: Any) -> type[Says]:
    return type("Answers", (Says,), {"steps": steps, "made": [], **attributes})


SCRIPT = {(0, 0, 0): "<3*4>", (0, 0, 1): "+1=", (0, 0, 2): "13<eos>"}


def test_ids_masks_logprobs_and_rewards_are_exact() -> None:
    environment = says(
        Step("12", reward=0.5, metrics={"calls": 1}),
        Step("13\n", reward=-0.25, metrics={"calls": 2}),
        Step(done=True, reward=1),
    )
    rows, _, metrics = play(environment, SCRIPT)
    assert text_of(rows["input_ids"].tolist()) == "2+2=<3*4>12+1=13\n13<eos>"
    sampled = "".join("s" if own else "." for own in rows["response_mask"].tolist())
    assert sampled == "....sssss..sss...sss"
    expected = [0.0] * 4 + [-i / 8 for i in range(5)] + [0.0] * 2 + [-1, -1.125, -1.25]
    expected += [0.0] * 3 + [-2, -2.125, -2.25]
    assert rows["rollout_logprobs"].tolist() == expected
    # each turn's reward stands at its last sampled token
    assert {i: r for i, r in enumerate(rows["turn_rewards"].tolist()) if r} == {8: 0.5, 13: -0.25, 19: 1.0}
    assert rows["environment_reward"].tolist() == [1.25]
    assert (rows["completion"], rows["finish_reason"]) == (["13"], ["stop"])
    assert rows["completion_ids"] == [ids_of("<3*4>+1=13<eos>")]
    assert (rows["num_tokens"].tolist(), rows["num_turns"].tolist()) == ([11], [3])
    assert rows["episode"] == [
        [
            {"role": "assistant", "content": "<3*4>"},
            {"role": "environment", "content": "12"},
            {"role": "assistant", "content": "+1="},
            {"role": "environment", "content": "13\n"},
            {"role": "assistant", "content": "13"},
        ]
    ]
    assert environment.made[0].heard == ["<3*4>", "+1=", "13"]
    assert environment.made[0].closed == 1
    assert metrics["agent/turns_mean"] == 3
    assert metrics["agent/environment_tokens_mean"] == 5
    assert metrics["agent/part/calls"] == 3
    assert metrics["agent/reward_mean"] == 1.25
    assert "rollout_untruncated_logprobs" not in rows
    filtered, _, _ = play(environment, SCRIPT, sampling=SamplingParams(max_new_tokens=40, top_k=5))
    free = [x - (own == "s") for x, own in zip(expected, sampled, strict=True)]
    assert filtered["rollout_untruncated_logprobs"].tolist() == free


turn_texts = st.lists(st.text(alphabet="0123+=<>", min_size=1, max_size=6), min_size=1, max_size=4)


@settings(max_examples=60, deadline=None)
@given(st.lists(turn_texts, min_size=1, max_size=4), turn_texts, st.booleans())
def test_every_turn_is_fed_all_ids_of_the_turns_before(
    spoken: list[list[str]], answers: list[str], chat: bool
) -> None:
    """Never decoded and encoded again: what is trained on is what was fed."""
    script = {
        (0, sample, turn): text + ("<|im_end|>" if chat else "")
        for sample, texts in enumerate(spoken)
        for turn, text in enumerate([*texts, *["0"] * 4])
    }
    steps = [Step(text) for text in [*answers, *["1"] * 4]]
    sampling = SamplingParams(max_new_tokens=60)
    rows, engine, _ = play(
        says(*steps), script, ("3=",), samples=len(spoken), chat=chat, sampling=sampling, max_turns=4
    )
    for sample in range(len(spoken)):
        ids = rows.row_values("input_ids", sample).tolist()
        mask = rows.row_values("response_mask", sample).tolist()
        turns = int(rows["num_turns"][sample])
        fed = [engine.fed[0, sample, turn] for turn in range(turns)]
        assert fed[0] == ids_of("3=")
        for before, after in zip(fed, [*fed[1:], ids], strict=True):
            assert after[: len(before)] == before
        said = [ids_of(script[0, sample, turn]) for turn in range(turns)]
        for before, own in zip(fed[:-1], said, strict=False):
            assert ids[len(before) : len(before) + len(own)] == own
            assert all(mask[len(before) : len(before) + len(own)])
        assert [t for t, own in zip(ids, mask, strict=True) if own] == rows["completion_ids"][sample]
        assert len(ids) <= 2 + 60
        assert mask[-1]


def test_chat_turns_are_those_of_the_template() -> None:
    script = {(0, 0, 0): "3*4?<|im_end|>", (0, 0, 1): "13"}
    rows, _, _ = play(
        says(Step("12"), Step(done=True)),
        script,
        ("P",),
        chat=True,
        sampling=SamplingParams(max_new_tokens=60),
    )
    assert text_of(rows["input_ids"].tolist()) == (
        "P3*4?<|im_end|>\n<|im_start|>user\n12<|im_end|>\n<|im_start|>assistant\n13"
    )


@pytest.mark.parametrize(
    ("limit", "max_turns", "text", "end"),
    [
        (40, 3, "2+2=<3*4>12+1=13\n13<eos>", "max_turns"),  # the environment would go on
        (40, 2, "2+2=<3*4>12+1=", "max_turns"),
        (4, 8, "2+2=<3*4", "length"),
        (5, 8, "2+2=<3*4>", "length"),  # no room for the environment's text
        (7, 8, "2+2=<3*4>", "length"),  # nor for a token after it
        (8, 8, "2+2=<3*4>12+", "length"),
        (10, 8, "2+2=<3*4>12+1=", "length"),
    ],
)
def test_the_ends_of_an_episode(limit: int, max_turns: int, text: str, end: str) -> None:
    """rollout.max_new_tokens bounds all that follows the prompt."""
    environment = says(Step("12"), Step("13\n"), Step("never read"))
    rows, _, _ = play(environment, SCRIPT, sampling=SamplingParams(max_new_tokens=limit), max_turns=max_turns)
    assert text_of(rows["input_ids"].tolist()) == text
    assert rows["finish_reason"] == [end]
    assert len(environment.made[0].heard) == rows["num_turns"].item()


def test_siblings_share_a_request_while_they_have_seen_the_same() -> None:
    script = {(0, s, t): text for s in range(3) for t, text in enumerate(["a" if s < 2 else "b", "c"])}
    rows, engine, _ = play(says(Step("!"), Step(done=True)), script, samples=3)
    assert [[r.seeds for r in turn] for turn in engine.requests] == [[(0, 10, 20)], [(1, 11), (21,)]]
    assert rows["group_id"].tolist() == [0, 0, 0]
    assert rows["sample_index"].tolist() == [0, 1, 2]


def test_reset_sees_its_row_and_may_give_another_prompt() -> None:
    seen: list[dict[str, Any]] = []

    class Begins(Says):
        made: list[Says] = []  # noqa: RUF012
        steps = (Step(done=True),)

        def reset(self, row: Mapping[str, Any]) -> Any:
            seen.append(copy.deepcopy(dict(row)))
            row["things"].append("changed")
            return [{"role": "user", "content": "Go"}] if row["prompt_id"] == 1 else None

    script = {(p, s, 0): "x" for p in range(2) for s in range(2)}
    rows, _, _ = play(
        Begins, script, ("2+2=", "3+3="), samples=2, chat=True, columns={"things": [["a"], ["b"]]}
    )
    assert seen[1] == {"prompt": "2+2=", "prompt_id": 0, "sample_index": 1, "things": ["a"]}
    assert rows["things"] == [["a"], ["a"], ["b"], ["b"]]  # what a user's code did to its copy stays there
    rendered = "<|im_start|>user\nGo<|im_end|>\n<|im_start|>assistant\n"
    assert rows["prompt"] == ["2+2=", "2+2=", rendered, rendered]
    assert text_of(rows.row_values("input_ids", 3).tolist()) == rendered + "x"


def test_async_environments_answer_together() -> None:
    waiting = asyncio.Semaphore(0)

    class Meets(Says):
        made: list[Says] = []  # noqa: RUF012

        async def step(self, response: str) -> Step:  # type: ignore[override]
            if response == "a":
                await waiting.acquire()  # returns only while the other runs
            else:
                waiting.release()
            return Step(done=True, reward=1)

        async def close(self) -> None:  # type: ignore[override]
            self.closed += 1

    rows, _, _ = play(Meets, {(0, 0, 0): "a", (0, 1, 0): "b"}, samples=2, timeout_s=5)
    assert rows["environment_reward"].tolist() == [1.0, 1.0]
    assert [e.closed for e in Meets.made] == [1, 1]


@pytest.mark.parametrize(
    ("steps", "said"),
    [
        ([ValueError("no such page")], "step raised ValueError: no such page"),
        ([SystemExit("usage")], "step raised SystemExit: usage"),
        (["text"], "step returned a str; wanted a Step"),
        ([Step(3)], "the text of a Step must be a text, or a list"),  # type: ignore[arg-type]
        ([Step({"a": "b"})], "the text of a Step must be a text, or a list"),  # type: ignore[arg-type]
        ([Step(["a", "\ud800"])], "the text of a Step holds half a character"),
        ([Step(done="no")], "the done of a Step must be true or false, not 'no'"),  # type: ignore[arg-type]
        ([Step(reward=math.nan)], "its 'reward' is nan"),
        ([Step(reward="1")], "its 'reward' is '1', a str"),
        ([Step([])], "a list of at least one"),
        ([Step(3)], "the text of a Step must be a text"),  # type: ignore[arg-type]
        ([Step(metrics=[1])], "must be a dict, not a list"),
    ],
)
def test_an_error_stops_the_run_and_shows_the_episode(steps: list[Any], said: str) -> None:
    environment = says(*steps)
    with pytest.raises(AgentError) as error:
        play(environment, {(0, s, 0): "<3*4>" for s in range(2)}, samples=2)
    text = str(error.value)
    assert said in text
    assert "step 3: environment '" in text
    assert "at sample 0, turn 1, from row 1 of the data" in text
    assert "prompt:   '2+2='" in text
    assert "response: '<3*4>'" in text
    assert [e.closed for e in environment.made] == [1, 1]


def test_megabytes_from_an_environment_end_the_episode_unread(monkeypatch: pytest.MonkeyPatch) -> None:
    """As any text too long for the episode does, but without making ids of it first."""
    read: list[int] = []
    between = TurnFormat.between
    monkeypatch.setattr(
        TurnFormat, "between", lambda self, *args: read.append(len(args[2][0])) or between(self, *args)
    )
    script = {(0, 0, 0): "<3*4>", (0, 0, 1): "<3*4>"}
    environment = says(Step("12"), Step("1" * 5_000_000, reward=0.5))
    rows, engine, _ = play(environment, script, sampling=SamplingParams(max_new_tokens=30), max_turns=4)
    assert rows["finish_reason"] == ["length"]
    assert text_of(engine.fed[0, 0, 1]) == "2+2=<3*4>12"
    assert rows["environment_reward"].tolist() == [0.5]
    assert read == [2]


def test_errors_in_reset_and_close() -> None:
    def broken(self: Any, *row: Any) -> None:
        raise RuntimeError("gone")

    for method in ("reset", "close"):
        environment = says(Step(done=True), **{method: broken})
        with pytest.raises(AgentError, match=f"{method} raised RuntimeError: gone"):
            play(environment, {(0, 0, 0): "a"})


def test_a_function_that_makes_no_environment() -> None:
    with pytest.raises(AgentError, match="made a int; wanted an Environment"):
        play(lambda: 3, {(0, 0, 0): "a"})  # type: ignore[arg-type, return-value]


def test_an_error_in_close_does_not_hide_the_first(caplog: pytest.LogCaptureFixture) -> None:
    def broken(self: Any) -> None:
        raise RuntimeError("gone")

    with pytest.raises(AgentError, match="no such page"):
        play(says(ValueError("no such page"), close=broken), {(0, 0, 0): "a"})
    assert "close raised RuntimeError: gone" in caplog.text


def test_environments_are_closed_when_the_run_is_interrupted() -> None:
    environment, calls = says(Step("12"), Step(done=True)), iter(range(100))

    def interrupt(fraction: float) -> None:
        if next(calls) == 3:  # after two resets and two steps
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        play(environment, {(0, s, 0): "a" for s in range(2)}, samples=2, on_progress=interrupt)
    assert [len(e.heard) for e in environment.made] == [1, 1]
    assert [e.closed for e in environment.made] == [1, 1]


def test_a_prompt_from_reset_must_leave_room() -> None:
    environment = says(Step(done=True), reset=lambda self, row: "1" * 61)
    with pytest.raises(AgentError, match="a prompt of 61 tokens; there may be 1 to 60"):
        play(environment, {(0, 0, 0): "a"})
    with pytest.raises(AgentError, match="there may be 1 to 10"):
        play(
            says(Step(done=True), reset=lambda self, row: "1" * 11),
            {(0, 0, 0): "a"},
            sampling=SamplingParams(max_new_tokens=90),
        )


def test_an_environment_that_never_answers_costs_its_episode_alone(caplog: pytest.LogCaptureFixture) -> None:
    class Hangs(Says):
        made: list[Says] = []  # noqa: RUF012
        steps = (Step("12", reward=1), Step(done=True, reward=1))

        def step(self, response: str) -> Any:
            return asyncio.sleep(60) if response == "stuck" else super().step(response)

    script = {(0, 0, 0): "a", (0, 0, 1): "b", (0, 1, 0): "c", (0, 1, 1): "stuck"}
    rows, _, metrics = play(Hangs, script, samples=2, timeout_s=0.2)
    assert rows["finish_reason"] == ["stop", "timeout"]
    assert rows["environment_reward"].nan_to_num(-1).tolist() == [2, -1]
    assert metrics["agent/timeout_fraction"] == 0.5
    assert "step took longer than agent.timeout_s (0.2 s) at sample 1 from row 1 of the data" in caplog.text
    assert [e.closed for e in Hangs.made] == [1, 1]


def test_a_reset_that_never_returns_leaves_an_empty_episode() -> None:
    class Hangs(Says):
        made: list[Says] = []  # noqa: RUF012
        steps = (Step(done=True, reward=1),)

        async def reset(self, row: Mapping[str, Any]) -> None:  # type: ignore[override]
            if row["sample_index"] == 1:
                await asyncio.sleep(60)

    rows, _, _ = play(Hangs, {(0, 0, 0): "a"}, samples=2, timeout_s=0.2)
    assert rows["finish_reason"] == ["stop", "timeout"]
    assert rows["completion"] == ["a", ""]
    assert text_of(rows.row_values("input_ids", 1).tolist()) == "2+2="
    assert not rows.row_values("response_mask", 1).any()


def test_a_step_without_a_score_leaves_the_episode_out() -> None:
    rows, _, metrics = play(says(Step("12", reward=1), Step(done=True, reward=None)), SCRIPT)
    assert rows["environment_reward"].isnan().tolist() == [True]
    assert "agent/reward_mean" not in metrics


def test_evaluation_has_names_of_its_own() -> None:
    _, _, metrics = play(says(Step(done=True, metrics={"x": 2})), SCRIPT, evaluation=True)
    assert metrics["eval/agent/turns_mean"] == 1
    assert metrics["eval/agent/part/x"] == 2
    assert not any(name.startswith("agent/") for name in metrics)
