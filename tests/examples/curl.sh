#!/bin/sh
# The API from a shell: what is served, a completion, and one that comes as it is written.
set -eu
server=${MINFER_URL:-http://127.0.0.1:8000}

curl -sS --fail "$server/v1/models"
echo

curl -sS --fail "$server/v1/completions" -H 'Content-Type: application/json' \
    -d '{"prompt": "class Stack:\n", "max_tokens": 16, "temperature": 0}'
echo

# -N shows each event as it comes.
curl -sSN --fail "$server/v1/chat/completions" -H 'Content-Type: application/json' \
    -d '{"messages": [{"role": "user", "content": "Return the size of a file."}],
         "max_tokens": 8, "stream": true}'
