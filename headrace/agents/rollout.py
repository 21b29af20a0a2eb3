"""The rollout of several turns: all running episodes generate a turn together, then their environments answer.

Token in, token out: a turn is fed the very ids of the turns before it. What was sampled is in `response_mask`, what
an environment wrote is not.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Mapping, Sequence
from functools import cached_property
from typing import Any

from torch import Tensor

from headrace.agents.calls import Call, Caller, Outcome
from headrace.agents.environment import Environment, MakeEnvironment, Prompt, Step, name_of, role_of
from headrace.agents.episode import ENVIRONMENT, Episode, batch_of
from headrace.agents.turn_format import TurnFormat
from headrace.config import Config
from headrace.config_import import described, shortened
from headrace.data.batch import Batch
from headrace.data.prompt_builder import PromptBuilder, RowProblem
from headrace.errors import AgentError
from headrace.rewards.functions import copied
from headrace.rewards.values import UnusableValueError, read_value
from headrace.rollout.engine import Request, RolloutEngine, SamplingParams
from headrace.stages import StageContext

logger = logging.getLogger(__name__)

SeedOf = Callable[[int, int, int], int]
"""The seed of a turn: (prompt_id, sample_index, turn counted from 0)."""


class AgentRollout:
    """Plays episodes with environments from `make`.

    `rollout.max_new_tokens` bounds all that follows the prompt, the environment's text included, so prompt and
    episode together are no longer than a rollout of one turn. An episode ends with the finish reason

    - "stop": the environment said `done`,
    - "length": the tokens are used up, by a response or by what the environment would add to it,
    - "max_turns": agent.max_turns responses were given,
    - "timeout": a call of the environment took longer than agent.timeout_s; the episode is left out of the loss.
    """

    def __init__(
        self,
        make: MakeEnvironment,
        config: Config,
        tokenizer: Any,
        *,
        end_ids: Sequence[int],
        max_sequence_tokens: int,
    ) -> None:
        """`end_ids` end a response; `max_sequence_tokens` bounds prompt and episode together.

        Raises ConfigError for a chat template that several turns cannot be made with.
        """
        self.make = make
        self.name = f"environment '{config.agent.environment or name_of(make)}'"
        self.max_turns = config.agent.max_turns
        self.caller = Caller(config.agent.timeout_s, config.reward.max_concurrency)
        self.builder = PromptBuilder(tokenizer, config.data)
        self.max_sequence_tokens = max_sequence_tokens
        self.tokenizer = tokenizer
        self.end_ids = (*end_ids, *config.rollout.stop_token_ids)
        self._formats: dict[str, TurnFormat] = {}
        self.format(role_of(make))

    def format(self, role: str) -> TurnFormat:
        if role not in self._formats:
            self._formats[role] = TurnFormat(self.tokenizer, self.builder.format, role, self.end_ids)
        return self._formats[role]

    @cached_property
    def longest_token(self) -> int:
        """Characters that one token may stand for, at most."""
        return max(map(len, self.tokenizer.get_vocab()))

    def generate(
        self,
        engine: RolloutEngine,
        prompts: Batch,
        samples_per_prompt: int,
        sampling: SamplingParams,
        seed_of: SeedOf,
        context: StageContext,
    ) -> Batch:
        """Prompts [P rows] → P x samples_per_prompt rows; see agents/episode.py for their columns.

        Raises AgentError, showing the episode, when an environment raises or returns something unusable.
        """
        return _Play(self, engine, prompts, samples_per_prompt, sampling, seed_of, context).run()


class _Play:
    """The state of one `generate`."""

    def __init__(
        self,
        agent: AgentRollout,
        engine: RolloutEngine,
        prompts: Batch,
        samples_per_prompt: int,
        sampling: SamplingParams,
        seed_of: SeedOf,
        context: StageContext,
    ) -> None:
        self.agent, self.engine, self.prompts = agent, engine, prompts
        self.sampling, self.seed_of, self.context = sampling, seed_of, context
        self.ids_of_rows: list[int] = prompts["prompt_id"].tolist()
        self.episodes = [Episode(r, i) for r in range(prompts.num_rows) for i in range(samples_per_prompt)]
        self.environment_s = 0.0
        self.progress = 0.0

    def run(self) -> Batch:
        try:
            self._begin()
            for turn in range(self.agent.max_turns):
                active = [e for e in self.episodes if e.end is None]
                if not active:
                    break
                self._generate_turn(active, turn)
                self._answer(active, last=turn + 1 == self.agent.max_turns)
        except BaseException:
            self._close(failing=True)
            raise
        self._close(failing=False)
        self._metrics()
        return batch_of(self.episodes, self.prompts, self.sampling.truncates)

    def _begin(self) -> None:
        columns = {
            name: column.tolist() if isinstance(column, Tensor) else column
            for name, column in self.prompts.without_columns(["prompt_ids"]).rows.items()
        }

        def call_of(episode: Episode) -> Call:
            row = {name: copied(values[episode.row]) for name, values in columns.items()}
            row["sample_index"] = episode.sample_index

            def begin() -> Any:
                made = self.agent.make()
                if not isinstance(made, Environment):
                    raise TypeError(f"{self.agent.name} made a {type(made).__name__}; wanted an Environment")
                episode.environment = made
                return made.reset(row)

            return begin

        outcomes = self._call("reset", self.episodes, call_of)
        for episode, outcome in zip(self.episodes, outcomes, strict=True):
            prompt = None if outcome.timed_out else outcome.value
            episode.prompt, ids = self._prompt(episode, prompt)
            episode.prompt_tokens = len(ids)
            episode.feed(ids)

    def _prompt(self, episode: Episode, given: Prompt | None) -> tuple[str, Sequence[int]]:
        if given is None:
            return self.prompts["prompt"][episode.row], self.prompts["prompt_ids"][episode.row]
        try:
            text = self.agent.builder.render(given)
        except RowProblem as error:
            raise self._error(episode, f"reset returned a prompt that cannot be used: {error}") from error
        ids = self.agent.builder.ids([text])[0]
        room = min(
            self.agent.builder.max_prompt_tokens,
            self.agent.max_sequence_tokens - self.sampling.max_new_tokens,
        )
        if not len(self.agent.builder.prefix) < len(ids) <= room:
            raise self._error(
                episode,
                f"reset returned a prompt of {len(ids)} tokens; there may be 1 to {room} (data.max_prompt_tokens, and"
                " what rollout.max_new_tokens leaves)",
            )
        return text, ids

    def _generate_turn(self, active: list[Episode], turn: int) -> None:
        """One response for each active episode; those that have seen the same ids share a request."""
        alike: dict[tuple[int, ...], list[Episode]] = {}
        for episode in active:
            alike.setdefault((self._room(episode), *episode.ids), []).append(episode)
        requests = [
            Request(
                key[1:],
                tuple(self.seed_of(self.ids_of_rows[e.row], e.sample_index, turn) for e in members),
                max_new_tokens=key[0],
            )
            for key, members in alike.items()
        ]
        total = len(active) * self.agent.max_turns

        def report(finished: int, tokens: int) -> None:
            self.progress = turn / self.agent.max_turns + finished / total
            self.context.on_progress(self.progress)

        completions = self.engine.generate(requests, self.sampling, report)
        pairs = [
            (episode, completion)
            for members, made in zip(alike.values(), completions, strict=True)
            for episode, completion in zip(members, made, strict=True)
        ]
        texts = self.agent.tokenizer.batch_decode([c.token_ids for _, c in pairs], skip_special_tokens=True)
        for (episode, completion), text in zip(pairs, texts, strict=True):
            episode.sampled(completion, text)
            if completion.finish_reason == "length":
                episode.end = "length"

    def _room(self, episode: Episode) -> int:
        """Tokens the episode may still have."""
        return self.sampling.max_new_tokens - (len(episode.ids) - episode.prompt_tokens)

    def _answer(self, active: list[Episode], last: bool) -> None:
        """Lets every environment answer the turn just sampled; the episodes that go on are fed what it wrote."""

        def call_of(episode: Episode) -> Call:
            environment, response = episode.environment, episode.completion
            if environment is None:
                raise RuntimeError("an episode without an environment cannot go on")
            return lambda: environment.step(response)

        outcomes = self._call("step", active, call_of)
        for episode, outcome in zip(active, outcomes, strict=True):
            if outcome.timed_out:
                continue
            step = self._checked(episode, outcome.value)
            episode.earn(step.reward)
            for name, value in step.metrics.items():
                episode.metrics[name] = episode.metrics.get(name, 0.0) + value
            if episode.end is None and step.done:
                episode.end = "stop"
            if episode.end is None and last:
                episode.end = "max_turns"
            if episode.end is None:
                self._feed(episode, [step.text] if isinstance(step.text, str) else list(step.text))

    def _feed(self, episode: Episode, texts: list[str]) -> None:
        if sum(map(len, texts)) > self._room(episode) * self.agent.longest_token:
            episode.end = "length"  # known without making ids of what may be megabytes
            return
        role = episode.environment.role if episode.environment is not None else "user"
        try:
            between = self.agent.format(role).between(episode.completion, episode.ids[-1], texts)
        except AgentError as error:
            raise self._error(episode, str(error)) from error
        if len(between) >= self._room(episode):
            episode.end = "length"  # nothing could be said after it, so it is left out
            return
        episode.feed(between)
        episode.messages += [{"role": ENVIRONMENT, "content": text} for text in texts]

    def _checked(self, episode: Episode, step: Any) -> Step:
        """The step with its numbers as floats. Raises AgentError."""
        if not isinstance(step, Step):
            raise self._error(episode, f"step returned a {type(step).__name__}; wanted a Step")
        texts = [step.text] if isinstance(step.text, str) else step.text
        if (
            not isinstance(texts, list | tuple)
            or not texts
            or not all(isinstance(text, str) for text in texts)
        ):
            raise self._error(episode, "the text of a Step must be a text, or a list of at least one")
        if isinstance(step.done, str):  # "no" would count as true
            raise self._error(episode, f"the done of a Step must be true or false, not {step.done!r}")
        try:
            "".join(texts).encode()
        except UnicodeEncodeError as error:
            raise self._error(
                episode, "the text of a Step holds half a character (a lone surrogate, such as \\ud800)"
            ) from error
        if not isinstance(step.metrics, Mapping):
            raise self._error(
                episode, f"the metrics of a Step must be a dict, not a {type(step.metrics).__name__}"
            )
        try:
            reward, metrics = read_value({**step.metrics, "reward": step.reward})
        except UnusableValueError as error:
            raise self._error(episode, f"step returned a Step that cannot be used: {error}") from error
        return Step(step.text, reward, bool(step.done), {k: v for k, v in metrics.items() if v is not None})

    def _call(
        self, method: str, episodes: list[Episode], call_of: Callable[[Episode], Call]
    ) -> list[Outcome]:
        """One call for each episode. Those that ran out of time end; an exception becomes an AgentError."""
        started = time.perf_counter()
        outcomes = self.agent.caller.run(
            [call_of(e) for e in episodes],
            lambda finished: self.context.on_progress(self.progress),  # lets Ctrl-C end a slow round
        )
        self.environment_s += time.perf_counter() - started
        for episode, outcome in zip(episodes, outcomes, strict=True):
            if outcome.error is not None:
                raise self._error(episode, f"{method} raised {described(outcome.error)}") from outcome.error
            if outcome.timed_out:
                episode.end, episode.reward = "timeout", None
                logger.warning(
                    "%s: %s took longer than agent.timeout_s (%g s) at sample %d from row %d of the data; the episode"
                    " is left out",
                    self.agent.name,
                    method,
                    self.agent.caller.timeout_s,
                    episode.sample_index,
                    self.ids_of_rows[episode.row] + 1,
                )
        return outcomes

    def _close(self, failing: bool) -> None:
        """Closes every environment. An error in it is raised, unless the rollout fails already: then it is logged."""
        opened = [(e, e.environment) for e in self.episodes if e.environment is not None]
        outcomes = self.agent.caller.run([environment.close for _, environment in opened])
        for (episode, _), outcome in zip(opened, outcomes, strict=True):
            if outcome.error is None and not outcome.timed_out:
                continue
            what = "took too long" if outcome.error is None else f"raised {described(outcome.error)}"
            error = self._error(episode, f"close {what}")
            if failing or outcome.error is None:
                logger.warning("%s", error)
            else:
                raise error from outcome.error

    def _error(self, episode: Episode, what: str) -> AgentError:
        step = "evaluation on held-out data" if self.context.evaluation else f"step {self.context.step}"
        lines = [
            f"{step}: {self.agent.name}: {what}",
            f"  at sample {episode.sample_index}, turn {episode.turns}, from row {self.ids_of_rows[episode.row] + 1} of"
            " the data",
            f"  prompt:   {shortened(episode.prompt)!r}",
        ]
        if episode.turns:
            lines.append(f"  response: {shortened(episode.completion)!r}")
        return AgentError("\n".join(lines))

    def _metrics(self) -> None:
        m, episodes = self.context.metrics, self.episodes
        area = "eval/agent" if self.context.evaluation else "agent"
        n = len(episodes)
        m.add(f"{area}/turns_mean", sum(e.turns for e in episodes), n)
        m.add(f"{area}/environment_tokens_mean", sum(_environment_tokens(e) for e in episodes), n)
        for reason in ("max_turns", "timeout"):
            m.add(f"{area}/{reason}_fraction", sum(e.end == reason for e in episodes), n)
        earned = [e.reward for e in episodes if e.reward is not None]
        m.add(f"{area}/reward_mean", sum(earned), len(earned))
        m.add_total(f"{area}/environment_s", self.environment_s)
        for name in sorted({name for e in episodes for name in e.metrics}):
            m.add(f"{area}/part/{name}", sum(e.metrics.get(name, 0.0) for e in episodes), n)


def _environment_tokens(episode: Episode) -> int:
    return len(episode.ids) - episode.prompt_tokens - sum(episode.mask)
