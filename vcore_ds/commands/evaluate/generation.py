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

from vcore_ds.commands.evaluate.journal import Generation, Request, StopReason
from vcore_ds.commands.evaluate.sampling import Sampling
from vcore_ds.errors import UserError
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
        self._model = load_to_answer(model, torch.bfloat16 if precision == "bf16" else torch.float32)
        self.device = self._model.device
        self.end_ids = end_token_ids(self._model.generation_config, tokenizer)
        self._longest = self._model.config.get_text_config().max_position_embeddings
        self._tokenizer, self._sampling = tokenizer, sampling

    @torch.inference_mode()
    def generate(self, requests: Sequence[Request]) -> list[Generation]:
        """An answer to each request, all in one batch.

        Raises:
            UserError: a prompt leaves the model no room.
        """
        limits = [min(request.max_new_tokens, self._longest - len(request.prompt_ids)) for request in requests]
        if min(limits) < 1:
            request = requests[limits.index(min(limits))]
            raise UserError(
                f"{request.problem_id}: found a prompt of {len(request.prompt_ids):,} tokens; expected fewer than "
                f"{self._longest:,}, the model's longest sequence"
            )
        width = max(len(request.prompt_ids) for request in requests)
        ids = torch.full((len(requests), width), self.end_ids[0])
        mask = torch.zeros_like(ids)
        for row, request in enumerate(requests):
            ids[row, width - len(request.prompt_ids) :] = torch.tensor(request.prompt_ids)
            mask[row, width - len(request.prompt_ids) :] = 1
        # All settings are given here: what the model's own generation_config.json has besides stays without effect.
        self._model.generation_config = GenerationConfig(
            max_new_tokens=max(limits),
            do_sample=False,
            eos_token_id=self.end_ids,
            pad_token_id=self.end_ids[0],
            use_cache=True,
        )
        whole = self._model.generate(
            input_ids=ids.to(self.device),
            attention_mask=mask.to(self.device),
            logits_processor=self._processors([request.seed for request in requests]),
        )
        return [self._finish(row[width:].tolist(), *pair) for row, *pair in zip(whole, requests, limits, strict=True)]

    def _finish(self, tokens: list[int], request: Request, limit: int) -> Generation:
        """The answer up to its end token; rows that end early are padded by others of their batch."""
        end = next((i for i, token in enumerate(tokens[:limit]) if token in self.end_ids), None)
        tokens = tokens[:limit] if end is None else tokens[: end + 1]
        output = self._tokenizer.decode(tokens, skip_special_tokens=True, clean_up_tokenization_spaces=False)
        assert isinstance(output, str)  # as the tokens are of one text
        at_limit: StopReason = "max_tokens" if limit == request.max_new_tokens else "model_length"
        return Generation(output, at_limit if end is None else "stop", len(tokens))

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
