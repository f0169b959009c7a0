"""The responses to a query of a step in the terminal: what each of them got, and how each of its tokens changed."""

import json
import re
import shlex
from bisect import bisect_right
from collections.abc import Iterator, Mapping, Sequence
from contextlib import nullcontext
from itertools import accumulate, pairwise
from pathlib import Path
from statistics import fmean
from typing import Any

from rich.console import Console
from rich.style import Style
from rich.text import Text

from gspo.errors import UserError, did_you_mean, listed, visible
from gspo.report.run_files import RunFiles, Waiting, read_run
from gspo.report.samples import (
    LEVELS,
    Groups,
    Sample,
    cut_into_tokens,
    file_state,
    interest,
    pass_threshold,
    passes,
    read_groups,
)
from gspo.run.plain_files import content_of

# Blue and orange are told apart by every kind of colour vision; black can be read on all between them and the grey.
_NEUTRAL, _LESS_LIKELY, _MORE_LIKELY = (205, 205, 205), (86, 180, 233), (230, 159, 0)
_COMPARED = ("completion", "reward", "rewards", "failure", "finish_reason", "clipped", "mini_batch", "extra")
_ID = re.compile(rb'^\{"query": ?("(?:[^"\\]|\\.)*")', re.MULTILINE)  # a line begins with it


def show(
    path: Path,
    *,
    step: int | None,
    query: str | None,
    as_json: bool,
    console: Console | None = None,
    waiting: Waiting = nullcontext,
) -> None:
    """Print the responses to a query of a step: by default of the last one that has it, and the query that shows most.

    The end of a query's id names it, such as `3` for `prompts.jsonl:3`, where one id of the step alone ends so.
    UserError where there are none.
    """
    console = console or Console(highlight=False)
    with waiting("reading the run's responses"):
        run = read_run(path)
        number, name, groups, num_bad = _choose(run, step, query)
        if as_json:  # in ASCII: no terminal takes any of it for a command
            lines = (json.dumps({"step": number, **sample}) for sample in groups[name])
            text = "".join(f"{line}\n" for line in lines)
        else:
            with console.capture() as captured:
                has_colours = console.color_system is not None and not console.no_color
                page = _page(run, number, groups[name], num_bad, has_colours)
                for line in (*page, *_elsewhere(run, number, name, groups)):
                    console.print(line, soft_wrap=True)
            text = captured.get()
    # Not by rich, which would end the program itself where the reader has enough.
    console.file.write(text.encode(console.encoding, "backslashreplace").decode(console.encoding))
    console.file.flush()


def _choose(run: RunFiles, step: int | None, query: str | None) -> tuple[int, str, Groups, int]:
    """The step and the query to show, with the groups of that step and how many lines of its file cannot be read."""
    files, where = run.rollout_files, str(run.path / "rollouts")
    steps = [number for number in sorted(files, reverse=True) if step in (None, number)]
    if step is not None and files and not steps:
        fix = f"name one that has, such as {min(files, key=lambda other: abs(other - step))}"
        raise UserError(f"step {step} has no rollouts", where=where, fix=fix)
    for number in steps:
        ids = _queries_in(files[number])
        meant = [name for name in ids if query in (None, name)] or [name for name in ids if name.endswith(f":{query}")]
        if query is not None and len(meant) > 1:
            fix = f"name one of {_named(meant)}"
            raise UserError(f"several queries end with {visible(query)}", where=str(files[number]), fix=fix)
        if meant:
            groups, num_bad = read_groups(files[number], file_state(files[number]))
            most = max(groups, key=lambda name: interest(groups[name]))
            return number, most if query is None else meant[0], groups, num_bad
    ids = _queries_in(files[steps[0]]) if steps else []
    if query is None or not ids:
        fix = "wait for the end of its first step, or resume it with report.rollouts=true"
        raise UserError("this run has no rollouts yet", where=where, fix=fix)
    what = "no step has the query" if step is None else f"step {step} has no query"
    fix = visible(did_you_mean(query, ids, f"name one of {_named(ids)}"))
    raise UserError(f"{what} {visible(query)}", where=where, fix=fix)


def _named(ids: Sequence[str]) -> str:
    return listed([*map(visible, ids)], 5)


def _queries_in(path: Path) -> list[str]:
    """The ids in a file, but for a line that is being written: its bytes are searched, which is faster than reading."""
    content = content_of(path)
    return [json.loads(quoted) for quoted in dict.fromkeys(_ID.findall(content[: content.rfind(b"\n") + 1]))]


def _page(run: RunFiles, step: int, group: Sequence[Sample], num_bad: int, has_colours: bool) -> Iterator[Text]:
    title = f"{run.name} · step {step} of {run.recipe['steps']} · query {group[0]['query']}"
    yield Text(visible(title), style="bold")
    if num_bad:
        yield Text(f"{num_bad} line(s) of the step's file could not be read")
    yield _quoted([(group[0]["prompt"], "")])
    yield from _pairs(group[0].get("columns"))
    yield Text(_rewards(run, group))
    yield _legend(group, has_colours)
    for places, sample in _distinct(group):
        yield Text()
        equal = f" ({len(places)} equal responses)" if len(places) > 1 else ""
        yield Text(visible(f"{', '.join(map(str, places))}/{len(group)}{equal}  {_numbers(sample)}"), style="bold")
        if sample["failure"]:
            yield Text(visible(f"failed: {sample['failure']}"))
        if sample["sequence_ratio"] is None and sample["mini_batch"] is None:
            yield Text(f"not trained: {'no reward' if sample['reward'] is None else 'advantage 0'}")
        yield from _turns(sample)
        yield from _pairs(sample.get("extra"))
    yield Text()


def _turns(sample: Sample) -> Iterator[Text]:
    """The response, turn by turn where it has several; each of the policy's with its advantage and mean log ratio."""
    turns, ratios, pieces = sample.get("turns") or (), _log_ratios(sample), _coloured(sample)
    tokens, ends = cut_into_tokens(sample), [*accumulate((turn[2] for turn in turns), initial=0)]
    if not turns:
        yield _quoted(pieces)
        return
    if not tokens:  # the texts of turns lack what stands around them
        ends, pieces, ratios = [*range(len(turns) + 1)], [(turn[1], "") for turn in turns], []
    elif not ratios:
        pieces = [(token, "") for token in tokens]
    advantages = sample.get("token_advantages") or [sample["advantage"]] * len(pieces)
    contexts, num_before = [*dict.fromkeys((0, *(sample.get("starts") or ())))], 0
    for (role, _, num_tokens, *reward), (start, end) in zip(turns, pairwise(ends), strict=True):
        is_first = len(contexts) > 1 and num_before in contexts
        said = [
            *([f"context {contexts.index(num_before) + 1} of {len(contexts)}"] if is_first else []),
            "policy" if role == "assistant" else role,
            f"{num_tokens} token{'s' * (num_tokens != 1)}",
            *(f"reward {each:g}" for each in reward),
        ]
        if role == "assistant" and ratios:
            said += [f"advantage {fmean(each or 0.0 for each in advantages[start:end]):+.3f}"]
            said += [f"mean log ratio {fmean(ratios[start:end]):+.2g}"]
        num_before += num_tokens
        yield Text(" · ".join(said), style="italic")
        yield _quoted(pieces[start:end])


def _pairs(values: Mapping[str, Any] | None) -> Iterator[Text]:
    if values:
        yield _quoted([("; ".join(f"{name}: {value}" for name, value in values.items()), "")])


def _distinct(group: Sequence[Sample]) -> list[tuple[list[int], Sample]]:
    """The responses that differ, each with the places of its equals, and shown by the one that has changed most."""
    equal: dict[str, list[int]] = {}
    for place, sample in enumerate(group):
        equal.setdefault(json.dumps([sample.get(name) for name in _COMPARED]), []).append(place)
    changes = [sum(map(abs, _log_ratios(sample))) for sample in group]
    return [([place + 1 for place in places], group[max(places, key=changes.__getitem__)]) for places in equal.values()]


def _rewards(run: RunFiles, group: Sequence[Sample]) -> str:
    rewards = [sample["reward"] for sample in group if sample["reward"] is not None]
    mean = f"mean {fmean(rewards):.3g}" if rewards else "none scored"
    passed = sum(passes(sample, pass_threshold(run)) is True for sample in group)
    shown = ", ".join(_number(sample["reward"]) for sample in group)
    return f"rewards {shown}: {mean}, {passed} of {len(group)} pass"


def _legend(group: Sequence[Sample], has_colours: bool) -> Text:
    largest = max((abs(ratio) for sample in group for ratio in _log_ratios(sample)), default=0.0)
    if largest < LEVELS[0]:
        first = any(sample["mini_batch"] == 0 for sample in group)
        why = " (in the first mini-batch the policy had not changed yet)" if first else ""
        return Text(f"no token is coloured: no log ratio reaches {LEVELS[0]:g}{why}")
    text = f"log ratio of each token, the largest ±{largest:.3g}"
    if not has_colours:
        return Text(f"{text}: not shown without colours; --json has the numbers")
    marks = [(f" {sign * level:+g} ", _style(sign * level)) for sign in (-1, 1) for level in LEVELS[::sign]]
    return Text.assemble(f"{text}: less likely than before ", *marks, " more likely")


def _numbers(sample: Sample) -> str:
    named = ", ".join(f"{name} {_number(part)}" for name, part in sample["rewards"].items())
    clipped, advantage = sample["clipped"], None if sample["reward"] is None else sample["advantage"]
    share = "yes" if clipped == 1 else "no" if clipped == 0 else _number(clipped, ".0%")
    rewards = f"reward {_number(sample['reward'])}" + (f" ({named})" if named else "")
    trained = f"clipped {share}  mini-batch {_number(sample['mini_batch'])}"
    sampled = f"{sample['tokens']} tokens, {sample['finish_reason']}  policy version {sample['policy_version']}"
    change = f"advantage {_number(advantage, '+.3f')}  s {_number(sample['sequence_ratio'], '.5f')}"
    return f"{rewards}  {change}  {trained}  {sampled}"


def _number(value: Any, form: str = "g") -> str:
    return "–" if value is None else format(value, form)


def _log_ratios(sample: Sample) -> list[float]:
    """0 for one that was not finite; none where a response was not trained, or the file does not have them."""
    return [ratio or 0.0 for ratio in sample.get("token_log_ratios") or ()]


def _coloured(sample: Sample) -> Sequence[tuple[str, Style | str]]:
    """The completion in pieces, each with its style: tokens, or all of it in one where they are not known."""
    tokens, ratios = cut_into_tokens(sample), _log_ratios(sample)
    if not (tokens and ratios):
        return [(sample["completion"], "")]
    return [(token, _style(ratio)) for token, ratio in zip(tokens, ratios, strict=True)]


def _style(ratio: float) -> Style | str:
    """Blue below 0 and orange above it, stronger from level to level; nothing around 0."""
    if not (level := bisect_right(LEVELS, abs(ratio))):
        return ""
    end = _MORE_LIKELY if ratio > 0 else _LESS_LIKELY
    red, green, blue = (round(a + (b - a) * level / len(LEVELS)) for a, b in zip(_NEUTRAL, end, strict=True))
    return Style.parse(f"rgb(0,0,0) on rgb({red},{green},{blue})")


def _quoted(pieces: Sequence[tuple[str, Style | str]]) -> Text:
    """Text of others: behind a bar, so that no line of it passes for one of ours."""
    text = Text("│ ")
    for piece, style in pieces:
        for line in visible(piece).splitlines(keepends=True):
            text.append(line, style)
            if line.endswith("\n"):
                text.append("│ ")
    return text


def _elsewhere(run: RunFiles, step: int, query: str, groups: Groups) -> Iterator[Text]:
    command = f"  gspo show {shlex.quote(str(run.path))} --step"
    others = [other for other in groups if other != query]
    if others:
        yield Text(f"other queries in this step ({len(others)}): {_named(others)}")
        yield Text(visible(f"{command} {step} --query {shlex.quote(others[0])}"))
    files = sorted(run.rollout_files.items(), reverse=True)
    steps = [number for number, path in files if number != step and query in _queries_in(path)]
    if steps:
        yield Text(f"this query in other steps: {listed([*map(str, steps)])}")
        yield Text(visible(f"{command} {steps[0]} --query {shlex.quote(query)}"))
