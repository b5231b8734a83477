"""The explorer: a web page for changing the parameters of experts and watching the image change.

`render` computes codes and images with the model, `chains` makes steps of Markov chains on its
density, `pictures` reads and writes image files, `schema` defines requests and responses,
`security` rejects unwanted requests, and `server` combines them. Only `server` and
`schema` need FastAPI and uvicorn, the extra ``explorer``.
"""
