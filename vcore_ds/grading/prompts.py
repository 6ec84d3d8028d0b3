"""The paper's prompts, one place for training and evaluation (appendix "Dataset Curation for supervised tasks")."""

_MATH = (
    "You are a helpful and accurate assistant for solving the following math problem:\n"
    "{question}\n"
    "\n"
    "Please reason step by step, and put the correct answer within \\boxed{{}} at last."
)

_CODE = (
    "You are an expert competitive programmer. You will be given a problem statement, test case constraints, and "
    "example test inputs and outputs.\n"
    "Please reason step by step about the solution (that must respect memory and time limits), then provide a complete "
    "implementation in c++17.\n"
    "\n"
    "Your solution must read input from standard input (cin) and write output to standard output (cout).\n"
    "Do not include any debug prints or additional output.\n"
    "\n"
    "Put your final solution within a single code block:\n"
    "```cpp\n"
    "<your code here>\n"
    "```\n"
    "\n"
    "# Problem\n"
    "{question}\n"
    "\n"
    "Now solve the problem and return the code."
)


def math_prompt(question: str) -> str:
    """The user's turn for a mathematical problem."""
    return _MATH.format(question=question)


def code_prompt(question: str) -> str:
    """The user's turn for a problem of competitive programming in C++."""
    return _CODE.format(question=question)
