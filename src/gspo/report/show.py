"""The responses to a query of a step in the terminal: what each of them got, and how each of its tokens changed."""

import json
import math
import shlex
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from statistics import fmean
from typing import Any

from rich.console import Console
from rich.style import Style
from rich.text import Text

from gspo.errors import visible
from gspo.metrics.numbers import is_number
from gspo.report.find_group import Found, find_group, in_words, some, steps_with
from gspo.report.run_files import RunFiles, read_run
from gspo.report.samples import Sample, colour_floor, cut_into_tokens
from gspo.report.shapes import section
from gspo.run.plain_files import content_of

# Blue and orange are told apart by every kind of colour vision; black can be read on all between them and the grey.
_NEUTRAL, _LESS_LIKELY, _MORE_LIKELY = (189, 189, 189), (86, 180, 233), (230, 159, 0)
_PLAIN = 0.05  # of the scale: below it a token would be grey, and most of a text is there


def show(path: Path, *, step: int | None, query: str | None, as_json: bool, console: Console | None = None) -> None:
    """Print the responses to a query of a step, as `find_group` finds them; UserError where there are none."""
    console = console or Console(highlight=False)
    run = read_run(path)
    found = find_group(run, step, query)
    if as_json:  # in ASCII: no terminal takes any of it for a command
        lines = (json.dumps({"step": found.step, **sample}) for sample in found.groups[found.query])
        text = "".join(f"{line}\n" for line in lines)
    else:
        with console.capture() as captured:
            for line in _page(run, found, colours=console.color_system is not None and not console.no_color):
                console.print(line, soft_wrap=True)
        text = captured.get()
    # Not by rich, which would end the program itself where the reader has enough.
    console.file.write(text.encode(console.encoding, "backslashreplace").decode(console.encoding))
    console.file.flush()


def _page(run: RunFiles, found: Found, *, colours: bool) -> Iterator[Text]:
    group = found.groups[found.query]
    title = f"{run.name} · step {found.step} of {run.recipe['steps']} · query {found.query}"
    yield Text(visible(title), style="bold")
    if not content_of(run.rollout_files[found.step]).endswith(b"\n"):
        yield Text("the step's file is not written to its end: this is what there is so far")
    yield _quoted([(str(group[0].get("prompt", "")), "")])
    columns = group[0].get("columns")
    if isinstance(columns, Mapping) and columns:
        yield _quoted([("; ".join(f"{name}: {value}" for name, value in columns.items()), "")])
    yield Text(_rewards(run, group))
    largest = max((abs(ratio) for sample in group for ratio in _log_ratios(sample) or ()), default=None)
    line = next((line for line in run.lines if line["step"] == found.step), {})
    scale = max(largest or 0.0, colour_floor(line))
    yield _legend(largest, scale, colours=colours)
    for number, sample in enumerate(group, start=1):
        yield Text()
        yield Text(visible(f"{number}/{len(group)}  {_numbers(sample)}"), style="bold")
        if sample.get("failure"):
            yield Text(visible(f"failed: {sample['failure']}"))
        if sample.get("not_read"):
            yield Text(visible(f"left out, not being what they should be: {sample['not_read']}"))
        if sample.get("sequence_ratio") is None and sample.get("mini_batch") is None:
            yield Text(f"not trained: {_why_not(sample)}")
        yield _quoted(_coloured(sample, scale))
    yield Text()
    yield from _elsewhere(run, found)


def _rewards(run: RunFiles, group: Sequence[Sample]) -> str:
    rewards = [sample["reward"] for sample in group if isinstance(sample.get("reward"), int | float)]
    mean = f"mean {fmean(rewards):.3g}" if rewards else "none scored"
    threshold = section(run.recipe, "evaluation").get("pass_threshold")
    passed = sum(_verdict(sample) >= (threshold if is_number(threshold) else 1.0) for sample in group)
    shown = ", ".join(_number(sample.get("reward")) for sample in group)
    return f"rewards {shown}: {mean}, {passed} of {len(group)} pass"


def _verdict(sample: Sample) -> float:
    """What decides whether a response passes, as in an evaluation: the first reward function that applies."""
    parts, failure = sample.get("rewards"), str(sample.get("failure"))
    for function, part in parts.items() if isinstance(parts, Mapping) else [("", sample.get("reward"))]:
        if isinstance(part, int | float):
            return part
        if failure.startswith(f"reward function {function}: "):
            break
    return -math.inf


def _legend(largest: float | None, end: float, *, colours: bool) -> Text:
    if largest is None:
        return Text("no token has a log ratio here: none was trained, or the file has none (report.tokens)")
    if largest == 0:
        return Text("every token's log ratio is 0: the policy still was the one before the step")
    why = "the group's largest" if end == largest else f"the clip range; the group's largest is ±{largest:.3g}"
    scale = f"log ratio of each token, to ±{end:.3g} ({why})"
    if not colours:
        return Text(f"{scale}: not shown without colours; --json has the numbers")
    less, more = Text(" less likely than before ", _style(-1.0)), Text(" more likely ", _style(1.0))
    return Text.assemble(f"{scale}: ", less, *((" ", _style(share / 4)) for share in range(-3, 4)), more)


def _numbers(sample: Sample) -> str:
    parts = sample.get("rewards")
    named = "" if not isinstance(parts, Mapping) else ", ".join(f"{name} {_number(parts[name])}" for name in parts)
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


def _why_not(sample: Sample) -> str:
    if sample.get("reward") is None:
        return "no reward, for a function failed" if sample.get("failure") else "no reward, for no function applies"
    return "advantage 0"


def _number(value: Any, form: str = "g") -> str:
    return format(value, form) if isinstance(value, int | float) else "–"


def _log_ratios(sample: Sample) -> list[float] | None:
    """0 for one that was not finite; None where there are none, or a response that was not trained has them."""
    ratios = sample.get("token_log_ratios")
    return [ratio or 0.0 for ratio in ratios] if isinstance(ratios, list) else None


def _coloured(sample: Sample, scale: float) -> Sequence[tuple[str, Style | str]]:
    """The completion in pieces, each with its style: tokens, or all of it in one where they are not known."""
    tokens, ratios = cut_into_tokens(sample), _log_ratios(sample)
    if tokens is None or ratios is None or len(tokens) != len(ratios):
        return [(str(sample.get("completion", "")), "")]
    return [(token, _style(ratio / scale if scale else 0.0)) for token, ratio in zip(tokens, ratios, strict=True)]


def _style(share: float) -> Style | str:
    """From blue at -1 over nothing around 0 to orange at 1."""
    if abs(share) < _PLAIN:
        return ""
    end = _MORE_LIKELY if share > 0 else _LESS_LIKELY
    red, green, blue = (round(a + (b - a) * abs(share)) for a, b in zip(_NEUTRAL, end, strict=True))
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


def _elsewhere(run: RunFiles, found: Found) -> Iterator[Text]:
    command = f"  gspo show {shlex.quote(str(run.path))} --step"
    others = [other for other in found.groups if other != found.query]
    if others:
        named = "1 more query" if len(others) == 1 else f"{len(others)} more queries"
        yield Text(f"{named} in this step: {some(others)}")
        yield Text(visible(f"{command} {found.step} --query {shlex.quote(others[0])}"))
    steps = [step for step in steps_with(run, found.query) if step != found.step]
    yield Text(f"{in_words(steps)} this query too" if steps else "no other step has this query")
    if steps:
        yield Text(visible(f"{command} {steps[-1]} --query {shlex.quote(found.query)}"))
