"""The explorer: a web page for changing the parameters of experts and watching the image change.

`render` computes codes and images with the model, `effects` measures what each parameter changes,
`maps` makes two-dimensional maps of codes, `chains` makes steps of Markov chains on its density,
`training` trains a small model in a process of its own (`learner`), `pictures` reads and writes
image files, `schema` defines requests and responses, `security` rejects unwanted requests, and
`server` combines them. Only `server` and `schema` need FastAPI and uvicorn, the extra ``explorer``.
`build` writes the page for a web server without Python.
"""
