"""Faster implementations of `poecaps.functional`, and the choice between them.

`dispatch` chooses the backend of a call and says why not another. `torch_routing`, `cpu` and
`triton` are the backends; each has the functions of `dispatch.RoutingBackend`. `convolution` does
the same for the convolutions of the autoencoder.
"""
