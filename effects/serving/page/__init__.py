"""The page at /: a prompt box, and a live view of the engine.

    files        serves the files here: index.html, style/*.css, script/*.js
    script/main  the entry point; every script is a module with explicit imports

Browsers load the scripts as they are: nothing is joined, bundled or fetched from
elsewhere. The page is a client like any other, of /v1 and of /live.
"""
