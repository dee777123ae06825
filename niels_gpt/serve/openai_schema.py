"""The bodies of requests to OpenAI's API, and their checks. Parameters that no model here can honor are refused."""

from __future__ import annotations

from abc import abstractmethod
from typing import Annotated, Any, Literal

from pydantic import BaseModel, ConfigDict, Field, field_validator, model_validator

from niels_gpt.inference.sampling import REPETITION_PENALTIES, Sampling

MOST_KEYS = 64
"""Most keys of an object with named parameters."""
MOST_BIASES = 1024
Id = Annotated[int, Field(ge=0)]
Text = Annotated[str, Field(max_length=2**24)]
# fail_fast: otherwise pydantic reports each item that is wrong, of a list of a million items as gigabytes of errors.
Ids = Annotated[list[Id], Field(fail_fast=True, min_length=1)]
Prompts = Text | Annotated[list[Text], Field(fail_fast=True, min_length=1)] | Ids
PromptsOrIds = Prompts | Annotated[list[Ids], Field(fail_fast=True, min_length=1)]
NO_TOOLS = "tools are not supported: these models cannot call functions"
NO_LIMIT = -1
"""`max_tokens` of a request without a limit: that of the server applies."""
Stop = Annotated[str, Field(min_length=1, max_length=256)]


class Parameters(BaseModel):
    """An object with named parameters: of exact types, without other names."""

    model_config = ConfigDict(strict=True, extra="forbid", allow_inf_nan=False, protected_namespaces=())

    @model_validator(mode="before")
    @classmethod
    def _few_keys(cls, value: Any) -> Any:
        """Refuse many keys at once: pydantic would report each unknown one."""
        if isinstance(value, dict) and len(value) > MOST_KEYS:
            raise ValueError(f"an object has {len(value)} keys, more than {MOST_KEYS}, the most that are read")
        return value


class _Body(Parameters):
    model: Annotated[str, Field(max_length=300)]
    user: str | None = Field(None, description="Ignored.")


class StreamOptions(Parameters):
    """`stream_options` of a streaming request."""

    include_usage: bool = False
    include_obfuscation: bool = Field(False, description="Ignored.")


class SamplingParameters(Parameters):
    """How tokens are chosen."""

    temperature: float | None = Field(None, ge=0, le=2, description="0 is greedy; default 1.")
    top_p: float | None = Field(None, gt=0, le=1)
    top_k: int | None = Field(
        None, ge=-1, le=2**31, description="An addition to OpenAI's API; default, -1 and 0: all tokens."
    )
    min_p: float | None = Field(None, ge=0, le=1, description="An addition to OpenAI's API.")
    repetition_penalty: float | None = Field(
        None, ge=REPETITION_PENALTIES[0], le=REPETITION_PENALTIES[1], description="An addition to OpenAI's API."
    )
    seed: int | None = Field(None, ge=-(2**63), le=2**63 - 1, description="The same seed gives the same text.")

    @property
    def sampling(self) -> Sampling:
        """These parameters as the engine reads them."""
        temperature = 1.0 if self.temperature is None else self.temperature
        top_k = None if self.top_k in (None, -1, 0) else self.top_k
        penalty = 1.0 if self.repetition_penalty is None else self.repetition_penalty
        return Sampling(temperature, top_k, self.top_p, self.min_p, penalty)


class SampledRequest(_Body, SamplingParameters):
    n: int | None = Field(None, ge=1, le=128)
    best_of: int | None = Field(None, description="Only 1, or n.")
    stop: Stop | Annotated[list[Stop], Field(fail_fast=True, max_length=4)] | None = None
    stream: bool | None = None
    stream_options: StreamOptions | None = None
    presence_penalty: float | None = Field(None, ge=-2, le=2)
    frequency_penalty: float | None = Field(None, ge=-2, le=2)
    logit_bias: dict[str, Annotated[float, Field(ge=-100, le=100)]] | None = Field(None, max_length=MOST_BIASES)
    # Accepted without effect, since clients send them by default.
    store: bool | None = Field(None, description="Ignored: nothing is stored.")
    metadata: dict[str, Any] | None = Field(None, description="Ignored.")
    service_tier: str | None = Field(None, description="Ignored.")
    safety_identifier: str | None = Field(None, description="Ignored.")
    prompt_cache_key: str | None = Field(None, description="Ignored: every shared prefix is cached.")

    @field_validator("logit_bias", mode="before")
    @classmethod
    def _few_biases(cls, bias: Any) -> Any:
        if isinstance(bias, dict) and len(bias) > MOST_BIASES:  # before pydantic reports each that is wrong
            raise ValueError(f"at most {MOST_BIASES} biases are possible, got {len(bias)}")
        return bias

    @field_validator("logit_bias")
    @classmethod
    def _ids(cls, bias: dict[str, float] | None) -> dict[str, float] | None:
        for token in bias or ():
            if not (token.isascii() and token.isdigit() and len(token) < 10):
                raise ValueError(f"a key must be the id of a token, got {token[:40]!r}")
        return bias

    @model_validator(mode="after")
    def _possible(self) -> SampledRequest:
        if self.stream_options is not None and not self.stream:
            raise ValueError("stream_options needs stream: true")
        if self.best_of not in (None, 1, self.n or 1):
            raise ValueError("best_of is not supported: ask for n continuations and choose one")
        return self

    @property
    @abstractmethod
    def scores(self) -> int | None:
        """How many other tokens are reported with each token; None: tokens are not scored."""

    @property
    def include_usage(self) -> bool:
        """Whether the last event of a stream has the usage."""
        return self.stream_options is not None and self.stream_options.include_usage

    @property
    def engine_options(self) -> dict[str, Any]:
        """What `Engine.submit` needs beside the sampling."""
        bias = {int(token): value for token, value in (self.logit_bias or {}).items()}
        given = {"presence_penalty": self.presence_penalty, "frequency_penalty": self.frequency_penalty}
        options = {name: value for name, value in {**given, "logit_bias": bias}.items() if value}
        return options if self.scores is None else {**options, "logprobs": self.scores}

    @property
    def stops(self) -> list[str]:
        """The stop sequences."""
        return [self.stop] if isinstance(self.stop, str) else list(self.stop or ())


class ContentPart(Parameters):
    """A part of a message; only text is supported."""

    type: Literal["text", "refusal"]
    text: str | None = None
    refusal: str | None = None

    @model_validator(mode="after")
    def _has_its_text(self) -> ContentPart:
        if (self.text if self.type == "text" else self.refusal) is None:
            raise ValueError(f"a part of type {self.type} needs {self.type}")
        return self


class ChatMessage(Parameters):
    """A turn of a conversation."""

    role: Literal["system", "developer", "user", "assistant"]
    content: str | Annotated[list[ContentPart], Field(fail_fast=True)]
    name: str | None = Field(None, description="Ignored.")
    refusal: str | None = Field(None, description="Ignored.")
    annotations: list[Any] | None = Field(None, max_length=0)
    audio: None = None
    function_call: None = None
    tool_calls: list[Any] | None = Field(None, max_length=0)

    @model_validator(mode="before")
    @classmethod
    def _no_tools(cls, message: Any) -> Any:
        """Refuse a message with calls before its content, which is null, is looked at."""
        if isinstance(message, dict) and (message.get("tool_calls") or message.get("function_call")):
            raise ValueError(f"the message calls a tool: {NO_TOOLS}; leave out messages with tool_calls")
        return message

    def as_turn(self) -> dict[str, str]:
        """The message with one text and a role that models know."""
        parts = self.content
        text = parts if isinstance(parts, str) else "".join((part.text or part.refusal or "") for part in parts)
        return {"role": "system" if self.role == "developer" else self.role, "content": text}


Messages = Annotated[list[ChatMessage], Field(fail_fast=True, min_length=1, max_length=100_000)]


class ChatRequest(SampledRequest):
    """The body of POST /v1/chat/completions."""

    messages: Messages
    max_tokens: int | None = Field(None, ge=NO_LIMIT, description="-1: as many as the server allows.")
    max_completion_tokens: int | None = Field(None, ge=NO_LIMIT, description="As max_tokens.")
    logprobs: bool | None = None
    top_logprobs: int | None = Field(None, ge=0, le=20)
    continue_final_message: bool = Field(
        False, description="Continue the last message, which is the assistant's. An addition to OpenAI's API."
    )
    response_format: dict[str, Any] | None = Field(None, description="Only the type text is supported.")
    tools: list[Any] | None = Field(None, description="Not supported.")
    tool_choice: Any = Field(None, description="Not supported.")
    functions: list[Any] | None = Field(None, description="Not supported.")
    function_call: Any = Field(None, description="Not supported.")
    parallel_tool_calls: bool | None = Field(None, description="Ignored.")
    modalities: Annotated[list[str], Field(fail_fast=True)] | None = Field(None, description="Only text is supported.")
    reasoning_effort: str | None = Field(None, description="Ignored.")
    verbosity: str | None = Field(None, description="Ignored.")

    @field_validator("max_tokens", "max_completion_tokens")
    @classmethod
    def _not_zero(cls, value: int | None) -> int | None:
        if value == 0:
            raise ValueError(f"must be at least 1, or {NO_LIMIT} for as many as the server allows")
        return value

    @field_validator("response_format")
    @classmethod
    def _text_only(cls, value: dict[str, Any] | None) -> dict[str, Any] | None:
        if value not in (None, {"type": "text"}):
            raise ValueError(
                "response_format is not supported: these models cannot be held to a format; leave it out, or send "
                '{"type": "text"}'
            )
        return value

    @field_validator("tools", "functions", "tool_choice", "function_call")
    @classmethod
    def _no_tools(cls, value: Any) -> Any:
        if value not in (None, [], "none", "auto"):
            raise ValueError(f"{NO_TOOLS}; leave it out")
        return value

    @field_validator("modalities")
    @classmethod
    def _no_audio(cls, value: list[str] | None) -> list[str] | None:
        if value not in (None, ["text"]):
            raise ValueError('only ["text"] is supported')
        return value

    @model_validator(mode="after")
    def _fit_together(self) -> ChatRequest:
        if self.top_logprobs and not self.logprobs:
            raise ValueError("top_logprobs needs logprobs: true")
        if None not in (self.max_tokens, self.max_completion_tokens) and self.max_tokens != self.max_completion_tokens:
            raise ValueError("max_tokens and max_completion_tokens differ: give one of them")
        return self

    @property
    def scores(self) -> int | None:
        return (self.top_logprobs or 0) if self.logprobs else None

    @property
    def most_tokens(self) -> int | None:
        """The longest reply that was asked for."""
        return self.max_completion_tokens or self.max_tokens


class CompletionRequest(SampledRequest):
    """The body of POST /v1/completions."""

    prompt: PromptsOrIds
    max_tokens: int | None = Field(None, ge=NO_LIMIT, description="Default 16; 0 needs echo; -1: as many as allowed.")
    logprobs: int | None = Field(None, ge=0, le=20)
    echo: bool | None = None
    suffix: str | None = Field(None, description="Not supported.")

    @model_validator(mode="after")
    def _supported(self) -> CompletionRequest:
        if self.suffix:
            raise ValueError("suffix is not supported: these models continue a text, they do not fill gaps")
        if self.max_tokens == 0 and not self.echo:
            raise ValueError("max_tokens must be at least 1 without echo")
        return self

    @property
    def scores(self) -> int | None:
        return self.logprobs


class EmbeddingRequest(_Body):
    """The body of POST /v1/embeddings."""

    input: PromptsOrIds
    encoding_format: Literal["float", "base64"] | None = None
    dimensions: int | None = Field(None, ge=1, description="The width of the model, or left out.")


def as_prompts(value: str | list[str] | list[int] | list[list[int]]) -> list[str | list[int]]:
    """Return `prompt` or `input` as a list of texts and lists of ids."""
    if isinstance(value, str):
        return [value]
    if all(isinstance(item, int) for item in value):
        return [[item for item in value if isinstance(item, int)]]
    return [item for item in value if not isinstance(item, int)]
