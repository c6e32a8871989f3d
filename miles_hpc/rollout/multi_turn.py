"""Several turns with tools: generate, run the tools that the answer calls, show their results, generate again."""

from __future__ import annotations

import asyncio
import json
import re
import time
from typing import Any

from miles_hpc.rollout.functions import load_function
from miles_hpc.rollout.generate import GenerateContext, append_tokens, begin, draw_answer
from miles_hpc.rollout.sample import Sample
from miles_hpc.rollout.statistics import add_up
from miles_hpc.wire.time_limit import within

KEY = "rollout.tools"
_CALL = re.compile(r"<tool_call>\s*(.*?)\s*</tool_call>", re.DOTALL)


class ToolCall:
    """A tool that an answer calls. `error` is set when the call itself cannot be read."""

    def __init__(self, name: str, arguments: dict[str, Any], error: str = "") -> None:
        self.name = name
        self.arguments = arguments
        self.error = error


def parse_tool_calls(text: str) -> list[ToolCall]:
    """Calls in the form `<tool_call>{"name": …, "arguments": {…}}</tool_call>`, which Hermes and Qwen models use."""
    found = []
    for body in _CALL.findall(text):
        try:
            call = json.loads(body)
            arguments = call.get("arguments", {})
            if isinstance(arguments, str):
                arguments = json.loads(arguments)
            found.append(ToolCall(str(call["name"]), dict(arguments)))
        except (ValueError, TypeError, KeyError, AttributeError) as error:
            found.append(ToolCall("", {}, f"the call is not readable: {error}; write it as JSON with name, arguments"))
    return found


async def multi_turn(sample: Sample, context: GenerateContext) -> None:
    """Turns until an answer calls no tool, is cut off, or `rollout.max_turns` is reached. All turns are one sample:
    the policy's tokens count, what the template and the tools put between them does not. The last answer is scored.

    After an interruption it goes on from the turns that were finished, in the middle of an answer too. A function with
    an attribute `stateful` that is true keeps something between calls, which other calls would not find: then it
    begins anew.

    Raises:
        FunctionPathError: `rollout.tools` cannot be imported.
    """
    from miles_hpc.session.continuation import Continuation

    rollout, tokenizer = context.config.rollout, context.services.tokenizer
    run_tool = load_function(rollout.tools, KEY) if rollout.tools else None
    continuation = Continuation(tokenizer)
    prompt = context.prompt_ids(sample)
    first, start = _place(sample, prompt)
    if not 0 <= first < rollout.max_turns or getattr(run_tool, "stateful", False):
        if sample.token_ids:
            sample.stats = {}  # of turns that are given up
        begin(sample, prompt)
        first, start = 0, len(prompt)
    for turn in range(first, rollout.max_turns):
        context.stage(f"turn {turn + 1}")
        await draw_answer(sample, context, start, turn)
        answer = sample.token_ids[start:]
        sample.response = tokenizer.decode(answer)
        calls = parse_tool_calls(sample.response)
        if sample.status != "completed" or not calls or run_tool is None or turn + 1 == rollout.max_turns:
            return
        messages, began = [], time.monotonic()
        for call in calls:
            context.stage(f"tool {call.name}")
            messages.append(
                {"role": "tool", "name": call.name, "content": await _result(run_tool, call, sample, context)}
            )
        add_up(sample, {"tool_s": time.monotonic() - began, "tool_calls": float(len(calls))})
        append_tokens(sample, continuation.suffix(answer, messages, sample.tools or None))
        start = len(sample.token_ids)


def _place(sample: Sample, prompt: list[int]) -> tuple[int, int]:
    """Which turn an interrupted sample goes on with, and where the answer of that turn begins; turn -1: it has none.

    The mask may be all zeros after an interruption; the spans of the versions still say what the policy generated.
    """
    answers: list[tuple[int, int]] = []
    for _, start, end in sample.versions:
        if answers and answers[-1][1] == start:
            start = answers.pop()[0]
        answers.append((start, end))
    if not answers or answers[0][0] != len(prompt) or sample.token_ids[: len(prompt)] != prompt:
        return -1, 0
    start, end = answers[-1]
    tokens = len(sample.token_ids)
    return (len(answers) - 1, start) if end == tokens else (len(answers), tokens)


async def _result(run_tool: Any, call: ToolCall, sample: Sample, context: GenerateContext) -> str:
    """What a tool says; its failure is told to the policy, which may try again."""
    if call.error:
        return f"error: {call.error}"
    limit = context.config.rollout.tool_timeout_s
    try:
        return str(await within(min(limit, context.left_s), run_tool(call.name, call.arguments, sample)))
    except asyncio.TimeoutError:
        if context.left_s <= 0:
            raise
        return f"error: {call.name} did not answer within {limit:g} s"
    except Exception as error:
        return f"error: {type(error).__name__}: {error}"
