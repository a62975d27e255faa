"""HTTP: OpenAI's endpoints over the engine, streamed, guarded, measured, and shut down with care.

`service.Service` holds what all endpoints share, `app.create_app` makes the ASGI application
from it, and `run.run_server` puts it on a socket.
"""
