"""`python -m benchmarks` compares a learning step with einsum; see `benchmarks.routing`."""

from benchmarks.routing import main

if __name__ == "__main__":
    main()
