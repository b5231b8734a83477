"""The explorer: a page on which a person turns the parameters of experts and watches the image change.

`render` asks the model, `pictures` reads and writes image files, `schema` says what requests may hold, `guard` keeps
others out, `server` joins them. Only `server` and `schema` need FastAPI and uvicorn, the extra ``explorer``.
"""
