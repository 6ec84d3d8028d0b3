"""`python -m tests.trajectories.write`: write the committed trajectories again, and report what has changed.

For an intended change of numbers: say in the commit which one, and why.
"""

from tests.trajectories import record, runs


def main() -> None:
    trajectories = runs.run_all()
    before = record.read() if record.FILE.exists() else {"environment": {}, "trajectories": {}}
    for case, trajectory in trajectories.items():
        changed = record.find_differences(trajectory, before["trajectories"].get(case, []), record.find_tolerance(case))
        print(f"{case}: " + (f"{len(changed)} numbers changed; {changed[0]}" if changed else "as before"))
    print(record.describe_environments(before["environment"]))
    record.write(trajectories)
    print(f"written: {record.FILE}")


if __name__ == "__main__":
    main()
