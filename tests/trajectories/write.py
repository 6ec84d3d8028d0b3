"""`python -m tests.trajectories.write`: writes the committed trajectories again, and says what has changed.

For a change of numerics that is meant: say in the commit which one, and why.
"""

from tests.trajectories import record, runs


def main() -> None:
    found = runs.run_all()
    before = record.read() if record.FILE.exists() else {"environment": {}, "trajectories": {}}
    for case, trajectory in found.items():
        changed = record.differences(trajectory, before["trajectories"].get(case, []), record.tolerance_of(case))
        print(f"{case}: " + (f"{len(changed)} numbers changed; {changed[0]}" if changed else "as before"))
    print(record.describe_environments(before["environment"]))
    record.write(found)
    print(f"written: {record.FILE}")


if __name__ == "__main__":
    main()
