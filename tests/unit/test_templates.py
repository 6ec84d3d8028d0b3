"""Conversations rendered with the chat templates of real models: what is supervised, and the prompts of both phases."""

import copy
import re
from collections.abc import Iterator
from contextlib import suppress
from itertools import product
from typing import Any

import numpy as np
import pytest
from jinja2 import TemplateError
from transformers import PreTrainedTokenizerFast

from tests.helpers import conversations
from tests.helpers.template_table import AGAIN, ASK, CALLS, NATIVE, RESULT, TOOLS, apply_template
from tests.helpers.templates import SPECIAL, decode_supervised_spans, make_template_tokenizer
from tests.helpers.tokenizer import CHATML, make_tokenizer
from vcore_ds.data.answers import code_prompt, math_prompt
from vcore_ds.data.conversations import Conversation, render_conversation, render_prompt
from vcore_ds.data.messages import Malformed
from vcore_ds.data.prepare.rows import read_chat_row
from vcore_ds.data.templates import find_end, match_special_tokens

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
    # Which it writes before the last turn alone: the model would not have generated an earlier one so.
    turns = ("user", "2 + 2?"), ("assistant", "Four"), ("user", "And in digits?"), ("assistant", "4")
    assert decode_supervised_spans("qwen3", tokenize("qwen3", *turns)) == [target]
    # A prompt that always opens thinking, as that of Qwen3's thinking models of July 2025, begins the block.
    opens = copy.deepcopy(make_template_tokenizer("qwen3"))
    opens.chat_template = re.sub(
        r"(?s){%- if enable_thinking is.*?endif %}", r"{{- '<think>\\n' }}", opens.chat_template
    )
    item = render_conversation(Conversation([ASK, {"role": "assistant", "content": "4"}]), opens)
    assert [item.text[slice(*span)] for span in item.spans] == [target.removeprefix("<think>\n")]
    assert item.notices == {"without_thinking": 1}


def test_thinking_that_a_template_drops_before_a_last_question_is_context() -> None:
    sequence = tokenize("qwen3", ("user", "2 + 2?"), ("assistant", THINKING), ("user", "Thanks."))
    assert not sequence.supervised.any() and "Okay" not in make_template_tokenizer("qwen3").decode(sequence.input_ids)


def test_an_answer_without_thinking_is_no_target_after_a_prompt_that_opens_thinking() -> None:
    assert not tokenize("deepseek_r1_distill", ("user", "2 + 2?"), ("assistant", "4")).supervised.any()


THOUGHT = [
    {"role": "user", "content": "2 + 2?"},
    {"role": "assistant", "content": "Four.", "reasoning_content": "Hm."},
]
BEGIN, END = "<|im_start|>assistant\n", "<|im_end|>"
PROMPT = f"<|im_start|>user\n2 + 2?{END}\n{BEGIN}"
WITHOUT_THINKING = CHATML.replace("m.content", "m.content.split('</think>')[-1].strip()")
FORMS = {
    "the prompt opens thinking without a line break": (
        WITHOUT_THINKING.replace("assistant\n", "assistant\n<think>"),
        PROMPT + "<think>",
        f"\nHm.\n</think>\n\nFour.{END}",
    ),
    "a key is written twice, so thinking is in the content": (
        CHATML.replace("m.content", "(m.thinking or '') + (m.thinking or '') + m.content"),
        PROMPT,
        f"<think>\nHm.\n</think>\n\nFour.{END}",
    ),
    "the template writes the first tag": (
        CHATML.replace("m.content", "('<think>\n' if '</think>' in m.content else '') + m.content"),
        PROMPT,
        f"<think>\nHm.\n</think>\n\nFour.{END}",
    ),
    "the next turn begins with white space": (
        "{% for m in messages %}{{ '\n<|im_start|>' + m.role + '\n' + (m.thinking or '') + m.content }}{% endfor %}"
        "{{ '\n<|im_start|>assistant\n' if add_generation_prompt }}",
        "\n<|im_start|>user\n2 + 2?\n<|im_start|>assistant\n",
        "Hm.Four.\n<|im_start|>",
    ),
    "an earlier turn is written otherwise, so none shows what follows it": (
        "{% for m in messages %}{{ '<|im_start|>' + ('=' if loop.last and m.role == 'assistant' else '-') }}"
        "{{ (m.thinking or '') + m.content }}{% endfor %}{{ '<|im_start|>=' if add_generation_prompt }}",
        "<|im_start|>-2 + 2?<|im_start|>=",
        "Hm.Four.",
    ),
    "the end of the text is that of the turn": (
        "{% for m in messages %}{{ (m.thinking or '') + m.content }}"
        "{{ eos_token + '<|endoftext|>' if loop.last and m.role == 'assistant' }}{% endfor %}",
        "2 + 2?",
        f"Hm.Four.{END}<|endoftext|>",
    ),
}


@pytest.mark.parametrize(("template", "prompt", "turn"), FORMS.values(), ids=FORMS)
def test_forms_of_templates_that_few_models_have(template: str, prompt: str, turn: str) -> None:
    item = render_conversation(Conversation(THOUGHT), make_tokenizer(template))
    assert item.text.rstrip() == prompt + turn and [item.text[slice(*span)] for span in item.spans] == [turn]


def test_thinking_that_fits_no_turn_of_the_template_is_refused() -> None:
    """Its turns begin otherwise than its prompt, and drop thinking."""
    template = WITHOUT_THINKING.replace("assistant\n", "assistant, think\n")
    with pytest.raises(Malformed, match="leaves out the thinking of message 2"):
        render_conversation(Conversation(THOUGHT), make_tokenizer(template))


def test_a_text_that_a_template_writes_twice_is_refused() -> None:
    with pytest.raises(Malformed, match="repeats .*message 2"):
        render_conversation(Conversation(THOUGHT), make_tokenizer(CHATML.replace("m.content", "m.content * 2")))


def test_special_tokens_are_the_declared_ones_and_the_longest_matches() -> None:
    backend = make_tokenizer(special_tokens=["<|end", "<|end|>"], end=None, pad=None).backend_tokenizer
    backend.add_tokens(["</tool>", "<|stop|>"])  # ordinary ones, of which one ends turns
    tokenizer = PreTrainedTokenizerFast(tokenizer_object=backend, eos_token="<|stop|>")
    assert match_special_tokens(tokenizer).findall("a<|end|>b<|endc</tool><|stop|>") == ["<|end|>", "<|end", "<|stop|>"]
    assert find_end(tokenizer, "a<|end|>") == "<|end|>" and find_end(tokenizer, "a</tool>") == ""


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


# Every form of conversation, against the template's own rendering

SHAPES = ("A", "AuA", "CrA", "CrCrA", "C", "CrC", "CrAuA", "AuCrA", "ArA", "AtA")
"""Turns behind a question: Answer, Call, call As text; result of a tool, also as text of the user, another question."""
BESIDE, RESULT_TEXT = "Let me see.", {"role": "user", "content": "<tool_response>\n18\n</tool_response>"}


def make_conversations() -> Iterator[tuple[list[dict[str, Any]], bool]]:
    """Yield messages, with the thinking of a turn as `t`, and whether the row has tools (and then a system message)."""
    for shape, thinking, beside, has_tools in product(SHAPES, ("none", "all", "last", "others"), ("", BESIDE), (0, 1)):
        if (beside and "C" not in shape) or (thinking in ("last", "others") and len(shape) == 1):
            continue
        messages = [{"role": "system", "content": "Be brief."}] * has_tools + [ASK]
        for i, kind in enumerate(shape, start=1):
            others = {"u": AGAIN, "r": RESULT, "t": RESULT_TEXT}
            turn = {"role": "assistant", "content": f"It has {i} degrees." if kind == "A" else beside}
            turn |= {"tool_calls": CALLS} if kind == "C" else {}
            if thinking == "all" or thinking == ("last" if i == len(shape) else "others"):
                turn["t"] = f"Think {i}."
            messages.append(others.get(kind, turn))
        yield messages, bool(has_tools)


def list_prompts(name: str, messages: list[dict[str, Any]], tools: Any) -> dict[tuple[int, bool], str]:
    """Prompt of each turn of the assistant, with and without thinking, of those that the template takes."""
    prompts = {}
    for turn, thinks in product(range(1, len(messages)), (True, False)):
        with suppress(TemplateError, TypeError):
            if messages[turn]["role"] == "assistant":
                options = {"add_generation_prompt": True, "enable_thinking": thinks}
                prompts[turn, thinks] = apply_template(name, messages[:turn], tools, **options)
    return prompts


@pytest.mark.parametrize("name", NATIVE)
def test_what_is_learned_of_any_conversation_is_the_templates_own_text_behind_its_own_prompt(name: str) -> None:
    num_learned = 0
    for messages, has_tools in make_conversations():
        tools, last = TOOLS if has_tools else None, len(messages) - 1
        row = {"messages": [{"reasoning_content" if k == "t" else k: v for k, v in m.items()} for m in messages]}
        try:
            item = render_conversation(read_chat_row(row | {"tools": tools}), make_template_tokenizer(name))
        except Malformed:
            continue
        prompts, learned = list_prompts(name, messages, tools), []
        for span in item.spans:
            (turn,) = {turn for (turn, _), prompt in prompts.items() if prompt == item.text[: span[0]]}
            learned.append(turn)
            text, own = item.text[slice(*span)], messages[turn]
            for message in messages:  # all of this turn and nothing of another one
                texts = [message.get("t"), message["content"] if message["content"] != BESIDE else None]
                assert all((part in text) == (message is own) for part in texts if part), text
            assert text.count("Paris") == ("tool_calls" in own) and text.count(BESIDE) == (own["content"] == BESIDE), (
                text
            )
        num_learned += len(learned)
        assert "without_end" not in item.notices
        # The text is the template's, or its last turn is, behind its prompt and with thinking that the template drops.
        wholes = [apply_template(name, messages, tools, enable_thinking=thinks).rstrip() for thinks in (True, False)]
        if not any(item.text.rstrip() in (whole, whole + "<|user|>", whole + "<|observation|>") for whole in wholes):
            before = apply_template(name, messages[:last], tools)
            turn = item.text.removeprefix(before).rstrip()  # with what the prompt ends with
            thinking = NATIVE[name].turn.partition("{a}")[0].format(t=messages[last].get("t"))
            dropped = "", thinking, f"<think>\n{thinking}", f"<think>\n{thinking.rstrip()}"
            assert any(wholes[0].endswith(turn.replace(part, "", 1)) for part in dropped), item.text
        if last not in learned:  # an answer without thinking behind a prompt that opens it
            assert "t" not in messages[last] and prompts[last, False].rstrip().endswith("<think>"), item.text
    assert num_learned > 0
