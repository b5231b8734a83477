"""`python -m benchmarks`: a learning step against einsum; see `benchmarks.routing`."""

from benchmarks.routing import main

if __name__ == "__main__":  # a process of its own measures memory, and imports this again
    main()
