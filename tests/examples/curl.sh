#!/bin/sh
# The API from a shell: what is served, a completion, and one that comes as it is written.
set -eu
server=${MINFER_URL:-http://127.0.0.1:8000}

curl -sS --fail "$server/v1/models"
echo

curl -sS --fail "$server/v1/completions" -H 'Content-Type: application/json' \
    -d '{"prompt": "def fibonacci(n):\n", "max_tokens": 48, "temperature": 0}'
echo

# -N shows each event as it comes.
curl -sSN --fail "$server/v1/chat/completions" -H 'Content-Type: application/json' \
    -d '{"messages": [{"role": "user", "content": "What is 17 + 25?"}],
         "max_tokens": 16, "stream": true}'
