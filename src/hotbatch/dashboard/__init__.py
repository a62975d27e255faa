"""The dashboard: a page that shows the batch live, and the same for a terminal.

It imports nothing else of the package: what it shows it hears from a server's /live, like any
other client. The server hands out the files of `page` as they are; there is no build step, and
the page loads nothing from anywhere else.
"""
