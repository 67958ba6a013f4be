"""`python -m gpu_agent`."""

import sys

from gpu_agent.main import main

if __name__ == "__main__":
    sys.exit(main())
