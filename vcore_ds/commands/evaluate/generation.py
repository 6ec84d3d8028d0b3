"""Answers of a Hugging Face model in this process: batches, a seed for each answer, true ends and lengths."""

from collections.abc import Sequence

import torch
from torch import Tensor
from transformers import (
    GenerationConfig,
    LogitsProcessor,
    LogitsProcessorList,
    MinPLogitsWarper,
    PreTrainedTokenizerBase,
    RepetitionPenaltyLogitsProcessor,
    TemperatureLogitsWarper,
    TopKLogitsWarper,
    TopPLogitsWarper,
)

from vcore_ds.commands.evaluate.journal import Generation, Request
from vcore_ds.commands.evaluate.sampling import Sampling
from vcore_ds.errors import UserError
from vcore_ds.models.generation import generate_answers, longest_sequence
from vcore_ds.models.loading import DTYPES
from vcore_ds.models.named_model import NamedModel, end_token_ids, load_to_answer


class SampleRows(LogitsProcessor):
    """Turns the largest score into a draw from the softmax of the scores, by a generator of its own for each row.

    So an answer depends on its own seed, whatever else is in its batch: exponential noise e makes p / e largest for
    token i with probability p_i.
    """

    def __init__(self, seeds: Sequence[int], device: torch.device):
        self._generators = [torch.Generator(device).manual_seed(seed) for seed in seeds]

    def __call__(self, input_ids: Tensor, scores: Tensor) -> Tensor:
        noise = torch.empty_like(scores, dtype=torch.float32)
        for row, generator in zip(noise, self._generators, strict=True):
            row.exponential_(generator=generator)
        return scores.float() - noise.log()


class InProcessModel:
    """A base model, with its adapter where it has one, ready to generate."""

    def __init__(self, model: NamedModel, tokenizer: PreTrainedTokenizerBase, sampling: Sampling, precision: str):
        """Raises UserError where the model or its adapter cannot be loaded."""
        self._model = load_to_answer(model, DTYPES[precision])
        self.device = self._model.device
        self.end_ids = end_token_ids(self._model.generation_config, tokenizer)
        # All settings are given here: what the model's own generation_config.json has besides stays without effect.
        self._model.generation_config = GenerationConfig()
        self._tokenizer, self._sampling = tokenizer, sampling

    def generate(self, requests: Sequence[Request]) -> list[Generation]:
        """An answer to each request, all in one batch.

        Raises:
            UserError: a prompt leaves the model no room.
        """
        longest = longest_sequence(self._model)
        request = max(requests, key=lambda request: len(request.prompt_ids))
        if len(request.prompt_ids) >= longest:
            raise UserError(
                f"{request.problem_id}: found a prompt of {len(request.prompt_ids):,} tokens; expected fewer than "
                f"{longest:,}, the model's longest sequence"
            )
        answers = generate_answers(
            self._model,
            [request.prompt_ids for request in requests],
            [request.max_new_tokens for request in requests],
            GenerationConfig(do_sample=False, eos_token_id=self.end_ids, pad_token_id=self.end_ids[0], use_cache=True),
            logits_processor=self._processors([request.seed for request in requests]),
        )
        return [Generation(self._text(answer.ids), answer.stop_reason, len(answer.ids)) for answer in answers]

    def _text(self, tokens: list[int]) -> str:
        text = self._tokenizer.decode(tokens, skip_special_tokens=True, clean_up_tokenization_spaces=False)
        assert isinstance(text, str)  # as the tokens are of one text
        return text

    def _processors(self, seeds: Sequence[int]) -> LogitsProcessorList:
        sampling, chain = self._sampling, LogitsProcessorList()
        if sampling.repetition_penalty != 1.0:
            chain.append(RepetitionPenaltyLogitsProcessor(sampling.repetition_penalty))
        if sampling.is_greedy:
            return chain
        chain.append(TemperatureLogitsWarper(sampling.temperature))
        if sampling.top_k > 0:
            chain.append(TopKLogitsWarper(sampling.top_k))
        if sampling.top_p < 1.0:
            chain.append(TopPLogitsWarper(sampling.top_p))
        if sampling.min_p > 0.0:
            chain.append(MinPLogitsWarper(sampling.min_p))
        chain.append(SampleRows(seeds, self.device))
        return chain
