"""inspect's two ways to the model: in this process, and through a server. Both keep a journal of what was answered."""

import anyio
from anyio import to_thread
from inspect_ai.model import (
    ChatCompletionChoice,
    ChatMessage,
    ChatMessageAssistant,
    GenerateConfig,
    Model,
    ModelAPI,
    ModelOutput,
    ModelUsage,
    modelapi,
)
from inspect_ai.model._model_call import ModelCall
from inspect_ai.model._providers.openai_compatible_completions import OpenAICompatibleCompletionsAPI
from inspect_ai.tool import ToolChoice, ToolInfo
from tenacity import wait_exponential

from vcore_ds.commands.evaluate.generation import InProcessModel
from vcore_ds.commands.evaluate.journal import Generation, Journal, Request
from vcore_ds.commands.evaluate.server import Server, api_key
from vcore_ds.errors import UserError

KEY = "vcore_ds_request"
"""Key of a message's metadata: the number of its request. Prompts are given whole, so a message is one prompt."""

REQUEST_SECONDS = 3_600.0
"""Longest time for one answer of a server: tens of thousands of tokens on a busy GPU take many minutes."""

RETRY_SECONDS = (1.0, 30.0)
"""Shortest and longest wait before a failed request is sent again."""

TRUNCATED = ("max_tokens", "model_length")
"""Stop reasons of an answer that was cut off."""


def request_number(messages: list[ChatMessage]) -> int:
    """Which request a prompt belongs to."""
    (message,) = messages
    assert message.metadata is not None
    return message.metadata[KEY]


class InProcessAPI(ModelAPI):
    """Batches are consecutive requests, whatever order inspect asks in: a resumed evaluation has the same ones, and so
    the same answers to the last bit."""

    def __init__(
        self, name: str, model: InProcessModel, requests: list[Request], batch_size: int, journal: Journal
    ) -> None:
        super().__init__(name)
        self._model, self._requests, self._batch_size, self._journal = model, requests, batch_size, journal
        self._lock = anyio.Lock()
        self.problem: Exception | None = None
        """What ended the evaluation: inspect reports it as text."""

    async def generate(
        self, input: list[ChatMessage], tools: list[ToolInfo], tool_choice: ToolChoice, config: GenerateConfig
    ) -> ModelOutput:
        number = request_number(input)
        async with self._lock:
            if self.problem is not None:  # others were waiting when it came
                raise self.problem
            if self._journal.get(self._requests[number]) is None:
                try:
                    await to_thread.run_sync(self._answer_batch, number // self._batch_size)
                except Exception as error:
                    self.problem = self.problem or error
                    raise
        generation = self._journal.get(self._requests[number])
        assert generation is not None
        return _output(self.model_name, self._requests[number], generation)

    def _answer_batch(self, batch: int) -> None:
        requests = self._requests[batch * self._batch_size : (batch + 1) * self._batch_size]
        self._journal.append(requests, self._model.generate(requests))


class ServerAPI(OpenAICompatibleCompletionsAPI):
    """An OpenAI-compatible server's /completions: the prompt is ours, to the token, and so is every sampling field."""

    def __init__(self, server: Server, requests: list[Request], journal: Journal) -> None:
        super().__init__(
            model_name=server.name,
            base_url=server.url,
            api_key=api_key(),
            service="vcore",
            client_timeout=REQUEST_SECONDS,
            max_retries=0,  # of the client; inspect has its own, which the session bounds
        )
        self._server, self._requests, self._journal = server, requests, journal
        self.problem: Exception | None = None
        """What ended the evaluation: the last error of a request."""

    @property
    def takes_ids(self) -> bool:
        return self._server.takes_ids

    def service_model_name(self) -> str:
        return self._server.name

    def retry_wait(self) -> wait_exponential:
        shortest, longest = RETRY_SECONDS
        return wait_exponential(multiplier=shortest, min=shortest, max=longest)

    async def generate(
        self, input: list[ChatMessage], tools: list[ToolInfo], tool_choice: ToolChoice, config: GenerateConfig
    ) -> ModelOutput | tuple[ModelOutput | Exception, ModelCall]:
        request = self._requests[request_number(input)]
        found = self._journal.get(request)
        if found is not None:
            return _output(self.model_name, request, found)
        config = config.model_copy(
            update={
                "seed": request.seed,
                "max_tokens": request.max_new_tokens,
                "extra_body": self._server.extra_body(request.max_new_tokens),
            }
        )
        try:
            answer = await super().generate(input, tools, tool_choice, config)
            output = answer[0] if isinstance(answer, tuple) else answer
            if isinstance(output, Exception):
                raise output
            self._journal.append([request], [self._generation(output)])
        except Exception as error:
            self.problem = error
            raise
        return answer

    def _generation(self, output: ModelOutput) -> Generation:
        """Raises UserError where the server does not say how an answer ended and how long it is."""
        reason = output.stop_reason
        if not output.choices or output.usage is None or reason not in ("stop", "max_tokens", "model_length"):
            found = reason if output.choices else "no choice"
            raise UserError(
                f"--url: {self._server.url}: found an answer with finish reason {found} and usage {output.usage}; "
                "expected `stop` or `length`, and the number of tokens. Use another server"
            )
        return Generation(output.completion, reason, output.usage.output_tokens)


def inspect_model(api: "InProcessAPI | ServerAPI", config: GenerateConfig) -> Model:
    """What inspect evaluates. It asks every API for the name that a decorator of its gives to a class; this one is an
    instance that is there already."""
    named = modelapi(name="vcore_ds")(lambda: lambda: api)
    return Model(named(), config)  # type: ignore[call-arg]  # as it is no class, it needs no name


def _output(name: str, request: Request, generation: Generation) -> ModelOutput:
    message = ChatMessageAssistant(content=generation.output, model=name, source="generate")
    num_prompt = len(request.prompt_ids)
    return ModelOutput(
        model=name,
        choices=[ChatCompletionChoice(message=message, stop_reason=generation.stop_reason)],
        usage=ModelUsage(
            input_tokens=num_prompt,
            output_tokens=generation.num_tokens,
            total_tokens=num_prompt + generation.num_tokens,
        ),
    )
