"""The sections of a recipe: each key has its bounds, its default and its meaning."""

import os
import re
from datetime import date
from pathlib import Path
from typing import Annotated, Any, Literal, Self, TypeVar

from pydantic import AfterValidator, BaseModel, BeforeValidator, ConfigDict, Field, field_validator, model_validator
from pydantic_core import PydanticCustomError

from gspo.errors import writable
from gspo.recipe.published import PUBLISHED, Advantage, Correction, LengthNorm, Level, Name, as_published, when_stale

FILE_SUFFIXES = (".jsonl", ".json", ".csv", ".parquet")  # of data files
LONG_SECONDS = {"code": 3600.0, "judge": 600.0, "reward_model": 600.0}  # limits of a call of built-in rewards
REPLACED_FILE = "file"  # of queries.refresh
MAX_DRAWN = 2**20  # questions of a procedural task: as many as one seed has before it meets the next
MAX_NAME_BYTES = 255  # of a file; what file systems take
MAX_PATH_BYTES = 4000  # of a path, with room for what a run writes below it


def path_fault(path: str) -> str | None:
    """Say why no file system takes the path; None where there is no such reason."""
    if "\0" in path:
        return "holds a NUL character"
    if writable(path) != path:
        return "holds half of a surrogate pair, which is no character"
    if max(len(name.encode()) for name in path.split("/")) > MAX_NAME_BYTES:
        return f"has a name of more than {MAX_NAME_BYTES} bytes"
    return f"has more than {MAX_PATH_BYTES} bytes" if len(path.encode()) > MAX_PATH_BYTES else None


def names_file(path: str) -> bool:
    """Tell whether a path means a local file; anything else, such as `openai/gsm8k`, is a hub id."""
    looks_local = path.startswith((".", "/", "~")) or path.count("/") > 1 or "\\" in path
    is_file = os.path.isfile(path)  # noqa: PTH113 - False, not an error, where it may not be looked at
    return looks_local or Path(path).suffix.lower() in FILE_SUFFIXES or is_file


def listed_rewards(value: Any) -> Any:
    """A list of mappings for every way to write `reward:`; what is none of them stays as it is."""
    rewards = [value] if isinstance(value, dict | str) else value
    is_list = isinstance(rewards, list | tuple)
    return [{"function": reward} if isinstance(reward, str) else reward for reward in rewards] if is_list else rewards


def refusal(sentence: str) -> PydanticCustomError:
    """The error of a validator whose message is the sentence, whatever braces it holds."""
    return PydanticCustomError("refusal", "{sentence}", {"sentence": sentence})


def _check_path(path: str) -> str:
    if fault := path_fault(path):
        raise refusal(f"this path {fault}")
    return os.path.expanduser(path)  # noqa: PTH111 - Path would make of ./name into name, which may be a hub id


def _check_number(value: Any) -> Any:
    if isinstance(value, bool):  # which Python takes for 1 and 0
        raise PydanticCustomError("number", "should be a number")
    return value


def _named_ids(value: Any) -> Any:
    """Whole numbers among the names become `id:N`: a file of JSON or YAML may have lost which they were."""
    if not isinstance(value, dict):
        return value
    return {f"id:{name}" if type(name) is int else name: number for name, number in value.items()}


def _with_underscores(value: Any) -> Any:
    if not isinstance(value, dict):
        return value
    return {name.replace("-", "_") if isinstance(name, str) else name: entry for name, entry in value.items()}


def _check_day(day: str) -> str:
    try:
        return date.fromisoformat(day).isoformat()
    except ValueError as error:
        raise refusal(f"should be a day, such as 2024-10-01: {error}") from None


S = TypeVar("S", bound="SuiteConfig | EvaluationConfig")


def refuse_equal_samples(section: S) -> S:
    """The section; a refusal where it asks for responses that are all the same."""
    if section.temperature == 0 and section.samples > 1:
        raise refusal(f"temperature 0 gives {section.samples} equal responses: set samples: 1, or a temperature")
    return section


def _check_greedy(temperature: float) -> float:
    if temperature == 0 or 1e-6 <= temperature < float("inf"):
        return temperature
    raise refusal("should be 0, which takes the likeliest token (greedy), or at least 1e-6")


def _check_source_name(name: str) -> str:
    if not re.fullmatch("[A-Za-z0-9_-]+", name):
        raise refusal(f"the name of a source has letters, digits, - and _ only, unlike {name!r}")
    return name


def _or_none(value: Any) -> Any:
    return {} if value is None else value


def _named_sources(value: Any) -> Any:
    """The sources by their names; a text is a path, and null means none."""
    if not isinstance(value, dict):
        return _or_none(value)
    return {_as_text(name): {"path": own} if isinstance(own, str) else own for name, own in value.items()}


def _check_url(url: str) -> str:
    if not re.fullmatch(r"https?://[^/:@\s]+(:\d{1,5})?/?", url):
        raise refusal("should be the address of a server, such as http://127.0.0.1:8000")
    return url


def _as_text(value: Any) -> Any:
    return str(value) if type(value) is int else value


Integer = Annotated[int, BeforeValidator(_check_number)]
Number = Annotated[float, BeforeValidator(_check_number)]
Positive = Annotated[Integer, Field(gt=0, lt=2**63)]
Natural = Annotated[Integer, Field(ge=0, lt=2**63)]
# Responses to one query: more than anyone samples, and few enough for their lists to fit in memory.
NumResponses = Annotated[Integer, Field(gt=0, le=2**16)]
PositiveFloat = Annotated[Number, Field(gt=0, allow_inf_nan=False)]
NonNegativeFloat = Annotated[Number, Field(ge=0, allow_inf_nan=False)]
Weight = Annotated[Number, Field(ge=-1e6, le=1e6)]
Temperature = Annotated[Number, Field(ge=1e-6, allow_inf_nan=False)]  # logits divided by less are no numbers
Greedy = Annotated[Number, AfterValidator(_check_greedy)]
Finite = Annotated[Number, Field(allow_inf_nan=False)]
BelowOne = Annotated[Number, Field(ge=0, lt=1)]
Fraction = Annotated[Number, Field(ge=0, le=1)]
PositiveFraction = Annotated[Number, Field(gt=0, le=1)]
LogitBias = Annotated[dict[str, Annotated[Number, Field(ge=-100, le=100)]], BeforeValidator(_named_ids)]
PathText = Annotated[str, AfterValidator(_check_path)]  # or a hub id
Schedule = Literal["constant", "linear", "cosine"]
Day = Annotated[str, AfterValidator(_check_day)]
Per = Literal["response", "segment", "token"]
Text = Annotated[str, Field(min_length=1)]
SourceName = Annotated[str, AfterValidator(_check_source_name)]
Devices = Annotated[str, BeforeValidator(_as_text)]  # in CUDA_VISIBLE_DEVICES
Url = Annotated[str, AfterValidator(_check_url)]
Options = Annotated[dict[str, Any], BeforeValidator(_with_underscores)]  # of a command line
Which = Literal["highest", "lowest"]


def key(default: Any, description: str) -> Any:
    """A key of a section with its default and its meaning, for docs/reference/recipe.md."""
    return Field(default, description=description)


class Section(BaseModel):
    """A frozen part of the recipe; unknown keys are errors and defaults are validated too."""

    model_config = ConfigDict(frozen=True, extra="forbid", validate_default=True)

    @field_validator("*")
    @classmethod
    def _check_text(cls, value: Any) -> Any:
        if writable(value) != value:
            raise refusal("holds half of a surrogate pair, which is no character")
        return value


class OptimizerConfig(Section):
    name: str = key("adamw", "`adamw`, `torch.optim.NAME` or `module:Class` ([which](../guides/models.md#optimisers)).")
    options: dict[str, Any] = key({}, "Further arguments of the optimiser, such as `{momentum: 0.9}` of SGD.")
    lr: PositiveFloat = key(1e-6, "The learning rate.")
    betas: tuple[BelowOne, BelowOne] = key((0.9, 0.99), "AdamW's decay of the gradient's mean and of its square.")
    eps: PositiveFloat = key(1e-8, "The small number that AdamW adds to its divisor.")
    weight_decay: NonNegativeFloat = key(
        0.0, "AdamW's decoupled decay, of norms and biases too, as in verl; TRL spares these: see `no_decay`."
    )
    no_decay: tuple[str, ...] = key(
        (), "Patterns of parameters without weight decay: none, since 0 decays none; TRL's are `[*norm*, *.bias]`."
    )
    warmup_steps: Natural = key(0, "The learning rate rises linearly to `lr` over this number of optimiser steps.")
    schedule: Schedule = key("constant", "How the learning rate falls after the warm-up.")
    min_lr_fraction: Fraction = key(0.0, "The schedule ends at this fraction of `lr`.")
    max_grad_norm: PositiveFloat = key(1.0, "A gradient with a larger norm is scaled down to this norm.")


class LoraConfig(Section):
    rank: Annotated[Integer, Field(gt=0, le=1024)] = key(
        16, "The rank of what is added to a layer's weights; 1 to 32 are enough for RL."
    )
    alpha: PositiveFloat = key(32.0, "What is added is scaled by `alpha / rank`.")
    targets: Annotated[tuple[str, ...], Field(min_length=1)] = key(
        ("*",), "Layers that get an adapter, such as `q_proj` or `*attn*`; by default all linear ones and experts."
    )
    rslora: bool = key(False, "Scale by `alpha / sqrt(rank)` instead (rsLoRA, arXiv 2312.03732).")
    dora: bool = key(False, "Train the size of each row of weights by itself (DoRA, arXiv 2402.09353): slower.")
    quantize: Literal["none", "nf4"] = key(
        "none", "Keep the model's own linear layers in 4 bits, on a GPU ([QLoRA](../guides/lora.md#qlora))."
    )


class ModelConfig(Section):
    path: PathText | None = key(None, "A directory or hub id with weights; see [models](../guides/models.md).")
    architecture: dict[str, Any] | None = key(None, "In place of a path: a new model's transformers configuration.")
    tokenizer: PathText | None = key(None, "By default that of `model.path`; `fit` makes one from the run's texts.")
    trust_remote_code: bool = key(False, "Run Python code from model directories; see [models](../guides/models.md).")
    dtype: Literal["auto", "float32", "bfloat16"] = key("auto", "`auto`: `float32` on a CPU, else `bfloat16`.")
    device: str = key("auto", "`auto` is the first GPU, or the CPU where there is none.")
    attn_implementation: str | None = key(None, "transformers' attention; gspo packs sequences with `sdpa` only.")
    kwargs: dict[str, Any] = key({}, "Further arguments of `from_pretrained`, and keys of the model's configuration.")
    frozen: tuple[str, ...] = key((), "Patterns of parameters that are not trained, such as `*embed_tokens*`.")
    lora: LoraConfig | None = key(
        None, "Train an adapter beside the weights ([LoRA](../guides/lora.md)); `{}` is enough."
    )


class ColdStartOptimizerConfig(OptimizerConfig):
    lr: PositiveFloat = 1e-3
    betas: tuple[BelowOne, BelowOne] = (0.9, 0.95)
    schedule: Schedule = "linear"


class ColdStartConfig(Section):
    steps: Natural = key(0, "Supervised optimiser steps before RL; 0: none.")
    path: PathText | None = key(None, "A file with the columns `prompt` and `completion`.")
    demonstrations: PathText | None = key(None, "Instead of a file: `file.py:name` of an `f(row, rng) -> completion`.")
    rows: Positive = key(20_000, "The most demonstrations that are made or read.")
    rows_per_step: Positive = key(64, "Demonstrations in one optimiser step.")
    optimizer: ColdStartOptimizerConfig = key(ColdStartOptimizerConfig(), "The keys of `actor.optimizer`.")


class ProceduralConfig(Section):
    model_config = ConfigDict(frozen=True, extra="allow")  # other keys go to the task's own configuration
    task: str = key(..., "The name of a reasoning-gym task; the section's other keys are the task's own options.")
    size: Annotated[Integer, Field(gt=0, le=MAX_DRAWN)] = key(20_000, "The most distinct questions that are drawn.")


class SourceConfig(Section):
    path: PathText | None = key(None, "A data file or a hub id: see [data](../guides/data.md).")
    config: str | None = key(None, "The configuration of a hub id's data set.")
    split: str = key("train", "The split of a hub id's data set.")
    prompt: str | None = key(None, "The column with text or chat messages. Known layouts are recognised without it.")
    procedural: ProceduralConfig | None = key(None, "In place of a path: a task of reasoning-gym.")
    limit: Positive | None = key(None, "Train on this number of rows only, the first ones.")


class QueriesConfig(SourceConfig):
    sources: Annotated[dict[SourceName, SourceConfig], BeforeValidator(_named_sources)] = key(
        {}, "In place of a path several [sources](../guides/data.md#several-sources), each with the keys above."
    )
    weights: Annotated[dict[str, NonNegativeFloat], BeforeValidator(_or_none)] = key(
        {}, "How often queries of each source are taken, as in `{a: 2, b: 1}`; 0 for those not named. By default alike."
    )

    system: str | None = key(None, "A system message before the prompt, for chat models.")
    template: str | None = key(None, "Text around a text prompt, with `{prompt}` in it.")
    chat: bool | None = key(None, "Apply the chat template to text prompts. Default: if the tokenizer has one.")
    chat_template_kwargs: dict[str, Any] = key(
        {}, "Variables of the chat template, such as `{enable_thinking: false}`; a row's column of this name wins."
    )
    date: Day = key("2026-01-01", "The day that a chat template writes as today's: every run's, so that prompts stay.")
    special_tokens: Literal["allow", "refuse", "text"] = key(
        "allow",
        "Special tokens in a row's own text: left (`allow`, with a note), an error, or encoded as plain `text`.",
    )
    max_prompt_tokens: Positive | None = key(None, "The longest prompt, in tokens; by default what the model can read.")
    overlong: Literal["error", "filter"] = key("error", "Longer prompts are an `error`, or left out (`filter`).")
    shuffle: bool = key(True, "Take the queries in a new order in each epoch.")
    sampler: Literal["order", "difficulty"] = key(
        "order",
        "Each query once an epoch, or by [difficulty](../guides/data.md#order-steps-and-epochs).",
    )
    refresh: PathText | None = key(
        None,
        "[New queries](../guides/data.md#queries-that-change) on the way: `file`, when a data file is replaced, or"
        " `file.py:name` of an `f(step) -> rows or None`.",
    )

    @property
    def has_data(self) -> bool:
        """Tell whether it names what a run trains on."""
        return bool(self.path or self.procedural or self.sources)

    @property
    def shares(self) -> dict[str, float]:
        """The part that each of the sources has of a step's queries; they add up to 1."""
        weights = {name: self.weights.get(name, 0.0) if self.weights else 1.0 for name in self.sources}
        total = sum(weights.values())
        return {name: weight / total for name, weight in weights.items()}


class ServerConfig(Section):
    """An engine that is a server: these keys are the same whatever `rollout.engine` names."""

    python: PathText | None = key(None, "The interpreter that has the server, such as `.venv-vllm/bin/python`.")
    urls: tuple[Url, ...] = key((), "Servers that run already; by default the run starts its own, and ends it.")
    devices: tuple[Devices, ...] = key((), "A server for each entry: the GPUs that it gets, such as `[0, '2,3']`.")
    dtype: Literal["auto", "float32", "bfloat16", "float16"] = key("auto", "Of the server; `auto`: as the trainer's.")
    weights: Literal["memory", "files", "ipc", "nccl"] = key(
        "memory", "How the policy's weights get to the server: see [engines](../engines.md#weights)."
    )
    weights_dir: PathText | None = key(None, "For `weights: files`: a directory that trainer and servers see.")
    options: Options = key({}, "Further options of the server, such as `{gpu_memory_utilization: 0.5}`.")
    start_seconds: PositiveFloat = key(600.0, "The limit in seconds for a server to get ready.")
    request_seconds: PositiveFloat = key(3600.0, "The limit in seconds for a group's responses.")


class VllmConfig(ServerConfig):
    adapters: bool | None = key(
        None,
        "It gets `model.lora` as an adapter, not merged; `null`: on a GPU, [where it can](../engines.md#adapters).",
    )


AtPublish = Literal["none", "wait", "recompute", "keep"]


class RolloutConfig(Section):
    engine: Literal["embedded", "vllm", "sglang"] = key(
        "embedded",
        "What samples: `embedded`, in the trainer's process, or servers, `vllm` or `sglang` ([which](../engines.md)).",
    )
    vllm: VllmConfig = key(VllmConfig(), "The keys of `rollout.engine: vllm`.")
    sglang: ServerConfig = key(ServerConfig(), "The same keys but `adapters`, of `rollout.engine: sglang`.")
    queries_per_step: Positive = key(64, "Queries in one step.")
    group_size: NumResponses = key(8, "Responses to each query (G), at least 2; with a value model at least 1.")
    max_new_tokens: Positive = key(1024, "A response is cut off after this number of tokens.")
    temperature: Temperature = key(1.0, "Logits are divided by it, in sampling and in all likelihoods.")
    top_p: PositiveFraction = key(1.0, "Sample from the fewest most likely tokens that together have this probability.")
    top_k: Natural = key(0, "Sample from this number of most likely tokens; 0: from all.")
    min_p: Fraction = key(0.0, "Sample from tokens at least this times as likely as the likeliest; 0: from all.")
    repetition_penalty: PositiveFloat = key(1.0, "Above 1, tokens of the prompt and the response get less likely.")
    logit_bias: LogitBias = key(
        {}, "What is added to tokens' logits, from -100 (never) to 100: `{Wait: -5, 151645: 2}`, by text or id."
    )
    stop_tokens: tuple[str, ...] = key((), "Tokens that end a response, beside those of model and chat template.")
    stop_strings: tuple[Text, ...] = key((), "Texts that end a response, with the token that completes one.")
    max_rows: Positive = key(512, "Responses decoded side by side; fewer need less memory while sampling.")
    max_staleness: Natural = key(
        0, "How many steps ahead groups may be sampled: no token is older ([staleness](../guides/staleness.md))."
    )
    too_old: Literal["drop", "refresh"] = key(
        "drop", "What becomes of a group older than that: `refresh` samples it anew."
    )
    interrupt: bool = key(True, "Publish weights in the midst of responses; `false`: once those under way have ended.")
    old_cache: Literal["recompute", "keep"] = key(
        "recompute", "What becomes, then, of what the engine has computed of them with the weights before."
    )
    in_turn: bool = key(False, "Sample and train in turn in spite of `max_staleness`: slower, and the same every time.")
    dynamic_sampling: bool = key(False, "Replace groups of equal rewards by those of the next queries (DAPO).")
    max_rounds: Positive = key(4, "The most sampling rounds in a step; after them groups of equal rewards stay.")
    overlong: Literal["keep", "mask", "penalty"] = key(
        "keep", "What happens to cut-off responses ([which](objectives.md#which-responses-train))."
    )
    overlong_margin: Fraction = key(0.2, "The fraction of `max_new_tokens` over which the penalty grows to 1.")
    segment_separator: Text | None = key(None, "The text that ends a segment, for rewards `per: segment`.")
    tools: tuple[PathText, ...] = key(
        (), "Functions that the policy may call within a response: see [tools](../guides/tools.md)."
    )
    mcp: tuple[Text, ...] = key(
        (), "[MCP servers](../guides/tools.md#mcp-servers), whose tools the policy may call: a command or an address."
    )
    environment: PathText | None = key(
        None,
        "Instead of tools: a [class](../guides/tools.md#environments) with a state for each response.",
    )
    agent: PathText | None = key(
        None, "Instead of both: a [program](../guides/agents.md) that asks for completions by OpenAI's protocol."
    )
    agent_seconds: PositiveFloat = key(600.0, "The limit in seconds of an agent's whole response.")
    max_context: Positive = key(4096, "With an agent, the most tokens of a prompt and the completion behind it.")
    history: Literal["branch", "append", "refuse"] = key(
        "branch",
        "What becomes of an earlier turn that the chat template writes in another way than it was sampled: the next "
        "one has a context of its own, or goes on behind the sampled tokens, or the run ends.",
    )
    max_turns: Positive = key(
        8, "The most turns of the policy in a response; calls of tools in the last one are not made."
    )
    tool_seconds: PositiveFloat = key(60.0, "The limit in seconds of one call of a tool.")
    tool_characters: Positive = key(4000, "A tool's result is cut off after this number of characters.")

    @model_validator(mode="before")
    @classmethod
    def _without_embedded(cls, value: Any) -> Any:
        """Leave out the section `embedded` of runs that had it, where nothing was set in it."""
        if not isinstance(value, dict) or "embedded" not in value:
            return value
        if value["embedded"] not in ({}, ServerConfig().model_dump(mode="json")):
            raise refusal("embedded is gone: that engine is a thread of the trainer; leave it out, or set engine: vllm")
        return {name: own for name, own in value.items() if name != "embedded"}

    @property
    def has_turns(self) -> bool:
        """Tell whether a response may have several turns."""
        return bool(self.tools or self.mcp) or self.environment is not None or self.agent is not None

    @property
    def is_in_trainer(self) -> bool:
        """Tell whether the trainer's own process samples, with the weights that it trains."""
        return self.engine == "embedded" and self.at_publish == "none"

    @property
    def at_publish(self) -> AtPublish:
        """The fate of the responses under way when weights are published; `none` are where training waits."""
        if self.max_staleness == 0 or self.in_turn:
            return "none"
        return self.old_cache if self.interrupt else "wait"

    @property
    def shaping(self) -> list[str]:
        """The keys by which responses are drawn from another distribution than the policy's at the temperature."""
        names = ("top_p", "top_k", "min_p", "repetition_penalty", "logit_bias")
        return [name for name in names if getattr(self, name) != type(self).model_fields[name].default]


class RewardConfig(Section):
    function: PathText = key(..., "A built-in, `module:name` or `file.py:name`: see [rewards](../guides/rewards.md).")
    weight: Weight = key(1.0, "The function's weight in the sum, at most ±10⁶.")
    per: Per = key("response", "What the function gives a number for: `response`, `segment` or `token`.")
    time_limit_seconds: PositiveFloat = key(
        60.0,
        "The limit in seconds of one call, for a group (of a verifier: for each response); 3600 for `code`, 600 for "
        "`judge` and `reward_model`.",
    )
    concurrent_calls: Positive | None = key(None, "Calls at once. By default one process a core, at most 8.")
    options: dict[str, Any] = key({}, "Further keyword arguments of the function.")
    sources: tuple[str, ...] = key((), "Of `queries.sources`, those whose responses it judges; by default all.")

    @property
    def name(self) -> str:
        """The name that the function has in metrics."""
        return self.function.rpartition(":")[2]

    @model_validator(mode="before")
    @classmethod
    def _give_time(cls, value: Any) -> Any:
        """A group's programs may take minutes for their tests, and models to load or to answer."""
        limit = LONG_SECONDS.get(str(value.get("function"))) if isinstance(value, dict) else None
        return value if limit is None else {"time_limit_seconds": limit, **value}


class KlConfig(Section):
    """The KL divergence that holds the policy near a reference model; off at coefficient 0."""

    coefficient: NonNegativeFloat = key(0.0, "The weight of the KL divergence from the reference model; 0: none.")
    estimator: Literal["k1", "k2", "k3"] = key("k3", "How the divergence is estimated from the sampled tokens.")
    place: Literal["loss", "reward"] = key("loss", "Whether the divergence is a part of the `loss` or of the `reward`.")
    reference: PathText | None = key(None, "A directory or hub id; by default the policy at the start of RL.")
    refresh_steps: Positive | None = key(None, "Steps between refreshes of the reference by the policy; `null`: none.")
    refresh_weight: PositiveFraction = key(1.0, "α of a refresh: the reference becomes α · policy + (1 - α) · itself.")


class ActorConfig(Section):
    surrogate: Name = key("clip", "The published objective; see [objectives](objectives.md).")
    importance_sampling_level: Level = key("sequence", "A ratio of each `token` (GRPO), or of the `sequence` (GSPO).")
    advantage: Advantage = key("group", "What a reward is compared with; see [objectives](objectives.md#advantages).")
    turn_credit: Literal["trajectory", "return_to_go"] = key(
        "trajectory",
        "Whether a response's turns share its advantage, or each has [one](objectives.md#turns) by what follows it.",
    )
    reward_aggregation: Literal["sum", "normalize_then_sum"] = key(
        "sum", "Whether rewards are added before or after they are [compared](objectives.md#several-rewards)."
    )
    length_norm: LengthNorm = key("own", "What divides the sum over tokens; see [norms](objectives.md#length-norms).")
    clip_low: PositiveFraction = key(3e-4, "Ratios below 1 - `clip_low` are clipped. GSPO: 3e-4; GRPO: 0.2.")
    clip_high: PositiveFloat = key(4e-4, "Ratios above 1 + `clip_high` are clipped. GSPO: 4e-4; GRPO: 0.27.")
    clip_fraction: Annotated[Number, Field(gt=0, lt=0.5)] | None = key(
        None, "Scale the clip range, step by step, so that about this fraction of tokens is clipped, such as 0.15."
    )
    dual_clip: Annotated[Finite, Field(gt=1)] = key(3.0, "For `dual_clip`: the most a ratio counts if Â < 0.")
    minirl_cap: PositiveFloat = key(5.0, "For `minirl`: the most that π_θ/π_engine counts.")
    sapo_temperature: tuple[PositiveFloat, PositiveFloat] = key((1.0, 1.05), "For `sapo`: τ if Â > 0, and τ otherwise.")
    discount: PositiveFraction = key(1.0, "Each token or segment on the way to a later reward multiplies it by this.")
    advantage_ddof: Literal[0, 1] = key(1, "The variance of n rewards is divided by n - ddof.")
    opsm_delta: PositiveFloat | None = key(None, "Drop sequences of Â < 0 with a larger mean log(π_engine/π_θ): OPSM.")
    correction: Correction = key(
        "none", "Correct for the engine's likelihoods ([how](objectives.md#corrections)); stale ones: `decoupled`."
    )
    correction_level: Literal["token", "sequence"] = key(
        "token", "Correct by each token's ratio, or by its geometric mean over the sequence."
    )
    correction_low: PositiveFloat | None = key(None, "The correction's lower bound on π_old/π_engine.")
    correction_high: PositiveFloat | None = key(None, "The correction's upper bound on π_old/π_engine. `kpop`: nats.")
    kl: KlConfig = key(KlConfig(), "The KL term from a reference model.")
    entropy_bonus: Finite = key(0.0, "The coefficient of the mean entropy of a response's tokens.")
    observation_loss: NonNegativeFloat = key(
        0.0, "The weight of the cross-entropy of what tools, an environment or an agent say to the policy; 0: none."
    )
    mini_batches: Positive = key(4, "Optimiser steps for one rollout batch; a divisor of `queries_per_step`.")
    epochs: Positive = key(1, "Passes over a rollout batch, each over the same mini-batches; π_old stays the batch's.")
    micro_batch_tokens: Positive = key(16_384, "Tokens of one forward pass; fewer need less memory in the update.")
    old_logprobs: Literal["recompute", "engine"] = key(
        "recompute", "Who computes π_old: the trainer or the engine ([why](../concepts/staleness_and_mismatch.md))."
    )
    routing_replay: Literal["none", "policy", "engine"] = key(
        "none", "The update reuses π_old's experts (`policy`) or the `engine`'s ([experts](../concepts/experts.md))."
    )
    router_aux_loss: NonNegativeFloat = key(0.0, "The weight of the loss that balances experts; 0: none.")
    gradient_checkpointing: bool = key(False, "Compute activations again in the backward pass: less memory, more time.")
    gradient_noise: bool = key(False, "Measure the gradient's signal and noise; costs a copy of it and 9 % of a step.")
    optimizer: OptimizerConfig = key(OptimizerConfig(), "AdamW and its schedule, counted in optimiser steps.")

    @model_validator(mode="before")
    @classmethod
    def _fill_in_as_published(cls, value: Any) -> Any:
        return as_published(value) if isinstance(value, dict) else value

    @property
    def title(self) -> str:
        """Return what a person calls the objective."""
        if self.surrogate == "clip":
            return {"sequence": "GSPO", "sequence_token": "GSPO-token", "token": "GRPO"}[self.importance_sampling_level]
        return PUBLISHED[self.surrogate].title

    @property
    def updates_per_step(self) -> int:
        """Optimiser steps for one rollout batch."""
        return self.epochs * self.mini_batches

    @property
    def every_sequence_trains(self) -> bool:
        """Tell whether a response without an advantage has a gradient, too."""
        return bool(self.entropy_bonus or self.observation_loss) or self.kl_in_loss or self.advantage == "gae"

    @property
    def kl_in_loss(self) -> bool:
        """Tell whether the loss has a KL term."""
        return self.kl.coefficient > 0 and self.kl.place == "loss"

    @property
    def wants_engine_experts(self) -> bool:
        """Tell whether the engine records its experts, to be replayed or to be compared with those after an update."""
        return self.routing_replay == "engine" or self.old_logprobs == "engine"


class TeacherConfig(Section):
    """A model that says how likely it finds each token of the policy's responses; off without path, url and prompt."""

    path: PathText | None = key(
        None, "A directory or hub id with a [teacher](../guides/teacher.md); by default, with `prompt`, the policy."
    )
    url: Url | None = key(
        None, "In place of a path: a vLLM server that has the [teacher](../guides/teacher.md#a-teacher-on-a-server)."
    )
    model: Text | None = key(None, "With `url`: the name by which the server knows it.")
    key_variable: Text = key(
        "OPENAI_API_KEY", "With `url`: the variable of the environment that has the server's key, if any."
    )
    prompt: str | None = key(
        None, "What the teacher reads in place of the prompt's text: `{prompt}` in it is that, `{name}` a column."
    )
    coefficient: PositiveFloat = key(1.0, "The weight of a token's log π_teacher/π as its advantage.")
    advantage_weight: NonNegativeFloat = key(
        1.0, "The weight of the advantage from rewards beside it; 0: the teacher alone, rewards are only measured."
    )

    @property
    def is_on(self) -> bool:
        """Tell whether there is a teacher."""
        return bool(self.path or self.url or self.prompt)


class CriticOptimizerConfig(OptimizerConfig):
    lr: PositiveFloat = 1e-5


class CriticConfig(Section):
    """The value model of advantage: gae."""

    trunk: Literal["own", "shared"] = key("own", "A model of its `own`, or a head on the policy's hidden states.")
    gae_gamma: Fraction = key(1.0, "The discount γ of GAE.")
    gae_lambda: Fraction = key(0.95, "The λ of GAE.")
    whiten: bool = key(True, "Bring advantages to mean 0 and standard deviation 1 over the batch's tokens.")
    clip: PositiveFloat | None = key(0.2, "How far a value may move from its old one; `null`: any distance.")
    coefficient: PositiveFloat = key(0.5, "The weight of the value loss in a shared trunk.")
    optimizer: CriticOptimizerConfig = key(CriticOptimizerConfig(), "The keys of `actor.optimizer`.")


class CheckpointConfig(Section):
    """A run is saved, too, when a signal asks it to end, and at its end."""

    every: Natural = key(0, "Steps between [checkpoints](../guides/resuming.md); 0: not by steps.")
    seconds: PositiveFloat | None = key(600.0, "The most seconds between checkpoints; `null`: not by time.")
    keep: Positive = key(2, "How many of the newest checkpoints are kept.")
    best: Text | None = key(None, "Keep the model of the best step by this [metric](metrics.md) as `best_model/`.")
    best_is: Which = key("highest", "Which value of the metric is the best.")


class DatesConfig(Section):
    """The rows of a suite from a first to a last day, both of them included."""

    column: Text = key(..., "The column with the date, as text that begins with YYYY-MM-DD.")
    first: Day = key(..., "The first day, such as 2024-10-01.")
    last: Day = key(..., "The last day.")


class SuiteConfig(Section):
    """Questions to judge a model by: where they are, how they are asked and sampled, and what judges the responses."""

    name: Annotated[str, Field(pattern=r"^[A-Za-z0-9][A-Za-z0-9._-]{0,99}$")] = key(
        ..., "The suite's name among the metrics; by default that of its file."
    )
    about: str = key("", "What the suite is and where its data come from, for a person.")
    layout: Literal["rows", "codeforces"] = key("rows", "`rows` of questions, or the folder of a CodeForces rating.")
    queries: QueriesConfig = key(QueriesConfig(), "The data and the prompt: the keys of the recipe's `queries`.")
    dates: DatesConfig | None = key(None, "Only the rows of some days.")
    samples: NumResponses = key(1, "Responses to each question.")
    temperature: Greedy = key(0.0, "The temperature of these responses; 0: the likeliest token (greedy).")
    top_p: PositiveFraction | None = key(None, "`null`: that of `rollout`.")
    top_k: Natural | None = key(None, "`null`: that of `rollout`.")
    max_new_tokens: Positive | None = key(None, "`null`: that of `rollout`.")
    stop_strings: tuple[Text, ...] | None = key(None, "`null`: that of `rollout`.")
    reward: Annotated[tuple[RewardConfig, ...], BeforeValidator(listed_rewards), Field(min_length=1)] = key(
        ..., "The verifier; further functions are measured beside it."
    )
    pass_threshold: Finite = key(1.0, "A response passes if its verifier returns at least this.")

    @model_validator(mode="after")
    def _check_samples(self) -> Self:
        return refuse_equal_samples(self)

    @property
    def sampling(self) -> dict[str, Any]:
        """The keys of `rollout` that are the suite's own, with their values."""
        names = ("temperature", "top_p", "top_k", "max_new_tokens", "stop_strings")
        given = {name: getattr(self, name) for name in names if getattr(self, name) is not None}
        return {**given, "group_size": self.samples}


class EvaluationConfig(Section):
    every: Natural = key(0, "Steps between evaluations; 0: before and after training only.")
    num_queries: Annotated[Integer, Field(ge=0, le=MAX_DRAWN)] = key(512, "Held-out queries; 0: none.")
    path: PathText | None = key(None, "A file or hub id. By default rows of `queries` are held out.")
    split: str = key("test", "The split of a hub id in `evaluation.path`.")
    samples: NumResponses = key(1, "Responses to each query.")
    temperature: Greedy = key(1.0, "The temperature of these responses; 0: the likeliest token (greedy).")
    pass_threshold: Finite = key(
        1.0, "A response passes if its verifier returns at least this ([which](../guides/evaluation.md#pass1))."
    )
    suites: tuple[SuiteConfig, ...] = key(
        (), "[Suites](../guides/evaluation.md#suites) besides: names, files, or `{suite: NAME, key: value}`."
    )

    @model_validator(mode="after")
    def _check_samples(self) -> Self:
        names = [suite.name for suite in self.suites]
        if len(set(names)) < len(names):
            raise refusal(f"two suites are named {max(names, key=names.count)!r}: give one of them another `name`")
        return refuse_equal_samples(self)


class EarlyStopConfig(Section):
    """The end of a run whose metric has reached a goal, or is no longer getting better."""

    metric: Text | None = key(None, "The [metric](metrics.md) to watch; `null`: none.")
    best_is: Which = key("highest", "Which value of the metric is the best.")
    patience: Positive | None = key(None, "End after this number of values in a row, none of them a new best.")
    min_improvement: NonNegativeFloat = key(0.0, "A new best is better than the old one by more than this.")
    goal: Finite | None = key(None, "End as soon as the metric is this good.")


class PhaseRollout(Section):
    max_new_tokens: Positive | None = key(None, "That of `rollout` from then on.")
    temperature: Temperature | None = key(None, "That of `rollout` from then on.")


class PhaseQueries(Section):
    weights: dict[str, NonNegativeFloat] | None = key(None, "That of `queries` from then on.")


class PhaseOptimizer(Section):
    lr: PositiveFloat | None = key(None, "That of `actor.optimizer` from then on; its schedule goes on.")


class PhaseActor(Section):
    clip_low: PositiveFraction | None = key(None, "That of `actor` from then on.")
    clip_high: PositiveFloat | None = key(None, "That of `actor` from then on.")
    optimizer: PhaseOptimizer = PhaseOptimizer()


class PhaseCondition(Section):
    """The condition with which a phase begins, once the one before it has begun."""

    metric: Text = key(..., "The [metric](metrics.md) that is looked at; a step without it does not count.")
    above: Finite | None = key(None, "It must be larger.")
    below: Finite | None = key(None, "It must be smaller.")
    steps: Positive = key(5, "For this number of steps in a row; the phase begins with the next one.")

    def holds(self, value: float) -> bool:
        """Tell whether it holds for a value of the metric."""
        return (self.above is None or value > self.above) and (self.below is None or value < self.below)

    @property
    def bounds(self) -> str:
        """Return such as `reward/mean above 0.5`."""
        bounds = {"above": self.above, "below": self.below}
        return f"{self.metric} {' and '.join(f'{name} {own:g}' for name, own in bounds.items() if own is not None)}"


class PhaseConfig(Section):
    """The changes at a step of a run: what a phase does not set stays as it was before."""

    from_step: Annotated[Integer, Field(ge=2)] | None = key(None, "The [phase](../guides/phases.md)'s first step.")
    when: PhaseCondition | None = key(None, "In place of `from_step`, the condition with which it begins.")
    queries: PhaseQueries = PhaseQueries()
    rollout: PhaseRollout = PhaseRollout()
    reward_weights: dict[str, Weight] = key({}, "The weights of reward functions from then on, by their names.")
    actor: PhaseActor = PhaseActor()

    @property
    def begins(self) -> str:
        """Return the words for when it begins."""
        if self.when is None:
            return f"from step {self.from_step}"
        return f"once {self.when.bounds} for {self.when.steps} step{'s' * (self.when.steps != 1)}"

    @property
    def changed(self) -> dict[str, float]:
        """The values of the recipe's keys from then on, by their dotted names."""
        rollout, actor = self.rollout, self.actor
        values = {
            "rollout.max_new_tokens": rollout.max_new_tokens,
            "rollout.temperature": rollout.temperature,
            "actor.clip_low": actor.clip_low,
            "actor.clip_high": actor.clip_high,
            "actor.optimizer.lr": actor.optimizer.lr,
            **{f"queries.weights.{name}": weight for name, weight in (self.queries.weights or {}).items()},
            **{f"reward_weights.{name}": weight for name, weight in self.reward_weights.items()},
        }
        return {name: value for name, value in values.items() if value is not None}


class TrainerConfig(Section):
    """The processes that train together: `gspo train --processes N`, or torchrun."""

    sharding: Literal["full", "hybrid", "none"] = key(
        "full", "Parameters spread over all ranks, over those of each host, or copied ([more](../cluster.md#sharding))."
    )
    timeout_seconds: PositiveFloat = key(
        45.0, "A rank that is silent, or keeps the others waiting in a collective, for so long is lost."
    )


class ClusterConfig(Section):
    """The servers that `gspo launch ray` places beside the ranks."""

    engines: Natural = key(0, "Servers of `rollout.engine`, where Ray has room; 0: they start on the host of rank 0.")
    gpus_per_engine: Natural = key(0, "The GPUs that each of them gets.")
    cpus_per_engine: Positive = key(1, "The cores that each of them gets.")


class ReportConfig(Section):
    trackers: tuple[Literal["tensorboard", "trackio", "wandb"], ...] = key(
        (), "The [trackers](../guides/tracking.md) that get the numbers and some samples."
    )
    project: Annotated[str, Field(min_length=1)] = key("gspo", "The project of trackio and wandb for the run.")
    rollouts: bool = key(True, "Write the responses: `rollouts/` and `evaluation/`.")
    tokens: bool = key(True, "Also write the log ratio of every token: half as much again in the files.")


class RecipeKeys(Section):
    """All keys of a recipe, not yet compared with each other."""

    name: Annotated[str, Field(pattern=r"^[A-Za-z0-9][A-Za-z0-9._-]{0,254}$")] = key(
        ..., "The name of the run and its directory: at most 255 letters, digits and `. _ -`."
    )
    seed: Annotated[Integer, Field(ge=0, lt=2**64)] = key(0, "The seed of initialisation, order and sampling.")
    steps: Positive = key(..., "Rollout batches to train on, each of them one step.")
    output_dir: PathText | None = key(None, "A new directory, or one to [resume](../guides/resuming.md).")
    model: ModelConfig
    cold_start: ColdStartConfig = ColdStartConfig()
    queries: QueriesConfig = QueriesConfig()
    rollout: RolloutConfig = RolloutConfig()
    reward: Annotated[tuple[RewardConfig, ...], BeforeValidator(listed_rewards)] = ()
    actor: ActorConfig = ActorConfig()
    critic: CriticConfig = CriticConfig()
    teacher: TeacherConfig = TeacherConfig()
    phases: tuple[PhaseConfig, ...] = ()
    checkpoint: CheckpointConfig = CheckpointConfig()
    evaluation: EvaluationConfig = EvaluationConfig()
    early_stop: EarlyStopConfig = EarlyStopConfig()
    hooks: tuple[PathText, ...] = key((), "Functions called after each step: see [hooks](../guides/hooks.md).")
    hook_errors: Literal["end", "warn"] = key("end", "An error of a hook ends the run, or is shown once as a warning.")
    report: ReportConfig = ReportConfig()
    trainer: TrainerConfig = TrainerConfig()
    cluster: ClusterConfig = ClusterConfig()

    @model_validator(mode="before")
    @classmethod
    def _correct_if_stale(cls, value: Any) -> Any:
        actor, rollout = (value.get(name, {}) if isinstance(value, dict) else None for name in ("actor", "rollout"))
        if not isinstance(actor, dict) or not isinstance(rollout, dict):
            return value
        return {**value, "actor": when_stale(actor, rollout.get("max_staleness"))}
