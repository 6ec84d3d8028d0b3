"""The process that compares answers, run as a script so that it loads math-verify and nothing else.

Reads a line [expected, answer] of JSON, writes a line `true` or `false`, until its input ends. It bounds its own CPU
time for each pair: the kernel ends it where an expression hangs, also inside C code, where no Python signal handler
would run.
"""

import json
import logging
import math
import resource
import sys
import time

MAX_MEMORY_BYTES = 4 * 2**30


def main() -> None:
    """Compares pairs of answers, from one line of JSON each on stdin to one on stdout, until stdin ends."""
    limit_seconds = int(sys.argv[1])
    # Its own time limits are switched off, as they cannot end what hangs in C; it warns of that.
    logging.disable(logging.CRITICAL)
    from math_verify import parse, verify

    def equivalent(expected: str, answer: str) -> bool:
        gold, given = (parse(f"\\boxed{{{text}}}", parsing_timeout=None) for text in (expected, answer))
        return bool(gold and given) and verify(gold, given, timeout_seconds=None)

    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
    hard_memory = resource.getrlimit(resource.RLIMIT_AS)[1]
    resource.setrlimit(resource.RLIMIT_AS, (MAX_MEMORY_BYTES, hard_memory))
    hard_seconds = resource.getrlimit(resource.RLIMIT_CPU)[1]
    for line in sys.stdin:
        expected, answer = json.loads(line)
        # Whole seconds of CPU time, which other load does not change: at least the limit, less than a second more.
        resource.setrlimit(resource.RLIMIT_CPU, (math.ceil(time.process_time()) + limit_seconds, hard_seconds))
        try:
            result = equivalent(expected, answer)
        except Exception:  # whatever sympy raises about an expression: it is not shown to be equivalent
            result = False
        print(json.dumps(result), flush=True)


if __name__ == "__main__":
    main()
