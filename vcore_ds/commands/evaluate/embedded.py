"""Two tasks that need no download, for small models: procedural arithmetic, and problems that the quickstart holds out.

Small models seldom box an answer, so the last number of the output counts where there is no box. For the same reason
arithmetic is asked in its library's own words: with the paper's prompt, which asks for a box, SmolLM2-135M writes an
empty one and gets fewer right.
"""

from vcore_ds.commands.champ import HELD_OUT, champ_problems
from vcore_ds.commands.evaluate.problems import Problem, Task
from vcore_ds.grading.prompts import CHAMP

NUM_OF_EACH = 100
"""Problems of each of the two procedures."""
ARITHMETIC_SEED = 42


def arithmetic_problems() -> list[Problem]:
    """Sums and differences of two or three numbers, products of two, of one or two digits.

    `basic_arithmetic` of the same library is left out: without parentheses, its answers are wrong where it divides.
    """
    from reasoning_gym import create_dataset

    settings = {"seed": ARITHMETIC_SEED, "size": NUM_OF_EACH, "max_digits": 2}
    made = {
        "sum": create_dataset("chain_sum", max_terms=3, **settings),
        "product": create_dataset("products", max_terms=2, **settings),
    }
    return [
        Problem(f"{name}-{number:03d}", entry["question"], entry["answer"])
        for name, entries in made.items()
        for number, entry in enumerate(entries)
    ]


def champ_held_out() -> list[Problem]:
    """CHAMP's problems with a number as their answer, of which the quickstart trains on no trace."""
    problems = champ_problems()
    return [
        Problem(name, CHAMP.format(statement=problems[name]["_text"].strip()), problems[name]["_answer"])
        for name in HELD_OUT
    ]


EMBEDDED = (
    Task("arithmetic", "procedural arithmetic, 200 problems", "number", make=arithmetic_problems, max_new_tokens=96),
    Task("champ", "CHAMP, 30 held-out problems", "number", make=champ_held_out, max_new_tokens=256),
)
