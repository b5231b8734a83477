"""The Triton backend: GPU kernels that write neither votes nor coefficients to memory.

Importing this package does not import Triton, and neither do two of its modules:

`support`
    Whether the backend can run a call.
`launch`
    Launch options, division of sums, and the launch itself.

All others contain kernels and import Triton. `backend` collects the functions of the backend.
"""
