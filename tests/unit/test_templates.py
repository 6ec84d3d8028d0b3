"""Conversations rendered with the chat templates of real models: what is supervised, and the prompts of both phases."""

import copy

import numpy as np
import pytest
from transformers import PreTrainedTokenizerFast

from tests.helpers import conversations
from tests.helpers.templates import SPECIAL, decode_supervised_spans, make_template_tokenizer
from vcore_ds.data.answers import code_prompt, math_prompt
from vcore_ds.data.conversations import Conversation, render_conversation, render_prompt

THINKING = "<think>\nOkay, 2 and 2.\n\nThat is four.\n</think>\n\nIt is \\boxed{4}."

OPENED_BY_PROMPT = {"qwen3_5_think", "deepseek_r1_distill"}


def tokenize(name: str, *messages: tuple[str, str]):
    turns = [{"role": role, "content": content} for role, content in messages]
    return conversations.tokenize([turns], make_template_tokenizer(name))[0]


@pytest.mark.parametrize("prompt", [math_prompt("What is $2 + 2$?"), code_prompt("Add two numbers.\n\nInput\n\n2 2")])
@pytest.mark.parametrize("name", SPECIAL)
def test_the_training_prompt_is_the_evaluation_prompt(name: str, prompt: str) -> None:
    """Text and ids, against the call that vLLM's `LLM.chat` makes with the paper's `enable_thinking=True`."""
    tokenizer, messages = make_template_tokenizer(name), [{"role": "user", "content": prompt}]
    sequence = tokenize(name, ("user", prompt), ("assistant", THINKING))
    num_prompt_tokens = int(np.flatnonzero(sequence.supervised)[0])
    in_training = sequence.input_ids[:num_prompt_tokens]
    at_evaluation = tokenizer.apply_chat_template(
        messages, add_generation_prompt=True, enable_thinking=True, return_dict=False
    )
    assert in_training.tolist() == at_evaluation
    assert tokenizer(render_prompt(messages, tokenizer), add_special_tokens=False)["input_ids"] == at_evaluation
    assert sequence.supervised[num_prompt_tokens:].sum() >= len(THINKING) // 2
    assert prompt in tokenizer.decode(in_training)
    assert render_prompt(messages, tokenizer).rstrip().endswith("<think>") == (name in OPENED_BY_PROMPT)


@pytest.mark.parametrize(
    ("name", "answer"),
    [(name, THINKING) for name in SPECIAL] + [(name, "four") for name in SPECIAL if name not in OPENED_BY_PROMPT],
)
def test_a_system_message_reaches_the_prompt_in_training_as_in_evaluation(name: str, answer: str) -> None:
    """Mistral's template writes it only where no answer follows."""
    messages = [{"role": "system", "content": "Be brief."}, {"role": "user", "content": "2 + 2?"}]
    sequence = tokenize(name, ("system", "Be brief."), ("user", "2 + 2?"), ("assistant", answer))
    first = int(np.flatnonzero(sequence.supervised)[0])
    ids = make_template_tokenizer(name).apply_chat_template(messages, add_generation_prompt=True, return_dict=False)
    assert sequence.input_ids[:first].tolist() == ids
    assert "Be brief." in make_template_tokenizer(name).decode(ids)


def test_the_space_that_mistral_7b_puts_before_an_answer_is_kept() -> None:
    """Its template differs from Nemo's in two spaces; with a system message the turn is written by us."""
    nemo = make_template_tokenizer("mistral_nemo")
    template = nemo.chat_template.replace('{{- message["content"] + eos', '{{- " " + message["content"] + eos')
    spaced = copy.deepcopy(nemo)
    spaced.chat_template = template.replace('"[INST]"', '"[INST] "')
    turns = [{"role": role, "content": text} for role, text in [("user", "2?"), ("assistant", "four")]]
    for messages in (turns, [{"role": "system", "content": "Be brief."}, *turns]):
        rendered = render_conversation(Conversation(messages), spaced)
        assert rendered.text.endswith("2?[/INST] four</s>")
        assert [rendered.text[slice(*span)] for span in rendered.spans] == [" four</s>"]


def test_an_answer_without_thinking_gets_the_empty_block_of_its_template() -> None:
    (target,) = decode_supervised_spans("qwen3", tokenize("qwen3", ("user", "2 + 2?"), ("assistant", "4")))
    assert target == "<think>\n\n</think>\n\n4<|im_end|>"


def test_an_answer_without_thinking_is_no_target_after_a_prompt_that_opens_thinking() -> None:
    assert not tokenize("deepseek_r1_distill", ("user", "2 + 2?"), ("assistant", "4")).supervised.any()


def test_a_template_that_prints_the_date_prints_the_same_one_every_day() -> None:
    prompt = render_prompt([{"role": "user", "content": "q"}], make_template_tokenizer("llama3_1"))
    assert "Today Date: 26 Jul 2024" in prompt
    dated = PreTrainedTokenizerFast(
        tokenizer_object=make_template_tokenizer("llama3_1").backend_tokenizer,
        chat_template="{{ date_string if date_string is defined else strftime_now('%d %b %Y') }}",
    )
    assert render_prompt([{"role": "user", "content": "q"}], dated) == "26 Jul 2024"


def test_the_papers_prompts_are_verbatim() -> None:
    assert math_prompt("{Q}") == (
        "You are a helpful and accurate assistant for solving the following math problem:\n{Q}\n\n"
        "Please reason step by step, and put the correct answer within \\boxed{} at last."
    )
    lines = code_prompt("{Q}").split("\n")
    assert lines[0].startswith("You are an expert competitive programmer.") and lines[0].endswith("outputs.")
    assert lines[1].endswith("then provide a complete implementation in c++17.")
    assert lines[2:5] == [
        "",
        "Your solution must read input from standard input (cin) and write output to standard output (cout).",
        "Do not include any debug prints or additional output.",
    ]
    assert lines[5:] == [
        "",
        "Put your final solution within a single code block:",
        "```cpp",
        "<your code here>",
        "```",
        "",
        "# Problem",
        "{Q}",
        "",
        "Now solve the problem and return the code.",
    ]
