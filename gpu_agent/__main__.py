"""`python -m gpu_agent`: check that the packages are ours before anything of them is imported, then run."""

import sys

from gpu_agent.ours import shadowed


def start() -> int:
    """The exit status of the agent; 2 with one line when a folder shadows our packages."""
    problem = shadowed()
    if problem is not None:
        print(f"vramgate agent: {problem}", file=sys.stderr)
        return 2
    from gpu_agent.main import main

    return main()


if __name__ == "__main__":
    sys.exit(start())
