"""The section `data` of a recipe: what is read, which of it is kept, and how."""

from typing import Annotated, Literal

from pydantic import Field, Strict

from vcore_ds.config.sections import Name, NumTokens, PathText, Positive, Section, Text

COLUMNS = "messages conversations prompt completion instruction input output history thinking system tools".split()
"""Columns of conversations that are read."""
ColumnName = Annotated[str, Field(pattern=f"^({'|'.join(COLUMNS)})$")]


MANIFEST = "manifest.json"
"""File by which a folder is a token store."""


class KeepConfig(Section):
    """Selects the traces of data.train_path to train on, by the scores of `vcore-ds score`."""

    scores: PathText
    """Folder that `vcore-ds score` wrote for this data, tokenizer and model, relative to the working directory."""
    set: Name | None = None
    """The trusted set (the validation or target set of LESS) whose scores are used; null if there is one set."""
    by: Literal["mean", "sum"] = "mean"
    """A trace's utility: `mean` over its tokens, or their `sum`, which favours long traces."""
    top: Annotated[float, Field(gt=0, le=1)] | None = None
    """Share of the traces to keep, those with the highest utility, rounded to whole traces; or give above."""
    above: float | None = None
    """Keep traces with a utility above this: with 0, those that lower the trusted set's loss; or give top."""
    within: Literal["all", "source"] = "all"
    """Apply top to all traces together, or to the traces of each source file, which keeps the data mixture."""


class WeightedPath(Section):
    """One of several training files."""

    path: PathText
    """As a single data.train_path."""
    weight: Positive
    """Its share of the sequences of each batch, relative to the other files' weights."""


WRITTEN_BY_COMMANDS = ("keep.scores", "reference_log_probabilities", "token_weights")
"""Keys within `data` of files that are no conversations."""


class DataConfig(Section):
    """The data. Each path is a token store (`vcore-ds prepare`), or conversations: a .jsonl, .json, .csv, .parquet or
    .arrow file, a folder of them, a glob pattern, or a hub id (NAME::CONFIGURATION for one of several), with rows of
    {"messages": [{"role", "content"}, ...]}, {"prompt", "completion"}, ShareGPT or Alpaca, with or without `tools`.
    Conversations are converted to a store once."""

    train_path: PathText | Annotated[tuple[WeightedPath, ...], Strict(False), Field(min_length=1)]
    """Training data, relative to the working directory. Several files as [{path: PATH, weight: NUMBER}, ...]: each
    batch has sequences of all of them in proportion to the weights, and each file is repeated as its share requires."""
    keep: KeepConfig | None = None
    """Train on the traces with the highest scores only (`vcore-ds score`); null for all traces."""
    validation_path: PathText | Annotated[dict[Name, PathText], Field(min_length=1)] | None = None
    """Held-out conversations for the loss (the mean of method.normalization) before, during and after the run. Several
    sets as {NAME: PATH, ...}, each with a metric `validation_loss_NAME`; names have letters, digits and underscores.
    null for none."""
    validation_share: Annotated[float, Field(gt=0, lt=1)] | None = None
    """Instead of validation_path: hold out this share of the sequences of each training file, at least one, drawn by
    run.seed. They are never trained on, whatever data.keep selects, and listed in the run's held_out_rows.json. null
    for none."""
    probe_path: PathText | None = None
    """A pool of conversations from which the probe batch is drawn, such as a few trusted ones if the training data is
    noisy: utilities then measure what lowers *their* loss. null draws from the training data, as in the paper."""
    trusted_share: Annotated[float, Field(ge=0, lt=1)] = 0.0
    """Share of each batch that is drawn from probe_path instead of the training data, rounded to whole sequences; works
    with any method."""
    trusted_overlap: Literal["drop", "keep"] = "drop"
    """Training traces that are in probe_path too, with the same tokens: `drop` leaves them out of the training data,
    `keep` trains on them."""
    cutoff_length: NumTokens = 16384
    """Longest sequence, in tokens."""
    overlong: Literal["drop", "truncate"] = "drop"
    """Sequences longer than cutoff_length are dropped, or cut at their end."""
    supervise: Literal["all", "last"] = "all"
    """Learn all turns of the assistant, calls included, or the last one alone. `weight`, `loss` or `train` of a message
    (0 or 1) leaves out single turns."""
    split: Text = "train"
    """Split that is read of data sets on the hub, and of folders that have several."""
    columns: dict[ColumnName, Text] = {}  # noqa: RUF012  (pydantic copies it)
    """Names of columns that differ from ours, as {OURS: THEIRS}, such as {prompt: question, thinking: trajectory,
    completion: attempt}. Ours are messages, conversations, prompt, completion, instruction, input, output, history,
    thinking, system and tools."""
    max_malformed: Annotated[float, Field(ge=0, le=1)] = 0.01
    """Largest share of malformed rows in conversations. Up to it they are left out, and their number and the first are
    shown; above it the run ends."""
    cache_dir: Text | None = None
    """Folder of the stores made from conversations; null for ~/.cache/vcore_ds ($XDG_CACHE_HOME). Best on a file system
    that all nodes share; otherwise each node makes a copy."""
    reference_log_probabilities: PathText | None = None
    """For iw_sft with all parameters trained: the file that `vcore-ds reference` wrote for the training data."""

    token_weights: PathText | None = None
    """For method.name stored: the file that `vcore-ds keep --weights` wrote for the training data."""

    def train_files(self) -> tuple[WeightedPath, ...]:
        """The training files; a single path has weight 1."""
        path = self.train_path
        return (WeightedPath(path=path, weight=1.0),) if isinstance(path, str) else path

    def train_name(self) -> str:
        """The training data in a message: the path, or the paths."""
        return " + ".join(file.path for file in self.train_files())

    def paths(self) -> dict[str, str]:
        """Path of everything that has to be read, by key within `data`."""
        files = self.train_files()
        names = ["train_path"] if len(files) == 1 else [f"train_path[{i}]" for i in range(len(files))]
        optional = {
            "probe_path": self.probe_path,
            "keep.scores": None if self.keep is None else self.keep.scores,
            "reference_log_probabilities": self.reference_log_probabilities,
            "token_weights": self.token_weights,
        }
        return {
            **{name: file.path for name, file in zip(names, files, strict=True)},
            **{key: path for key, path in optional.items() if path is not None},
            **{f"validation_path{name and '.'}{name}": path for name, path in self.validation_paths().items()},
        }

    @property
    def has_held_out(self) -> bool:
        """Whether the held-out loss is measured."""
        return self.validation_path is not None or self.validation_share is not None

    def validation_paths(self) -> dict[str, str]:
        """Name -> path of the held-out sets; the name is empty for a single path."""
        path = self.validation_path
        return {} if path is None else {"": path} if isinstance(path, str) else path
