"""The responses to a query of a step in the terminal: what each of them got, and how each of its tokens changed."""

import json
import shlex
from bisect import bisect_right
from collections.abc import Iterator, Sequence
from contextlib import nullcontext
from pathlib import Path
from statistics import fmean
from typing import Any

from rich.console import Console
from rich.style import Style
from rich.text import Text

from gspo.errors import listed, visible
from gspo.report.find_group import Group, find_group, named, steps_with
from gspo.report.run_files import RunFiles, Waiting, read_run
from gspo.report.samples import LEVELS, Sample, cut_into_tokens, pass_threshold, passes
from gspo.run.plain_files import content_of

# Blue and orange are told apart by every kind of colour vision; black can be read on all between them and the grey.
_NEUTRAL, _LESS_LIKELY, _MORE_LIKELY = (205, 205, 205), (86, 180, 233), (230, 159, 0)
_SHOWN = ("completion", "reward", "rewards", "failure", "finish_reason", "clipped", "mini_batch", "extra")


def show(
    path: Path,
    *,
    step: int | None,
    query: str | None,
    as_json: bool,
    console: Console | None = None,
    waiting: Waiting = nullcontext,
) -> None:
    """Print the responses to a query of a step, as `find_group` finds them; UserError where there are none."""
    console = console or Console(highlight=False)
    with waiting("reading the run's responses"):
        run = read_run(path)
        chosen = find_group(run, step, query)
        if as_json:  # in ASCII: no terminal takes any of it for a command
            lines = (json.dumps({"step": chosen.step, **sample}) for sample in chosen.groups[chosen.query])
            text = "".join(f"{line}\n" for line in lines)
        else:
            with console.capture() as captured:
                for line in _page(run, chosen, colours=console.color_system is not None and not console.no_color):
                    console.print(line, soft_wrap=True)
            text = captured.get()
    # Not by rich, which would end the program itself where the reader has enough.
    console.file.write(text.encode(console.encoding, "backslashreplace").decode(console.encoding))
    console.file.flush()


def _page(run: RunFiles, chosen: Group, *, colours: bool) -> Iterator[Text]:
    group = chosen.groups[chosen.query]
    title = f"{run.name} · step {chosen.step} of {run.recipe['steps']} · query {chosen.query}"
    yield Text(visible(title), style="bold")
    content = content_of(run.rollout_files[chosen.step])
    if num_not_read := content.count(b"\n") - sum(map(len, chosen.groups.values())):
        yield Text(f"{num_not_read} line(s) of the step's file could not be read")
    if not content.endswith(b"\n"):
        yield Text("the step's file is not written to its end: this is what there is so far")
    yield _quoted([(group[0].get("prompt", ""), "")])
    if columns := group[0].get("columns"):
        yield _quoted([("; ".join(f"{name}: {value}" for name, value in columns.items()), "")])
    yield Text(_rewards(run, group))
    yield _legend(group, colours=colours)
    for places, sample in _distinct(group):
        yield Text()
        equal = f" ({len(places)} equal responses)" if len(places) > 1 else ""
        yield Text(visible(f"{', '.join(map(str, places))}/{len(group)}{equal}  {_numbers(sample)}"), style="bold")
        if sample.get("failure"):
            yield Text(visible(f"failed: {sample['failure']}"))
        if sample.get("sequence_ratio") is None and sample.get("mini_batch") is None:
            yield Text(f"not trained: {'no reward' if sample.get('reward') is None else 'advantage 0'}")
        yield _quoted(_coloured(sample))
        if extra := sample.get("extra"):
            yield _quoted([("; ".join(f"{name}: {value}" for name, value in extra.items()), "")])
    yield Text()
    yield from _elsewhere(run, chosen)


def _distinct(group: Sequence[Sample]) -> list[tuple[list[int], Sample]]:
    """The responses that differ, each with the places of its equals, and shown by the one that has changed most."""
    equal: dict[str, list[int]] = {}
    for place, sample in enumerate(group):
        parts = {name: value for name, value in sample.items() if name in _SHOWN}
        equal.setdefault(json.dumps(parts, sort_keys=True), []).append(place)
    changes = [sum(map(abs, _log_ratios(sample) or ())) for sample in group]
    return [([place + 1 for place in places], group[max(places, key=changes.__getitem__)]) for places in equal.values()]


def _rewards(run: RunFiles, group: Sequence[Sample]) -> str:
    rewards = [sample["reward"] for sample in group if sample.get("reward") is not None]
    mean = f"mean {fmean(rewards):.3g}" if rewards else "none scored"
    passed = sum(passes(sample, pass_threshold(run)) is True for sample in group)
    shown = ", ".join(_number(sample.get("reward")) for sample in group)
    return f"rewards {shown}: {mean}, {passed} of {len(group)} pass"


def _legend(group: Sequence[Sample], *, colours: bool) -> Text:
    largest = max((abs(ratio) for sample in group for ratio in _log_ratios(sample) or ()), default=0.0)
    if largest < LEVELS[0]:
        first = any(sample.get("mini_batch") == 0 for sample in group)
        why = " (in the first mini-batch the policy had not changed yet)" if first else ""
        return Text(f"no token is coloured: no log ratio reaches {LEVELS[0]:g}{why}")
    text = f"log ratio of each token, the largest ±{largest:.3g}"
    if not colours:
        return Text(f"{text}: not shown without colours; --json has the numbers")
    marks = [(f" {sign * level:+g} ", _style(sign * level)) for sign in (-1, 1) for level in LEVELS[::sign]]
    return Text.assemble(f"{text}: less likely than before ", *marks, " more likely")


def _numbers(sample: Sample) -> str:
    named = ", ".join(f"{name} {_number(part)}" for name, part in sample.get("rewards", {}).items())
    clipped = sample.get("clipped")
    return "  ".join(
        [
            f"reward {_number(sample.get('reward'))}" + (f" ({named})" if named else ""),
            f"advantage {_number(None if sample.get('reward') is None else sample.get('advantage'), '+.3f')}",
            f"s {_number(sample.get('sequence_ratio'), '.5f')}",
            f"clipped {'yes' if clipped == 1 else 'no' if clipped == 0 else _number(clipped, '.0%')}",
            f"mini-batch {_number(sample.get('mini_batch'))}",
            f"{_number(sample.get('tokens'))} tokens, {sample.get('finish_reason', '–')}",
            f"policy version {_number(sample.get('policy_version'))}",
        ]
    )


def _number(value: Any, form: str = "g") -> str:
    return "–" if value is None else format(value, form)


def _log_ratios(sample: Sample) -> list[float] | None:
    """0 for one that was not finite; None where there are none, or a response that was not trained has them."""
    ratios = sample.get("token_log_ratios")
    return None if ratios is None else [ratio or 0.0 for ratio in ratios]


def _coloured(sample: Sample) -> Sequence[tuple[str, Style | str]]:
    """The completion in pieces, each with its style: tokens, or all of it in one where they are not known."""
    tokens, ratios = cut_into_tokens(sample), _log_ratios(sample)
    if tokens is None or ratios is None or len(tokens) != len(ratios):
        return [(sample.get("completion", ""), "")]
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


def _elsewhere(run: RunFiles, chosen: Group) -> Iterator[Text]:
    command = f"  gspo show {shlex.quote(str(run.path))} --step"
    others = [other for other in chosen.groups if other != chosen.query]
    if others:
        yield Text(f"{len(others)} more queries in this step: {named(others)}")
        yield Text(visible(f"{command} {chosen.step} --query {shlex.quote(others[0])}"))
    steps = steps_with(run, chosen.query, but=chosen.step)
    if steps:
        yield Text(f"this query in other steps: {listed([*map(str, reversed(steps))])}")
        yield Text(visible(f"{command} {steps[-1]} --query {shlex.quote(chosen.query)}"))
