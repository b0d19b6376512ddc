"""The page at /: a prompt box, and a live view of the engine.

    files        serves what is here: index.html, style/*.css, script/*.js
    script/main  begins; every script is a module that says what it takes from which other

Browsers load the scripts as they are written: nothing is joined, bundled or fetched from
elsewhere. The page is a client as any other, of /v1 and of /live.
"""
