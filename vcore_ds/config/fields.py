"""What the sections of a recipe are made of: types of numbers and texts with their bounds, and the base class."""

from typing import Annotated

from pydantic import AfterValidator, BaseModel, ConfigDict, Field

from vcore_ds.config.files import expand_home

LARGEST_COUNT = 2**31 - 1
"""Upper bound of what is counted: sequences, steps, tokens, ranks."""

LARGEST_FLOAT = 3.0e38
"""Upper bound of a number that meets tensors: the largest one of bf16 and fp32 is 3.4e38."""

LARGEST_SEED = 2**32 - 1
"""Upper bound of a seed: step and rank are added to multiples of it, within the 64 bits of a generator's state."""

LARGEST_MINUTES = 1.0e6
"""Upper bound of a duration, about two years: a timer holds it."""

Count = Annotated[int, Field(ge=1, le=LARGEST_COUNT)]
NumTokens = Annotated[int, Field(ge=2, le=LARGEST_COUNT)]
Minutes = Annotated[float, Field(gt=0, le=LARGEST_MINUTES)]
NonNegative = Annotated[float, Field(ge=0, le=LARGEST_FLOAT)]
Positive = Annotated[float, Field(gt=0, le=LARGEST_FLOAT)]
Beta = Annotated[float, Field(ge=0, lt=1)]
Text = Annotated[str, Field(min_length=1, max_length=4096, pattern=r"^[^\x00]+$")]
"""Nearly every text is a path, which has no NUL and, on Linux, at most 4096 bytes."""
PathText = Annotated[Text, AfterValidator(expand_home)]
"""A path, or an id on the hub: `~` becomes the home folder."""
Name = Annotated[str, Field(pattern=r"^\w{1,64}$")]
"""Part of a metric's name."""


class Section(BaseModel):
    """A section: unknown keys and silent conversions ("4" for 4, true for 1) are refused."""

    model_config = ConfigDict(
        extra="forbid", frozen=True, strict=True, allow_inf_nan=False, use_attribute_docstrings=True
    )
